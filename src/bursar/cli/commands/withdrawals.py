"""The whole of `bursar withdrawal`: its commands are in several files, each of which adds its own to the group."""

from __future__ import annotations

from bursar.cli.commands import withdrawal_addresses, withdrawal_import, withdrawal_people, withdrawal_rules
from bursar.cli.commands.withdrawal import withdrawal

__all__ = ["withdrawal", "withdrawal_addresses", "withdrawal_import", "withdrawal_people", "withdrawal_rules"]
