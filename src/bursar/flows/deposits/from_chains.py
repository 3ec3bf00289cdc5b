"""Deposits from chains: an address for each user, what arrives there credited once, and swept to wallets of ours.

`Scanning` sees what arrives, `Judging` says what it is, `Sweeping` brings it together. Here is what users and operators
do: ask for an address, list, confirm or reject what is held, and send a scan back.
"""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec

from bursar.engine import Answer, Booking, Engine, Flow, FlowRecord
from bursar.flows.deposits import arrivals, scanning, sweep
from bursar.flows.deposits.arrivals import ARRIVALS, CONFIRM, HELD, REJECT, STATUS, Arrived
from bursar.flows.deposits.judging import Judging, ledger_units
from bursar.flows.deposits.rules import DEPOSITS, USER_MAX, DepositRules, Derive, derive, wallet_name
from bursar.flows.deposits.scanning import RESCAN, SCANS, Scan, Scanning
from bursar.flows.deposits.sweep import MORE, SWEEPS, Sweep
from bursar.flows.deposits.sweeping import Sweeping
from bursar.flows.deposits.words import final_after, words_for_user
from bursar.flows.payouts import Payouts
from bursar.flows.payouts.derived import ADDRESS, ADDRESSES, DepositWallet, Owned, address_key
from bursar.flows.payouts.documents import CHAIN
from bursar.flows.payouts.outside import OUTAGE_S, waits
from bursar.flows.transfers.request import funding_account
from bursar.model.accounts import AccountStatus
from bursar.model.actors import check_actor, check_reason, same_person
from bursar.model.errors import AlreadyExists, Conflict, InvalidName, RecordMoved, Refusal, UnknownRecord
from bursar.model.flow_rows import Claim, RowTaken
from bursar.model.money import MINOR_MAX
from bursar.model.outcome import Outcome
from bursar.model.records import Record
from bursar.model.retry import Alarm
from bursar.rails.chain import Codec, NodesUnavailable
from bursar.store.documents import VERSION_MAX
from bursar.store.records import NEWEST, Wanted

HELD_S: Final = 3_600.0  # before an alert is raised about an arrival that waits for people
ANOTHER_KEY: Final = "has had another key: the rules need another name of wallets with another xpub"
BY_PEOPLE: Final = "it is confirmed or rejected by `bursar deposit confirm` and `bursar deposit reject`"


class DepositCode(StrEnum):
    """Why something that concerns deposits from chains is refused."""

    NO_DEPOSITS = "NO_DEPOSITS"
    NOT_READY = "NOT_READY"
    ACCOUNT_CLOSED = "ACCOUNT_CLOSED"
    ADDRESS_TAKEN = "ADDRESS_TAKEN"
    NOT_HELD = "NOT_HELD"
    SAME_PERSON = "SAME_PERSON"


@dataclass(eq=False)
class DepositRefused(Refusal):
    """It is refused, and nothing was written. `reason` is the code that an API answers with."""

    reason: DepositCode
    why: str
    code = "DEPOSIT_REFUSED"
    text = "{reason}: {why}"


class AddressView(msgspec.Struct, frozen=True, kw_only=True):
    """An address as its user sees it."""

    chain: str
    address: str
    user: int
    wallet: str
    assets: dict[str, str]  # that are accepted there now: code → the least that is credited
    blocks: int  # on top of a transfer's block before it counts
    final_after: str  # the same, and what else it waits for, in words
    created_us: int


class ArrivalView(msgspec.Struct, frozen=True, kw_only=True):
    """What has arrived, as its user and operators see it."""

    id: str
    status: str
    state: str
    user: int
    chain: str
    asset: str  # "": no document names it
    amount: str  # in units of the asset; "": less than the smallest one, or no asset
    raw: str  # in the chain's smallest units
    contract: str
    hash: str
    sender: str
    to: str
    wallet: str
    block: int
    account: str  # where it is booked; "": nowhere
    why: str  # for operators
    words: str  # for its user: why it is not credited, or not yet
    confirmed_by: tuple[str, ...]
    created_us: int
    updated_us: int


