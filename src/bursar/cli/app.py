"""The command itself: its options, its commands (loaded when they are used), and how it ends.

No command is imported here, and no library that `bursar --help` does not need. Every ending is decided in one place,
`Root.main`: one line on stderr (or a JSON object on stdout) and an exit code that a script can act on, never a
traceback for what a user or a database can do. Set BURSAR_TRACEBACK=1 to see where an unexpected error came from.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NoReturn

import click

from bursar import garbage
from bursar.cli.errors import Unprinted
from bursar.cli.output import shown
from bursar.cli.state import DEFAULT_DATABASE, State
from bursar.model.errors import BursarError, Conflict, OutcomeUnknown, StoreError

OK, REFUSED, USAGE, CONFLICT, DATABASE, UNKNOWN, UNPRINTED = range(7)
# What an error of ours ends with, by the first kind that it is of; REFUSED if it is of none.
CODES = {OutcomeUnknown: UNKNOWN, Unprinted: UNPRINTED, StoreError: DATABASE, Conflict: CONFLICT}
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
PIPE_CLOSED = 141  # 128 + SIGPIPE
TRACEBACK_VARIABLE = "BURSAR_TRACEBACK"

# name → where the command is, and what it does in one line.
COMMANDS = {
    "migrate": ("bursar.cli.commands.database:migrate", "Set a database up, or bring it to this version."),
    "asset": ("bursar.cli.commands.asset:asset", "Units of value: create, list, suspend, resume."),
    "book": ("bursar.cli.commands.book:book", "Which assets and accounts may take part: create, list."),
    "account": ("bursar.cli.commands.account:account", "Accounts: create, list, show, freeze, close, compact."),
    "ledger": ("bursar.cli.commands.ledger:ledger", "Move value and look at it: deposit, pay, history, show, events."),
    "hold": ("bursar.cli.commands.hold:hold", "Money set aside: authorize, confirm, void, list, expire."),
    "audit": ("bursar.cli.commands.audit:audit", "Check the invariants: is every unit of value accounted for?"),
    "recover": ("bursar.cli.commands.database:recover", "Go on after the database was restored from a backup."),
    "rebuild": ("bursar.cli.commands.database:rebuild", "Make the disposable tables anew from the value tables."),
    "serve": ("bursar.cli.commands.serve:serve", "Run the API, a worker and, where none is named, the core."),
    "worker": ("bursar.cli.commands.serve:worker", "Drive records that are due, beside any number of serves."),
    "transfer": (
        "bursar.cli.commands.transfer_cores:transfer",
        "Transfers: create, list, show, query, stop, allow; their cores.",
    ),
    "payout": ("bursar.cli.commands.payout:payout", "Payments on chains: request, list, show, approve, bump, cancel."),
    "withdrawal": (
        "bursar.cli.commands.withdrawals:withdrawal",
        "Withdrawals of users: quote, request, list, approve, reject, pause; their rules.",
    ),
    "deposit": (
        "bursar.cli.commands.deposits:deposit",
        "Deposits from chains: address, list, show, confirm, reject; their rules, scans, sweeps.",
    ),
    "wallet": ("bursar.cli.commands.wallet:wallet", "Our wallets on chains: list, put, approve, pause, resume."),
    "chain": ("bursar.cli.commands.chain:chain", "Chains and the assets on them: list, nodes, put, approve."),
    "flow": ("bursar.cli.commands.flow:flow", "Records of any flow: list, show, pause, resume, retry, force, signal."),
    "alert": ("bursar.cli.commands.alert:alert", "Alerts of any flow: list, acknowledge."),
    "token": ("bursar.cli.commands.serve:token", "Make a token for trying the API out."),
    "openapi": ("bursar.cli.commands.serve:openapi", "Print the OpenAPI description of the API."),
    "core": ("bursar.cli.commands.core:core", "The trading core: run it, or inspect its log and snapshots."),
    "signer": (
        "bursar.cli.commands.signer:signer",
        "The signer: its keys, running it, halting it, its log; approvals.",
    ),
    "sim": ("bursar.sim.command:command", "Run a scenario on the simulator, crashing it everywhere."),
    "bench": ("bursar.bench.command:command", "Measure it beside the least the machine must do."),
    "chaos": ("bursar.chaos.command:chaos", "Kill everything at random under load; nothing may be lost."),
    "demo": ("bursar.demo.command:demo", "All of it, killed with money in flight; nothing is lost."),
    "demo-payouts": (
        "bursar.demo.payouts:demo_payouts",
        "Payouts on a chain that misbehaves; simulated, or anvil.",
    ),
    "demo-withdrawals": (
        "bursar.demo.withdrawals:demo_withdrawals",
        "Deposits and withdrawals on two chains, approved by you.",
    ),
}
# Commands of packages that the wheel does not have (docs/decisions/0030-what-the-wheel-ships.md).
OF_THE_REPOSITORY = ("bench", "chaos")

HELP = """Move money between accounts, and never lose or duplicate any.

\b
First steps:
  bursar asset create USDT --precision 6
  bursar account create external:bank --policy external
  bursar account create user:1001:funding
  bursar ledger deposit external:bank user:1001:funding USDT 100.00 --key dep-1
  bursar ledger balance user:1001:funding
  bursar audit
