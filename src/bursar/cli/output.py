"""Output: tables for people, JSON for programs, bars for the impatient.

Tables go to stdout as wide as they need to be when that is a file or a pipe, and as wide as the terminal when it is
one. Bars go to stderr, and only if that is a terminal, so that no log is ever full of them.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

import click
import msgspec

from bursar.cli.errors import Unprinted
from bursar.model.money import Money
from bursar.model.views import moment

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

Drawing: TypeAlias = "RenderableType"  # rich is loaded when something is drawn
PIPE_WIDTH = 1_000  # columns of a pipe or a file: nothing is wrapped or cut

_CONTROLS = re.compile("[\x7f-\x9f]")  # those below are escaped by JSON itself

Advance = Callable[[str, int, int], None]


class Output:
    """Where a command's results go."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self._console: Console | None = None

    @property
    def console(self) -> Console:
        """The terminal, or the pipe."""
        if self._console is None:
            self._console = stdout_console()
        return self._console

    def show(self, value: Any, draw: Callable[[], Drawing | str]) -> None:
        """The value for a program, or what `draw` makes of it for a person."""
        with _told_if_unprinted():
            if self.as_json:
                click.echo(to_json(value, indent=2))
            else:
                self._print(draw())

    def line(self, value: Any, text: str) -> None:
        """One of many, as they come: a line of JSON, or a line of text. Flushed: a reader may be waiting."""
        with _told_if_unprinted():
            click.echo(to_json(value) if self.as_json else lines_shown(text))

    def say(self, text: str) -> None:
        """Something for a person only."""
        if not self.as_json:
            self._print(text)

    def _print(self, what: Drawing | str) -> None:
        # Text is left to the terminal to break: a hash, or a line to be copied, must not get a newline in its middle.
        if isinstance(what, str):
            self.console.print(lines_shown(what), markup=False, highlight=False, soft_wrap=True)
        else:
            self.console.print(what, markup=False, highlight=False)

    @contextlib.contextmanager
    def bar(self, title: str) -> Iterator[Advance]:
        """A bar on long work. Gives a function to call with (what, done, of how much; 0: unknown)."""
        if self.as_json or not sys.stderr.isatty():
            yield lambda _what, _done, _total: None
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(title, total=None)

            def advance(what: str, done: int, total: int) -> None:
                progress.update(task, description=f"{title}: {what}", completed=done, total=total or None)

            yield advance


@contextlib.contextmanager
def _told_if_unprinted() -> Iterator[None]:
    """Results are printed when all is done: a failure to print them must not look like a failure to do it."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise Unprinted(error.strerror or str(error)) from error


def stdout_console() -> Console:
    """A console that lets a closed pipe through as the error it is."""
    from rich.console import Console

    class PipedConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

        def print(self, *objects: Any, **how: Any) -> None:
            # Not cropped: what is too wide goes on in the terminal's next line, with every digit.
            super().print(*objects, **({"crop": False} | how))

    wide = None if sys.stdout.isatty() else PIPE_WIDTH
    return PipedConsole(width=wide, highlight=False, soft_wrap=False)


def table(
    *columns: str,
    rows: Sequence[Sequence[Any]],
    title: str | None = None,
    right: Sequence[str] = (),
    whole: Sequence[str] = (),
    empty: str = "",
) -> Drawing:
    """A table, or `empty` if it would have no rows. The columns named in `right` are numbers, those in `whole` ids and
    times: neither is ever broken."""
    if empty and not rows:
        return empty
    from rich.text import Text

    from bursar.cli.tables import TextTable

    cells = [[cell if isinstance(cell, Text) else Text(text(cell)) for cell in row] for row in rows]
    return TextTable(columns, cells, title=title, right=right, whole=whole)


def stack(*parts: Drawing) -> Drawing:
    """One below the other."""
    from rich.console import Group

    return Group(*parts)


def text(value: Any) -> str:
    """A value as it stands in a table."""
    match value:
        case None:
            return ""
        case datetime():
            return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")
        case bool():
            return "yes" if value else "no"
        case StrEnum():
            return value.value
        case IntEnum():
            return value.name.lower()
        case _:
            return shown(str(value))


def shown(text: str) -> str:
    """Text from outside, fit for a terminal: what would clear it, colour it or feign a line is written out instead."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def lines_shown(text: str) -> str:
    """The same for a text of ours that has several lines; what came from outside is `shown` before it gets in there."""
    return "\n".join(map(shown, text.split("\n")))


def to_json(value: Any, indent: int | None = None) -> str:
    """A value for programs; a person may look at that too, so nothing in it moves a terminal."""
    made = json.dumps(plain(value), indent=indent, ensure_ascii=False)
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", made)


def time_text(at: datetime) -> str:
    """A time in UTC, to the millisecond."""
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.") + f"{at.microsecond // 1000:03d}"


def plain(value: Any) -> Any:
    """A value as JSON has it: money as text with its asset, times in ISO 8601, enums by name."""
    match value:
        case Money():
            return {"asset": value.asset, "amount": str(value)}
        case msgspec.Struct():
            names = value.__struct_fields__
            return dict(_field(name, getattr(value, name)) for name in names)
        case datetime():
            return value.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        case StrEnum():
            return value.value
        case IntEnum():
            return value.name.lower()
        case bytes():
            return value.hex()
        case dict():
            return {str(key): plain(item) for key, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
        case _:
            return value


def _field(name: str, value: Any) -> tuple[str, Any]:
    if name.endswith("_us"):
        return name.removesuffix("_us"), None if value is None else plain(moment(value))
    return name, plain(value)