class ChainDeposits:
    """Deposits from chains, on one engine."""

    def __init__(self, payouts: Payouts, *, engine: Engine, derive: Derive = derive) -> None:
        """`derive`: how an address follows from a user, for kinds of chains that are not shipped."""
        self.payouts = payouts
        self.documents = payouts.documents
        self.engine = engine
        self.out = payouts.out
        self._derive = derive
        judging = self._judging = Judging(self.out, payouts.ledger, engine)
        engine.register(self._addresses()).register(self._arrivals(judging)).register(self._sweeps(judging))
        self.scanning = Scanning(self.out, judging, engine)
        engine.register(scanning.flow(self.scanning, payouts.rails))

    def _addresses(self) -> Flow[DepositWallet]:
        return Flow(
            machine=ADDRESSES,
            body=DepositWallet,
            actions={"look": self._look},
            book_start=_claimed,
            rails={"look": lambda item: f"chain {item.body.chain}"},
            rail_names=self.payouts.rails,
            row_kinds=(ADDRESS,),
            alarms=(),
        )

    def _arrivals(self, judging: Judging) -> Flow[Arrived]:
        return Flow(
            machine=ARRIVALS,
            body=Arrived,
            actions={"judge": judging.judge},
            book=arrivals.book,
            next_body=arrivals.next_body,
            rails={"judge": lambda item: arrivals.rail(item.body.chain)},
            rail_names=self.payouts.rails | {arrivals.rail(name) for name in self.payouts.names},
            reserved_events=dict.fromkeys((CONFIRM, REJECT), BY_PEOPLE),
            alarms=(Alarm(reason="held", state=HELD, seconds=HELD_S), Alarm(reason="stuck", tries=10)),
        )

    def _sweeps(self, judging: Judging) -> Flow[Sweep]:
        return Flow(
            machine=SWEEPS,
            body=Sweep,
            actions={"sweep": Sweeping(self.payouts, judging, self.engine).sweep},
            book=sweep.book,
            book_start=sweep.book_start,
            rails={"sweep": lambda item: f"chain {item.body.chain}"},
            rail_names=self.payouts.rails,
            row_kinds=(sweep.OPEN,),
            inbox_events=frozenset({MORE}),
            on_signal=sweep.on_signal,
            alarms=(Alarm(reason="not swept yet", seconds=86_400.0),),
            call_timeout_s=30.0,
        )

    async def prepare(self) -> None:
        """Begin to scan the chains that have rules. Twice is once."""
        for name in await self.documents.all(DEPOSITS, fresh=True):
            if name not in self.payouts.chains:
                continue
            self.scanning.expect(name)
            if await self.engine.get(SCANS.name, name) is None:
                with contextlib.suppress(RecordMoved, Conflict, AlreadyExists):  # another process has just now
                    started = await self.engine.start(SCANS.name, Scan(chain=name), id=name)
                    await self.engine.hand_over(started.record)

    # --- addresses ---------------------------------------------------------------------------------------------------

    async def issue(self, user: int, chain: str, *, actor: str = "") -> AddressView:
        """The user's address on a chain: made at the first request, and the same at every later one."""
        if not 0 < user <= USER_MAX:
            raise InvalidName("user", str(user), f"a whole number from 1 to {USER_MAX}")
        rules = await self.documents.current(DEPOSITS, chain)
        network = await self.documents.current(CHAIN, chain)
        rail = self.payouts.chains.get(chain)
        if rules is None or network is None or rail is None or not (rules.body.active and network.body.active):
            raise DepositRefused(DepositCode.NO_DEPOSITS, f"there are no deposits from {chain!r} at the moment")
        name = wallet_name(rules.body, user)
        address = rail.codec.check_address(chain, self._derive(network.body.kind, rules.body.xpub, user))
        body = DepositWallet(chain=chain, user=user, address=address)
        if (record := await self.engine.get(ADDRESSES.name, name)) is not None:
            if msgspec.json.decode(record.body, type=DepositWallet) != body:
                raise DepositRefused(DepositCode.ADDRESS_TAKEN, f"{name} {ANOTHER_KEY}")
            return await self._address(record)
        await self._require_open(user)
        await self._require_free(chain, rail.codec, rules.body, name, address)
        await self._require_scanned(chain)
        try:
            started = await self.engine.start(ADDRESSES.name, body, id=name, owner=str(user), actor=actor)
        except RowTaken as taken:
            why = f"{address} on {chain} is issued under another name: two rules share an xpub"
            raise DepositRefused(DepositCode.ADDRESS_TAKEN, why) from taken
        except (RecordMoved, AlreadyExists):  # another request was faster
            return await self._address(await self.engine.record(ADDRESSES.name, name))
        await self.engine.hand_over(started.record)
        return await self._address(await self.engine.record(ADDRESSES.name, name))

    async def _require_scanned(self, chain: str) -> None:
        """Before a user learns where to send: the scan has a block to go on from, so that it sees what arrives."""
        if await self.engine.get(SCANS.name, chain) is None:
            await self.prepare()
        record = await self.engine.get(SCANS.name, chain)
        if record is None or msgspec.json.decode(record.body, type=Scan).block < 0:
            why = f"deposits from {chain} are being set up, and no node has said yet where the chain is: ask again"
            raise DepositRefused(DepositCode.NOT_READY, why)

    async def _require_free(self, chain: str, codec: Codec, rules: DepositRules, name: str, address: str) -> None:
        """No wallet of ours has the name or the address, and the first key of wallets so called is theirs for ever."""
        ours = (await self.out.wallets.documented(chain, codec)).get(address, "")
        if not ours and name in await self.out.wallets.of_chain(chain):
            ours = name
        if ours:
            why = f"{address}, of {name}, has the address or the name of {ours}, which is a wallet of ours"
            raise DepositRefused(DepositCode.ADDRESS_TAKEN, why)
        first, before = rules.xpub, VERSION_MAX
        while page := await self.documents.history(DEPOSITS, chain, before=before):
            before = page[-1].version
            for earlier in map(DEPOSITS.read, page):
                first = earlier.xpub if earlier.wallets == rules.wallets else first
        if first != rules.xpub:
            raise DepositRefused(DepositCode.ADDRESS_TAKEN, f"{rules.wallets} {ANOTHER_KEY}")

    async def _require_open(self, user: int) -> None:
        path = funding_account(user)
        account = (await self.out.store.read.accounts.heads([path])).get(path)
        if account is not None and account.status is AccountStatus.CLOSED:
            raise DepositRefused(DepositCode.ACCOUNT_CLOSED, f"the account of user {user} is closed")

    async def _look(self, item: FlowRecord[DepositWallet]) -> Answer:
        """Whether something lay there before it was issued: then this database has forgotten it, and what arrived."""
        body = item.body
        chain = self.payouts.chains.get(body.chain)
        if chain is None:
            return waits(item, "CHAIN_NOT_CONFIGURED", f"no nodes of {body.chain} are configured here", OUTAGE_S)
        contracts = [contract for contract in await self._judging.assets(body.chain) if contract]
        try:
            there = await chain.balances(body.address, contracts)
        except NodesUnavailable as away:
            return waits(item, away.code, str(away), OUTAGE_S)
        if there.coin or there.nonce or any(there.tokens.values()):
            why = (
                f"{item.id} ({body.address}) had money, or had sent some, at block {there.block}, before it was issued "
                f"here: was the database restored? Read again what arrived: bursar deposit rescan {body.chain} BLOCK"
            )
            await self.out.alert(item.record, "address was used before", "critical", why)
        return Answer(outcome=Outcome.SUCCESS, evidence={"block": there.block, "coin": str(there.coin)})

    async def addresses(self, user: int) -> builtins.list[AddressView]:
        """All addresses of a user, newest first."""
        found = await self.out.store.read.records.list(ADDRESSES.name, owner=str(user), limit=1_000)
        return [await self._address(record) for record in found]

    async def _address(self, record: Record) -> AddressView:
        body = msgspec.json.decode(record.body, type=DepositWallet)
        rules = await self.documents.current(DEPOSITS, body.chain)
        accepted = {} if rules is None else rules.body.assets
        chain = CHAIN.read(await self.documents.get(CHAIN, body.chain))
        return AddressView(
            chain=body.chain,
            address=body.address,
            user=body.user,
            wallet=record.id,
            assets={code: accepted[code].minimum for code in sorted(accepted)},
            blocks=chain.depth,
            final_after=final_after(chain),
            created_us=record.created_us,
        )

    # --- arrivals ----------------------------------------------------------------------------------------------------

    async def view(self, id_: str) -> ArrivalView:
        """One arrival."""
        return await self._view(await self._arrival(id_))

    async def page(
        self, *, user: int = 0, states: Iterable[str] = (), chain: str = "", before: int = NEWEST, limit: int = 100
    ) -> tuple[Sequence[ArrivalView], int]:
        """Arrivals, newest first, and the number below which the next page begins; 0: there is none."""
        wanted = Wanted(owner=str(user) if user else "", states=tuple(states), facts={"chain": chain} if chain else {})
        found, after = await self.out.store.read.records.page(ARRIVALS.name, wanted, before=before, limit=limit)
        return [await self._view(record) for record in found], after

    async def confirm(self, id_: str, *, actor: str, reason: str) -> ArrivalView:
        """A person says that an arrival which is held is there. It is judged anew: some need two people."""
        record, actor = await self._held(id_), check_actor(actor)
        body = msgspec.json.decode(record.body, type=Arrived)
        if any(same_person(actor, name) for name in body.confirmed_by):
            raise DepositRefused(DepositCode.SAME_PERSON, f"{actor} has confirmed {id_} already: another person does")
        return await self._say(record, CONFIRM, actor, reason)

    async def reject(self, id_: str, *, actor: str, reason: str) -> ArrivalView:
        """An arrival which is held is not credited, and never will be by itself."""
        return await self._say(await self._held(id_), REJECT, check_actor(actor), reason)

    async def _say(self, record: Record, event: str, actor: str, reason: str) -> ArrivalView:
        evidence = {"reason": check_reason(reason), "by": actor}
        after = await self.engine.signal(record, event, actor, evidence)
        await self.engine.hand_over(after)
        return await self._view(after)

    async def rescan(self, chain: str, block: int, *, actor: str, reason: str) -> None:
        """Read a chain again from a block on. What was seen before stays as it is."""
        if block < 0:
            raise InvalidName("block", str(block), "the number of a block")
        record = await self.engine.record(SCANS.name, chain)
        evidence = {"reason": check_reason(reason), "block": block}
        await self.engine.signal(record, RESCAN, check_actor(actor), evidence)

    async def _arrival(self, id_: str) -> Record:
        record = await self.engine.get(ARRIVALS.name, id_)
        if record is None:
            raise UnknownRecord(ARRIVALS.name, id_)
        return record

    async def _held(self, id_: str) -> Record:
        record = await self._arrival(id_)
        if record.state != HELD:
            raise DepositRefused(
                DepositCode.NOT_HELD, f"{id_} is {record.state}: only what is held is decided by people"
            )
        return record

    async def _view(self, record: Record) -> ArrivalView:
        body = msgspec.json.decode(record.body, type=Arrived)
        code, minor = body.asset, int(body.minor)
        on_chain = None if code else (await self._judging.assets(body.chain)).get(body.contract)
        if on_chain is not None:  # not booked: what it would be
            code = on_chain.asset
        asset = (await self.payouts.ledger.known_assets(code)).get(code) if code else None
        if on_chain is not None and asset is not None:
            minor, _ = ledger_units(int(body.raw), on_chain.decimals, asset.precision)
        why = body.why or record.error
        return ArrivalView(
            id=record.id,
            status=STATUS[record.state],
            state=record.state,
            user=body.user,
            chain=body.chain,
            asset="" if asset is None else code,
            amount="" if asset is None or not 0 < minor <= MINOR_MAX else str(asset.of_minor(minor)),
            raw=body.raw,
            contract=body.contract,
            hash=body.hash,
            sender=body.sender,
            to=body.to,
            wallet=body.wallet,
            block=body.block,
            account=body.account,
            why=why,
            words=words_for_user(record.state, why),
            confirmed_by=body.confirmed_by,
            created_us=record.created_us,
            updated_us=record.updated_us,
        )


def _claimed(item: FlowRecord[DepositWallet]) -> Booking:
    """The address is this wallet's for ever. Pure."""
    body = item.body
    owned = Owned(wallet=item.id, user=body.user)
    return Booking(rows=(Claim(ADDRESS, address_key(body.chain, body.address), msgspec.to_builtins(owned)),))


__all__ = ["AddressView", "ArrivalView", "ChainDeposits", "DepositCode", "DepositRefused", "DepositRules"]
