"""The `bursar` command: what an operator does to a ledger from a terminal or a script."""

from bursar.cli.app import main

__all__ = ["main"]
