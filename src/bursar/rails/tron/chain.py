"""A TRON chain behind its nodes (`rails.chain.Chain`): fees, expirations, sending, balances, and what became of it all.

What ends a payment is decided in `verdict` from what `fates` collects; which nodes are believed, in `nodes`; what a
transaction may cost, in `fees`. Nothing is kept but what is known about nodes. Sending never fails because of what a
node says: all answers are handed back, none of them proves anything, and the fate is asked afterwards (W28).

Nothing replaces a transaction here: it is included before it expires, or it is dead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Container, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeVar

from bursar.model.records import Priority
from bursar.ports import Ports
from bursar.rails.chain import (
    Arrivals,
    Balances,
    Codec,
    DeepReorganisation,
    Fate,
    Fee,
    FeeTooHigh,
    InvalidAddress,
    Network,
    NodeStatus,
    NodesUnavailable,
    Order,
    OwnTransaction,
    Page,
    Question,
    Sent,
    SentElsewhere,
    Shape,
    Slot,
    Unbuildable,
    WalletShort,
    WouldRevert,
)
from bursar.rails.nodes import TIMEOUT_S, Answers, CallFailed, Endpoint, Malformed, Post, largest_group
from bursar.rails.tron.addresses import bytes_of, text_of
from bursar.rails.tron.arriving import ArrivalBlock
from bursar.rails.tron.arriving import arrivals as arrived
from bursar.rails.tron.codec import TronCodec, spends, transfer_data
from bursar.rails.tron.fates import Fates
from bursar.rails.tron.fees import ENERGY_DEFAULT_MAX, Prices, energy_limit, transfer_answer, usual
from bursar.rails.tron.http import Http, record, text
from bursar.rails.tron.nodes import Anchor, Nodes
from bursar.rails.tron.reading import Block, Called, account, block, called, chain_parameters, header, raw_data

EXPIRES_MS: Final = 600_000  # after the last final block: time to be signed and sent; then about a minute until death
# is proven. The chain refuses more than 24 hours.
SCAN_BLOCKS_MAX: Final = 16  # of one page
BALANCE_TRIES: Final = 4  # to read balances between two blocks
TIMESTAMP_SPREAD: Final = 2**32  # milliseconds, seven weeks: room for a chance that two payments are told apart by
B = TypeVar("B", Block, ArrivalBlock)
_BALANCE_OF: Final = bytes.fromhex("70a08231")  # balanceOf(address)


class _DryRun(NamedTuple):
    """What one node says about a payment that has not been made."""

    prices: Prices
    coin: int
    tokens: int | None  # None: the payment is not of a token, or there is none
    energy: int
    activates: bool
    refused: str


class _Holding(NamedTuple):
    """What an address has in one node's final state."""

    at: tuple[int, str]
    coin: int
    tokens: tuple[int | None, ...]


