"""The whole of `bursar deposit`: its commands are in two files, each of which adds its own to the group."""

from __future__ import annotations

from bursar.cli.commands import deposit_rules
from bursar.cli.commands.deposit import deposit

__all__ = ["deposit", "deposit_rules"]
