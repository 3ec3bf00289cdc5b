"""The documentation says what the code says."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests.arriving import XPUB

from bursar.api.problems import REFUSED, STATUSES
from bursar.flows.deposits import ARRIVALS, DEPOSITS, DepositCode
from bursar.flows.deposits.arrivals import STATUS
from bursar.flows.deposits.sweep import SWEEPS
from bursar.flows.payouts import MACHINE as PAYOUTS
from bursar.flows.transfers import MACHINE, Code
from bursar.flows.withdrawals import MACHINE as WITHDRAWALS
from bursar.model import errors
from bursar.rails.trading.rules import REFUSALS

DOCS = Path(__file__).parents[2] / "docs"
REFERENCE = DOCS / "reference" / "errors.md"
TRANSFERS = (DOCS / "concepts" / "transfers.md").read_text(encoding="utf-8")


def concrete(family: type[errors.BursarError]) -> Iterator[type[errors.BursarError]]:
    """Every error class that has a code of its own."""
    for kind in family.__subclasses__():
        if "code" in vars(kind):
            yield kind
        yield from concrete(kind)


def test_every_error_is_in_the_reference_with_its_code_meaning_and_facts() -> None:
    """Given an error class, then its row in docs/reference/errors.md names code, class, meaning and facts."""
    rows = REFERENCE.read_text().splitlines()
    kinds = [kind for kind in concrete(errors.BursarError) if kind.__module__ == errors.__name__]
    assert len(kinds) > 25
    for kind in kinds:
        meaning = (kind.__doc__ or "").strip().splitlines()[0]
        facts = ", ".join(f"`{field.name}`" for field in dataclasses.fields(kind))
        found = [r for r in rows if f"`{kind.code}`" in r and f"`{kind.__name__}`" in r]
        assert len(found) == 1, kind.__name__
        assert meaning in found[0]
        assert found[0].endswith(f"| {facts} |")


def test_codes_are_not_shared() -> None:
    """A program that switches on the code must be able to tell two errors apart."""
    codes = [kind.code for kind in concrete(errors.BursarError)]
    assert len(codes) == len(set(codes))


def test_the_picture_of_transfers_is_the_machine() -> None:
    (picture,) = re.findall(r"```mermaid\n(.*?)```", TRANSFERS, re.DOTALL)
    assert picture.strip() == MACHINE.mermaid().strip()


def test_the_picture_of_payouts_is_the_machine() -> None:
    (picture,) = re.findall(r"```mermaid\n(.*?)```", (DOCS / "concepts" / "payouts.md").read_text(), re.DOTALL)
    assert picture.strip() == PAYOUTS.mermaid().strip()


def test_the_picture_of_withdrawals_is_the_machine() -> None:
    (picture,) = re.findall(r"```mermaid\n(.*?)```", (DOCS / "concepts" / "withdrawals.md").read_text(), re.DOTALL)
    assert picture.strip() == WITHDRAWALS.mermaid().strip()


def test_the_pictures_of_deposits_are_the_machines() -> None:
    pictures = re.findall(r"```mermaid\n(.*?)```", (DOCS / "concepts" / "deposits.md").read_text(), re.DOTALL)
    assert [one.strip() for one in pictures] == [machine.mermaid().strip() for machine in (ARRIVALS, SWEEPS)]


def test_the_rules_of_deposits_in_the_how_to_are_taken() -> None:
    text = (DOCS / "how-to" / "deposits.md").read_text()
    (block,) = re.findall(r"```toml\n(# deposits-bsc.toml\n.*?)```", text, re.DOTALL)
    rules, _ = DEPOSITS.write("bsc", tomllib.loads(block.replace("xpub…", XPUB)))
    assert DEPOSITS.check is not None
    DEPOSITS.check(None, rules)  # raises what is wrong
    assert (rules.sweep_mandate, rules.gas_mandate) == ("sweep", "gas")
    mandates = re.findall(r"^\[mandates\.(\w+)\]", text, re.MULTILINE)
    assert mandates == [rules.sweep_mandate, rules.gas_mandate]


def test_every_state_and_refusal_of_deposits_is_explained() -> None:
    concept = (DOCS / "concepts" / "deposits.md").read_text()
    for state, status in STATUS.items():
        told = "nothing" if status == "ignored" else status
        assert f"| `{state}` | {told} |" in concept
    reference = (DOCS / "reference" / "api.md").read_text()
    for code in DepositCode:
        assert f"| `{code}` |" in reference, code


def test_every_code_of_transfers_is_explained_with_its_status() -> None:
    """Refusals of a request by their HTTP status; those of the ledger's end, which end a transfer, as part of a 200."""
    table = TRANSFERS[TRANSFERS.index("## All codes of transfers") :]
    rows = dict(re.findall(r"^\| `([A-Z_]+)` \| ([0-9, ]+) \|", table, re.MULTILINE))
    for code in Code:
        assert str(STATUSES.get(code, REFUSED)) in rows[code].split(", "), code
    for refusal in REFUSALS - {"INSUFFICIENT_FROZEN", "SAME_ACCOUNT"}:  # of operations that transfers do not use
        assert "200" in rows[refusal].split(", "), refusal
