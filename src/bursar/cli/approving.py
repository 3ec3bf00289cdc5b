"""How a person approves a payment at the command line: read it in words, be asked, sign it with a key of one's own.

The key never leaves its encrypted file. What is signed is what was shown: the payment is read once.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from bursar.cli.commands.signer_keys import passphrase, passphrase_option
from bursar.cli.errors import Unusable
from bursar.cli.output import shown
from bursar.cli.types import together

if TYPE_CHECKING:
    from bursar.ledger import Ledger
    from bursar.model.authorizations import Approval, Payment

approval_options = together(
    click.option("--key", metavar="FILE", required=True, help="The approver's own key (`bursar signer approver-key`)."),
    click.option("--digest", default="", help="Sign only if the payment has this digest, as you were given it."),
    click.option("--yes", is_flag=True, help="Do not ask; for programs that have asked."),
    passphrase_option,
)


async def signed_approval(
    ledger: Ledger, payment: Payment, *, key: str, digest: str, yes: bool, passphrase_file: str | None
) -> Approval:
    """Show what the signature would cover, ask, and sign it. Nothing is signed if the digest is another one."""
    from bursar.flows.payouts.words import covered
    from bursar.ports import SystemPorts
    from bursar.signer.approvals import approve

    rows = [*covered(payment, await ledger.asset(payment.asset)), ("digest", payment.digest())]
    for name, value in rows:
        click.echo(f"{name:>18}  {shown(value)}", err=True)
    if digest and digest != payment.digest():
        raise Unusable(f"the payment's digest is {payment.digest()}, not {digest}: nothing was signed")
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("there is no terminal to ask at: say --yes if a person has seen it")
        click.confirm("Approve this payment?", abort=True, err=True)
    return approve(SystemPorts().files(), key, passphrase(passphrase_file, "Passphrase of the key"), payment)