class TronChain:
    """One chain. `post` is `bursar.http.Pool.post`; `monotonic`, `now_us` and `token` are the ports'."""

    def __init__(
        self,
        network: Network,
        endpoints: Sequence[Endpoint],
        post: Post,
        monotonic: Callable[[], float],
        now_us: Callable[[], int],
        token: Callable[[], str],
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.network = network
        self.codec: Codec = TronCodec()
        self._nodes = Nodes(network, endpoints, post, monotonic, timeout_s)
        self._fates = Fates(self._nodes)
        self._now_us = now_us
        self._token = token
        self._scan_blocks = SCAN_BLOCKS_MAX

    # --- fees --------------------------------------------------------------------------------------------------------

    async def quote(self, sender: str, order: Order, shape: Shape, priority: Priority) -> Fee:
        if shape is not Shape.PAY:
            raise Unbuildable(self.network.name, "nothing can be cancelled on this chain: a transaction expires")
        runs = await self._nodes.ask(None, lambda http: self._dry_run(http, sender, order))
        if not runs:
            why = f"no node answers when asked for a fee{self._nodes.missing(runs)}"
            raise NodesUnavailable(self.network.name, why)
        held = [run.tokens for run in runs.values() if run.tokens is not None]
        if held:
            self._require(sender, order.contract, max(held), order.amount)
        prices = usual(run.prices for run in runs.values())
        fee = self._fee(sender, order, prices, self._energy(runs, order), any(run.activates for run in runs.values()))
        if order.contract and prices.energy > (ceiling := self.network.ceiling(priority)):
            raise FeeTooHigh(self.network.name, prices.energy, ceiling)
        coin = 0 if order.contract else order.amount
        self._require(sender, self.network.native or "TRX", max(run.coin for run in runs.values()), coin + fee.worst)
        return fee

    def _require(self, wallet: str, asset: str, has: int, needs: int) -> None:
        if has < needs:
            raise WalletShort(self.network.name, wallet, asset, has, needs)

    def _energy(self, runs: Answers[_DryRun], order: Order) -> int:
        """The energy limit; `WouldRevert` if a quorum of nodes says that the chain would refuse the payment."""
        fine = [run.energy for run in runs.values() if not run.refused]
        if not fine:
            name, run = sorted(runs.items())[0]
            if len(runs) < self._nodes.quorum:  # it fails the payment for good, so one node, perhaps behind, won't do
                why = f"only {name} says that the payment would fail ({run.refused}){self._nodes.missing(runs)}"
                raise NodesUnavailable(self.network.name, why)
            raise WouldRevert(self.network.name, run.refused)
        if not order.contract:
            return 0
        highest = order.gas_limit_max or ENERGY_DEFAULT_MAX
        within = [used for used in fine if used <= highest]
        if within:
            return energy_limit(max(within), highest)
        why = f"it takes {min(fine)} energy, and the limit of the asset is {highest}"
        if len(fine) < self._nodes.quorum:
            raise NodesUnavailable(self.network.name, f"only one node says that {why}{self._nodes.missing(runs)}")
        raise WouldRevert(self.network.name, why)

    def _fee(self, sender: str, order: Order, prices: Prices, energy: int, activates: bool) -> Fee:
        limit = min(energy, prices.fee_limit_max // prices.energy)
        fee = Fee(gas_limit=limit, price=prices.energy if limit else 0)
        # The size hardly depends on the slot: these are numbers of the size that they have.
        slot = Slot(expires=2**62, reference=f"{'0' * 20}/{2**62}")
        size = len(self.codec.build(self.network, sender, order, Shape.PAY, slot, fee))
        beside = prices.beside(size, memo=bool(order.memo), activates=activates)
        return Fee(gas_limit=fee.gas_limit, price=fee.price, beside=beside)

    async def _dry_run(self, http: Http, sender: str, order: Order) -> _DryRun:
        """What a node says to this very payment: it runs against the newest state, and nothing is signed."""
        prices = Prices.of(chain_parameters(await http.wallet("getchainparameters")))
        owner, to = bytes_of(sender), bytes_of(order.to)
        coin = account(await http.wallet("getaccount", address=owner.hex()), owner).balance
        if not order.contract:
            target = account(await http.wallet("getaccount", address=to.hex()), to)
            refused = "TRX can't be transferred to a contract" if target.is_contract else ""
            return _DryRun(prices, coin, None, 0, not target.exists, refused)
        run = await _call(http.wallet, owner, bytes_of(order.contract), transfer_data(to, order.amount))
        held = await _balance_of(http.wallet, bytes_of(order.contract), owner)
        return _DryRun(prices, coin, held, run.energy, False, run.reverted or transfer_answer(run.returned))

    async def higher(self, fee: Fee, priority: Priority) -> Fee | None:
        return None  # nothing replaces a transaction

    # --- expirations and sending -------------------------------------------------------------------------------------

    async def slot(self, sender: str) -> Slot:
        """A new expiration: it counts from a block that two nodes call final, so that no fork makes it invalid.

        Equal content is one transaction on the chain, and two equal payouts would be one payment (W27). So the
        timestamp, which no node checks, has a random part. Two guards behind it make a collision a delay, not a loss:
        the signer never signs the same bytes for two payouts, and a hash is one payout's for ever in the database.
        """
        head = (await self._nodes.anchor()).header
        timestamp = max(TIMESTAMP_SPREAD, self._now_us() // 1000) - int(self._token()[:8], 16)
        reference = f"{head.id[12:16]}{head.id[16:32]}/{max(1, timestamp)}"
        return Slot(expires=head.timestamp + EXPIRES_MS, reference=reference)

    async def send(self, raw: bytes) -> Sent:
        _, _, hash_ = self.codec.read(raw)
        answered = await self._nodes.ask(None, lambda http: _broadcast(http, raw, hash_))
        words = {name: said for name, (_, said) in answered.items()} | answered.silent
        return Sent(accepted=any(accepted for accepted, _ in answered.values()), answers=words)

    async def sent_elsewhere(self, hash_: str) -> SentElsewhere | None:
        known_as = hash_.lower().removeprefix("0x")

        async def look(http: Http) -> bytes | None:
            return raw_data(await http.wallet("gettransactionbyid", value=known_as), known_as)

        raw = self._nodes.agree_if_there(f"transaction {known_as}", await self._nodes.ask(None, look))
        return None if raw is None else spends(raw)

    async def fate(self, question: Question) -> Fate:
        return await self._fates.ask(question)

    # --- what the chain holds ----------------------------------------------------------------------------------------

    async def balances(self, address: str, contracts: Sequence[str]) -> Balances:
        """At the last final block. A node can't be asked for an older state, so nodes are asked until two have answered
        at the same final block, or say the same at different ones."""
        for _ in range(BALANCE_TRIES):
            said = await self._nodes.ask(None, lambda http: self._holding(http, address, contracts))
            if (together := self._together(said)) is not None:
                break
        else:  # no node is named for it: one of them is a moment behind
            raise NodesUnavailable(self.network.name, f"balances of {address}: nodes are at different final blocks")
        values = Answers({name: one[1:] for name, one in together.items()}, together.silent)
        coin, tokens = self._nodes.agree(f"balances of {address}", values)
        block, block_hash = min(one.at for one in together.values() if one[1:] == (coin, tokens))
        held = {}
        for contract, amount in zip(contracts, tokens, strict=True):
            if amount is None:
                raise InvalidAddress(self.network.name, contract, "no token is at this address")
            held[contract] = amount
        return Balances(block=block, block_hash=block_hash, coin=coin, tokens=held)

    async def balances_of(self, addresses: Sequence[str], contracts: Sequence[str]) -> dict[str, Balances | str]:
        """One after the other: each is of a state of its own, because nodes tell the newest one only."""
        found: dict[str, Balances | str] = {}
        for address in addresses:
            try:
                found[address] = await self.balances(address, contracts)
            except NodesUnavailable as error:
                found[address] = str(error)
        return found

    def _together(self, said: Answers[_Holding]) -> Answers[_Holding] | None:
        """Answers that can be compared: all, if they are the same or too few; else those at the block of most nodes."""
        if len(said) < self._nodes.quorum or len({one[1:] for one in said.values()}) == 1:
            return said
        place, _ = largest_group({name: one.at for name, one in said.items()})
        same = {name: one for name, one in said.items() if one.at == place}
        others = dict.fromkeys(said.keys() - same.keys(), "at another final block")
        return Answers(same, said.silent | others) if len(same) >= self._nodes.quorum else None

    async def _holding(self, http: Http, address: str, contracts: Sequence[str]) -> _Holding:
        """All balances of one state: the final block is the same before and after."""
        owner = bytes_of(address)
        for _ in range(BALANCE_TRIES):
            before = header(await http.solid("getnowblock"))
            coin = account(await http.solid("getaccount", address=owner.hex()), owner).balance
            tokens = [await _balance_of(http.solid, bytes_of(contract), owner) for contract in contracts]
            if header(await http.solid("getnowblock")) == before:
                return _Holding((before.number, before.id), coin, tuple(tokens))
        raise CallFailed("its final block changes faster than it answers")

    async def final_block(self) -> tuple[int, str]:
        head = (await self._nodes.anchor()).header
        return head.number, head.id

    async def is_contract(self, address: str) -> bool:
        place = bytes_of(address).hex()

        async def look(http: Http) -> bool:
            await self._nodes.head(http)  # learns who is behind
            found = record(await http.wallet("getcontract", value=place))
            if found and found.get("contract_address") != place:
                raise Malformed("another contract came than was asked for")
            return bool(found)

        said = await self._nodes.ask(None, look)
        # A payment fails for it: where nodes differ it waits, until the one that lags has seen the code too.
        known = {name: found for name, found in said.items() if not self._nodes.is_behind(name)}
        return self._nodes.agree(f"code at {address}", Answers(known, said.silent))

    async def nodes(self) -> tuple[NodeStatus, ...]:
        return await self._nodes.status()

    # --- watching ----------------------------------------------------------------------------------------------------

    async def scan(self, addresses: Container[str], after: int, after_hash: str = "") -> Page:
        anchor = await self._nodes.anchor()
        number = anchor.header.number
        if number <= after:
            if number == after and after_hash:
                self._require_same(after, after_hash, anchor.header.id)
            return Page(up_to=after, up_to_hash=after_hash, transactions=())

        def is_own(owner: bytes) -> bool:
            return text_of(owner) in addresses

        async def read(http: Http, number: int) -> Block:
            return block(await http.solid("getblockbynum", num=number), number, is_own)

        blocks = await self._read_blocks(anchor, after, number, read)
        self._require_same(after, after_hash or blocks[0].header.parent, blocks[0].header.parent)
        own = tuple(
            OwnTransaction(hash=hash_, sender=text_of(owner), nonce=None, block=found.header.number)
            for found in blocks
            for hash_, owner in found.own
        )
        last = blocks[-1].header
        return Page(up_to=last.number, up_to_hash=last.id, transactions=own)

    def _require_same(self, number: int, expected: str, found: str) -> None:
        if expected != found:
            raise DeepReorganisation(self.network.name, number, expected, found)

    async def arrivals(
        self, addresses: Container[str], contracts: frozenset[str], after: int, after_hash: str, up_to: int
    ) -> Arrivals:
        anchor = await self._nodes.anchor()
        one_node = self._nodes.configured == 1
        last = min(anchor.header.number, up_to)
        if last <= after:
            if anchor.header.number == after and after_hash:
                self._require_same(after, after_hash, anchor.header.id)
            return Arrivals(up_to=after, up_to_hash=after_hash, found=(), one_node=one_node)
        tokens = frozenset(bytes_of(contract) for contract in contracts)

        async def read(http: Http, number: int) -> ArrivalBlock:
            value, outcomes = await asyncio.gather(
                http.solid("getblockbynum", num=number), http.solid("gettransactioninfobyblocknum", num=number)
            )
            return arrived(value, outcomes, number, addresses, tokens)

        blocks = await self._read_blocks(anchor, after, last, read)
        self._require_same(after, after_hash or blocks[0].header.parent, blocks[0].header.parent)
        end = blocks[-1].header
        found = tuple(one for of_block in blocks for one in of_block.found)
        return Arrivals(up_to=end.number, up_to_hash=end.id, found=found, one_node=one_node)

    async def _read_blocks(
        self, anchor: Anchor, after: int, last: int, read_one: Callable[[Http, int], Awaitable[B]]
    ) -> tuple[B, ...]:
        """The next blocks, read whole at two nodes that say the same about everything that matters in them.

        One node could leave out a transaction or name another sender; its block's id would not show it.
        """
        numbers = range(after + 1, min(last, after + self._scan_blocks) + 1)
        final = anchor.header

        async def read(http: Http) -> tuple[B, ...]:
            found = tuple(await asyncio.gather(*(read_one(http, number) for number in numbers)))
            for earlier, later in pairwise(found):
                if later.header.parent != earlier.header.id:
                    raise Malformed(f"block {later.header.number} is no child of the one before it")
            if found[-1].header.number == final.number and found[-1].header.id != final.id:
                raise Malformed(f"block {final.number} is another than a moment ago")
            return found

        quorum = self._nodes.quorum
        said = await self._nodes.ask(anchor.nodes[:quorum], read)
        if len(said) < quorum or len(set(said.values())) > 1:  # only then are the others asked, too
            others = await self._nodes.ask(anchor.nodes[quorum:], read)
            said = Answers(said | others, said.silent | others.silent)
        if len(said) < quorum and self._scan_blocks > 1:
            self._scan_blocks //= 2  # many large blocks at once may take too long
        found = self._nodes.agree(f"blocks {numbers[0]} to {numbers[-1]}", said)
        self._scan_blocks = min(SCAN_BLOCKS_MAX, self._scan_blocks + 1)
        return found


def chain_behind(network: Network, urls: Sequence[str], post: Post, ports: Ports, timeout_s: float) -> TronChain:
    """A chain behind nodes at these URLs. They are named by their places, for their URLs are never shown."""
    endpoints = [Endpoint(name=f"{network.name}-{number}", url=url) for number, url in enumerate(urls, 1)]
    return TronChain(network, endpoints, post, ports.monotonic, ports.now_us, ports.token, timeout_s)


async def _broadcast(http: Http, raw: bytes, hash_: str) -> tuple[bool, str]:
    """Whether the node has it now, or had it before; and what it said, which is evidence and proves nothing (W28)."""
    try:
        said = record(await http.wallet("broadcasthex", transaction=raw.hex()))
    except CallFailed as error:
        return False, str(error)
    code, message = text(said, "code"), http.text(text(said, "message"))
    words = f"{code}: {message}" if message else code
    if said.get("txid") != hash_:
        return False, f"{words} (of another transaction than the one that was sent)"
    # The last one comes after it was taken: it waits there, and no peer has heard of it.
    known = code == "SUCCESS" or (code, message) in (
        ("DUP_TRANSACTION_ERROR", "Dup transaction."),
        ("NOT_ENOUGH_EFFECTIVE_CONNECTION", "P2P broadcast failed."),
    )
    return known, words


async def _call(ask: Any, owner: bytes, contract: bytes, data: bytes) -> Called:
    """A dry run of a contract's code. It can run out of time by chance, so that it is tried twice."""
    params = {"owner_address": owner.hex(), "contract_address": contract.hex(), "data": data.hex()}
    try:
        return called(await ask("triggerconstantcontract", **params))
    except Malformed:
        return called(await ask("triggerconstantcontract", **params))


async def _balance_of(ask: Any, contract: bytes, owner: bytes) -> int | None:
    """Tokens of an address; None if there is no token at that contract's address."""
    found = await _call(ask, owner, contract, _BALANCE_OF + owner[1:].rjust(32, b"\0"))
    return int.from_bytes(found.returned, "big") if not found.reverted and len(found.returned) == 32 else None