"""

EPILOG = """\b
Exit codes:
  0  done
  1  refused, or an audit found something broken; nothing was written
  2  wrong usage
  3  conflict: others were faster, or commits are under way; try again
  4  the database can't be used; or a core, a folder, an address
  5  the outcome is unknown: repeat with the same --key to learn it
  6  done, and committed, but the result could not be printed
"""


class Root(click.Group):
    """The command, and the one place where it ends. Its commands are imported when they are run, not when they are
    listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name in COMMANDS if name not in OF_THE_REPOSITORY or find_spec(f"bursar.{name}")]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        try:
            found = getattr(import_module(module), name)
        except ModuleNotFoundError as error:
            if error.name is None or not module.startswith(error.name):
                raise
            where = f"make setup && .venv/bin/bursar {cmd_name}"
            why = f"{cmd_name!r} is not in the installed package; run it in a clone of the repository: {where}"
            raise click.UsageError(why, ctx) from None
        assert isinstance(found, click.Command)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(ctx)])

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> NoReturn:
        """Run, and exit with a code that means something."""
        words = list(sys.argv[1:] if args is None else args)
        state = State(json="--json" in words)
        extra |= {"standalone_mode": False, "obj": state}
        try:
            result = super().main(words, prog_name="bursar", **extra)
            code = result if isinstance(result, int) else OK
            sys.stdout.flush()
        except BrokenPipeError:
            _forget_output()
            code = PIPE_CLOSED
        except SystemExit:
            # click ends by itself when a pipe is closed, having wrapped stdout so that the last flush is quiet.
            if not type(sys.stdout).__name__.endswith("PacifyFlushWrapper"):
                raise
            code = PIPE_CLOSED
        except (KeyboardInterrupt, click.Abort):
            code = INTERRUPTED
        except click.exceptions.Exit as end:
            code = end.exit_code
        except Exception as error:
            if os.environ.get(TRACEBACK_VARIABLE):
                raise
            code = _report(error, state)
        sys.exit(code)


def _report(error: Exception, state: State) -> int:
    """One line on stderr, or an object on stdout; returns the exit code."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError) and not state.json:
        click.echo(error.format_message(), err=True)  # the help itself: not one line, but what was asked for
        return USAGE
    name, message, facts, code = explain(error)
    try:
        if state.json and code != UNPRINTED:
            click.echo(json.dumps({"code": name, "message": message, "facts": facts}))
        else:
            click.echo(f"error: {name}: {shown(message)}", err=True)
        if code == UNPRINTED:
            _forget_output()
    except BrokenPipeError:
        _forget_output()
        return PIPE_CLOSED
    except OSError:  # it can't be printed; the code still says it
        _forget_output()
    return code


def explain(error: Exception) -> tuple[str, str, dict[str, Any], int]:
    """An error's name, message, facts and exit code."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        return "USAGE", f"a command is missing (see `{error.ctx.command_path} --help`)", {}, USAGE
    if isinstance(error, click.ClickException):
        context = getattr(error, "ctx", None)
        hint = f" (see `{context.command_path} --help`)" if context is not None else ""
        return "USAGE", " ".join(error.format_message().split()) + hint, {}, USAGE
    if isinstance(error, BursarError):
        code = next((code for kind, code in CODES.items() if isinstance(error, kind)), REFUSED)
        said = "; ".join([str(error), *getattr(error, "__notes__", [])])
        return error.code, " ".join(said.split()), error.facts, code
    text = " ".join(str(error).split()) or "no more is known"
    why = f"{type(error).__name__}: {text}; set {TRACEBACK_VARIABLE}=1 to see where, and run `bursar audit`"
    return "UNEXPECTED", why, {}, DATABASE


def _forget_output() -> None:
    """The output has no reader any more. Python would complain once more when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_what_is_closed() -> None:
    """A caller that closes stdout or stderr (`>&-`) wants nothing printed.

    Python has None for a closed one, and the next file that is opened takes its number: it would be printed into.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which is this one
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


@click.group(cls=Root, help=HELP, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--database",
    metavar="URL",
    envvar="BURSAR_DATABASE",
    show_envvar=True,
    default=DEFAULT_DATABASE,
    show_default=True,
    help="sqlite:///file.db (four slashes: absolute path) or postgresql://user@host/name.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, errors too. Also accepted after the command.")
@click.version_option(package_name="bursar", message="%(prog)s %(version)s")
@click.pass_context
def root(ctx: click.Context, database: str, as_json: bool) -> None:
    """Move money between accounts, and never lose or duplicate any."""
    state = ctx.ensure_object(State)
    state.database = database
    state.database_given = ctx.get_parameter_source("database") is click.core.ParameterSource.COMMANDLINE
    state.json = state.json or as_json
    if state.json:
        # Commands of other packages have a --json of their own; tell them what was said in front of their name.
        ctx.default_map = {name: {"json": True, "as_json": True} for name in ("sim", "bench")}


def main() -> NoReturn:
    """The console script."""
    _open_what_is_closed()
    garbage.while_loading()
    root.main()
