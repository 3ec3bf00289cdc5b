"""The action of a sweep: look at what lies there, bring gas if it takes some, and order the payout to our wallet.

Every payout is asked for under a key made of the sweep and a count that is on disk, so that a crash asks for the same
one again. What to move is read from the ledger and from the chain, and the smaller of the two counts: what is not
booked yet is not moved.
"""

from __future__ import annotations

from typing import Final

import msgspec

from bursar.engine import Answer, Engine, FlowRecord
from bursar.flows.deposits.judging import Judging, ledger_units, sweep_at
from bursar.flows.deposits.rules import DEPOSITS, DepositRules, mandate_of
from bursar.flows.deposits.sweep import Sweep
from bursar.flows.payouts.checks import PayoutRequest, to_chain_units
from bursar.flows.payouts.documents import AssetDocument
from bursar.flows.payouts.machine import CONFIRMED, MACHINE, OPEN
from bursar.flows.payouts.outside import OUTAGE_S, Outside, fails, waits
from bursar.flows.payouts.payout import SOURCE, wallet_account
from bursar.flows.payouts.payouts import Payouts
from bursar.model.errors import Refusal
from bursar.model.flow_rows import RowState
from bursar.model.money import Asset
from bursar.model.outcome import Outcome
from bursar.model.records import Priority
from bursar.rails.chain import (
    Chain,
    Fee,
    FeeTooHigh,
    NodesUnavailable,
    Order,
    Shape,
    WalletShort,
    WouldRevert,
)

ACTOR: Final = "sweeper"
AGAIN_S: Final = 30.0
AGAIN_S_MAX: Final = 3_600.0
PRICE_RISE: Final = (5, 4)  # by how much fees may rise between a quote and the payment


