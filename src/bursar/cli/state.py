"""What one run of the command knows: which database, and whether a person or a program reads the output."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import click

from bursar.cli.output import Output
from bursar.cli.place import open_database
from bursar.config import Config, read
from bursar.instance import Bursar

DEFAULT_DATABASE = "sqlite:///bursar.db"

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class State:
    """Filled by the options, read by the commands."""

    database: str = DEFAULT_DATABASE
    database_given: bool = False  # on the command line, as against by the environment or by default
    json: bool = False


def state() -> State:
    """That of the running command."""
    return click.get_current_context().ensure_object(State)


def output() -> Output:
    """Where the results of the running command go."""
    return Output(as_json=state().json)


def configured(file: str | None, **given: Any) -> Config:
    """The configuration: file, environment, options."""
    if state().database_given:
        given["database"] = state().database
    return read(file or "", os.environ, **given)


class Command(click.Command):
    """A command that also takes --json, and whose help ends with examples."""

    def __init__(self, *args: Any, examples: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(
            click.Option(["--json", "as_json"], is_flag=True, expose_value=False, callback=_json, help="Print JSON.")
        )
        if examples:
            lines = "\n".join(f"  {line.strip()}" for line in examples.strip().splitlines())
            self.epilog = f"\b\nExamples:\n{lines}"


def _json(ctx: click.Context, _parameter: click.Parameter, value: bool) -> None:
    state = ctx.ensure_object(State)
    state.json = state.json or value


class Group(click.Group):
    """A group of such commands, in the order in which they are written."""

    command_class = Command

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def opening(
    open_: Callable[[click.Context], AbstractAsyncContextManager[T]],
) -> Callable[[Callable[Concatenate[T, Output, P], Awaitable[int | None]]], Callable[P, int | None]]:
    """Turn `async def body(opened, out, …)` into a command: what `open_` gives is open around it."""

    def decorate(body: Callable[Concatenate[T, Output, P], Awaitable[int | None]]) -> Callable[P, int | None]:
        @functools.wraps(body)
        def run(*args: P.args, **kwargs: P.kwargs) -> int | None:
            async def work() -> int | None:
                async with open_(click.get_current_context()) as opened:
                    return await body(opened, output(), *args, **kwargs)

            return asyncio.run(work())

        return run

    return decorate


def on_database(
    *, may_create: bool = False
) -> Callable[[Callable[Concatenate[Bursar, Output, P], Awaitable[int | None]]], Callable[P, int | None]]:
    """A command that needs the database that the options name."""
    return opening(lambda _: open_database(state().database, may_create=may_create))