class NotNow(Exception):
    """It waits for a cause that is not its own."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Sweeping:
    """The action of `sweeping`."""

    def __init__(self, payouts: Payouts, judging: Judging, engine: Engine) -> None:
        self.out: Outside = payouts.out
        self._payouts = payouts
        self._judging = judging
        self._engine = engine

    async def sweep(self, item: FlowRecord[Sweep]) -> Answer:
        """One step: watch the payout that is under way, or order the next one, or end."""
        body = item.body
        if body.payout and (answer := await self._under_way(body)) is not None:
            return answer
        try:
            return await self._next(item)
        except (NotNow, FeeTooHigh, NodesUnavailable) as cause:
            return waits(item, cause.code, str(cause), OUTAGE_S)
        except (WalletShort, WouldRevert, Refusal) as refused:
            return waits(item, refused.code, str(refused), AGAIN_S)

    async def _under_way(self, body: Sweep) -> Answer | None:
        """What became of the payout that was ordered last; None: it is paid, and there is more to see to."""
        record = await self._engine.record(MACHINE.name, body.payout)
        if record.state in OPEN:
            return Answer(outcome=Outcome.PENDING, unchanged=True, decision=True)
        if record.state == CONFIRMED:
            return None
        after = msgspec.structs.replace(body, payout="", failed=body.failed + 1)
        again_s = min(AGAIN_S * 2**body.failed, AGAIN_S_MAX)
        why = f"{record.id} has failed: {record.error}"
        return Answer(
            outcome=Outcome.PENDING, code="FAILED", message=why, body=after, retry_after_s=again_s, decision=True
        )

    async def _next(self, item: FlowRecord[Sweep]) -> Answer:
        body = item.body
        found = await self.out.documents.current(DEPOSITS, body.chain)
        rules = None if found is None else found.body
        asset = await self._payouts.ledger.asset(body.asset)
        at = sweep_at(rules, asset)
        if rules is None or at is None:
            return msgspec.structs.replace(fails("NOT_SWEPT", f"{body.asset} is swept no more"), decision=True)
        chain = self.out.chains.get(body.chain)
        on_chain = (await self._judging.assets(body.chain)).get(body.contract)
        target = (await self.out.wallets.of_chain(body.chain)).get(rules.sweep_to)
        if chain is None or on_chain is None or target is None:
            raise NotNow(
                "NOT_CONFIGURED", f"nodes of {body.chain}, its asset or the wallet {rules.sweep_to} are missing"
            )
        booked = -(await self._payouts.ledger.balance(wallet_account(body.chain, body.wallet), body.asset)).minor
        if booked < at:
            return Answer(outcome=Outcome.SUCCESS, decision=True)
        order = Order(
            payout=item.id, to=target.address, contract=body.contract, amount=1, gas_limit_max=on_chain.gas_limit_max
        )
        minor, gas = await self._movable(body, chain, on_chain, asset, booked, order)
        if gas:
            return await self._bring_gas(item, rules, chain, gas)
        if minor * 2 < booked:
            why = f"only {asset.of_minor(minor)} of {asset.of_minor(booked)} {body.asset} can be moved, at today's fees"
            raise NotNow("NOT_WORTH_IT", why)
        wanted = PayoutRequest(
            account=wallet_account(body.chain, rules.sweep_to),
            asset=body.asset,
            chain=body.chain,
            to=target.address,
            amount=str(asset.of_minor(minor)),
            priority="low",
            source=_key(item),
            mandate=mandate_of(rules, body.asset),
            wallet=body.wallet,
        )
        return await self._order(item, wanted)

    async def _movable(
        self, body: Sweep, chain: Chain, on_chain: AssetDocument, asset: Asset, booked: int, order: Order
    ) -> tuple[int, int]:
        """How much can be moved, in the ledger's units; and how much coin has to be brought first, in the chain's."""
        contracts = (body.contract,) if body.contract else ()
        there = await chain.balances(body.address, contracts)
        if body.contract:
            has, _ = ledger_units(there.tokens.get(body.contract, 0), on_chain.decimals, asset.precision)
            minor = min(booked, has)
            raw = to_chain_units(minor, asset.precision, on_chain.decimals) or 0
            if not raw:
                raise NotNow("NOTHING_THERE", f"{body.wallet} has none of the {body.asset} that is booked")
            fee = await self._fee(chain, body, msgspec.structs.replace(order, amount=raw))
            needs = fee if isinstance(fee, int) else fee.worst
            return minor, _risen(needs) - there.coin if there.coin < needs else 0
        fee = await self._fee(chain, body, order)
        needs = fee if isinstance(fee, int) else fee.worst
        has, _ = ledger_units(max(0, there.coin - _risen(needs)), on_chain.decimals, asset.precision)
        return min(booked, has), 0

    async def _fee(self, chain: Chain, body: Sweep, order: Order) -> Fee | int:
        """What the payment costs; the coin that it needs, where that is not there."""
        try:
            return await chain.quote(body.address, order, Shape.PAY, Priority.LOW)
        except WalletShort as short:
            if short.asset == body.contract:
                raise
            return short.needs - (0 if order.contract else order.amount)

    async def _bring_gas(self, item: FlowRecord[Sweep], rules: DepositRules, chain: Chain, gas: int) -> Answer:
        body = item.body
        if not rules.gas_from:
            raise NotNow("NO_GAS", f"{body.wallet} has no coin for the fee, and no wallet brings any (gas_from)")
        coin = await self._payouts.ledger.asset(chain.network.native)
        wanted = PayoutRequest(
            account=wallet_account(body.chain, body.wallet),
            asset=chain.network.native,
            chain=body.chain,
            to=body.address,
            amount=str(coin.of_minor(gas)),  # the ledger has the coin's own decimals, or gas could not be booked
            priority="low",
            source=_key(item),
            mandate=rules.gas_mandate,
            wallet=rules.gas_from,
        )
        return await self._order(item, wanted)

    async def _order(self, item: FlowRecord[Sweep], wanted: PayoutRequest) -> Answer:
        """Ask for it, once per count: after a crash the same one is found, whatever has changed since."""
        payout = await self._ordered(wanted.source)
        if not payout:
            payout = (await self._payouts.request(wanted, key=wanted.source, actor=ACTOR)).id
        body = item.body
        after = msgspec.structs.replace(body, payout=payout, payouts=(*body.payouts, payout), asked=body.asked + 1)
        return Answer(outcome=Outcome.PENDING, body=after, evidence={"payout": payout}, decision=True)

    async def _ordered(self, source: str) -> str:
        """The payout of this count, if there is one; "": there is none.

        One that was put back from the signer's log is known by its source alone (W33): the request was forgotten.
        """
        asked = await self.out.store.read.operations.get("payouts", source, "create")
        if asked is not None:
            return str(msgspec.json.decode(asked.detail)["record"])
        row = await self.out.store.read.flow_rows.get(MACHINE.name, SOURCE.name, source)
        return "" if row is None or row.state is not RowState.HELD else str(msgspec.json.decode(row.body)["payout"])


def _key(item: FlowRecord[Sweep]) -> str:
    """Of the next payout: what it is for, and the key of the request."""
    return f"sweep:{item.id}:{item.body.asked}"


def _risen(fee: int) -> int:
    more, of = PRICE_RISE
    return -(-fee * more // of)
