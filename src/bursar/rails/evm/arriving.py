"""Final transfers to addresses of ours: the coin of successful transactions, and the Transfer events of listed tokens.

Each node is asked for whole blocks, for the events of each by the block's hash, and for the receipts of transactions
that may bring something. What it says must fit together: an event has its transaction in the block and stands in that
transaction's receipt, and a block whose bloom filter allows for events of a token, while none came, is looked through
receipt by receipt. Two nodes must then say exactly the same (W35). Whatever is incomplete moves no cursor.

An event is what a token claims. What arrived is held against the recipient's balance at the block before and at its
block, as payments are (`tokens`): if that did not rise by all that the events of the block add up to, every arrival of
that token at that address in that block is disputed. It is not shared out: events do not say which of them lied. Where
nodes have dropped the state, the event alone decides, and the arrival says so.

Coin that a contract passes on (an internal transfer) leaves no event and is not seen here.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from bursar.rails.chain import Arrival, Arrivals, DeepReorganisation, NodesUnavailable
from bursar.rails.evm.codec import address_bytes, checksum_address, read_transfer
from bursar.rails.evm.nodes import Anchor, Answers, Ask, Nodes, block_call, require_linked
from bursar.rails.evm.reading import (
    TRANSFER_TOPIC,
    Incoming,
    Receipt,
    Transaction,
    Transfer,
    block_receipts,
    in_bloom,
    incoming,
    receipt,
    transfers_by_hash,
)
from bursar.rails.evm.rpc import Call, CallFailed, Malformed, result
from bursar.rails.evm.tokens import Change, balance, balance_call, contradiction

BLOCKS_MAX = 16  # of one page
COIN = "coin"  # the part of a transaction that is its own value


class Wanted:
    """Which transfers are arrivals."""

    def __init__(self, addresses: Container[str], contracts: frozenset[str]) -> None:
        self._addresses = addresses
        self.contracts = {contract.lower(): contract for contract in sorted(contracts)}

    def ours(self, address: str) -> bool:
        """Whether what a node names is one of our addresses."""
        return _address(address) in self._addresses

    def coin(self, one: Transaction) -> bool:
        """Whether a transaction, if it succeeds, brings coin."""
        return bool(one.value and one.to) and one.to != one.sender and self.ours(one.to)

    def paying(self, one: Transaction) -> bool:
        """Whether a transaction, if it succeeds, brings something by what it says itself."""
        call = read_transfer(one.data) if one.to in self.contracts else None
        return self.coin(one) or (call is not None and call[1] > 0 and call[0] in self._addresses)

    def tokens(self, one: Transfer) -> bool:
        """Whether an event brings tokens."""
        moved = one.amount > 0 and one.sender != one.to
        return moved and one.contract in self.contracts and self.ours(one.to)


class _Place(NamedTuple):
    """Whose balance of which token a block has changed. As nodes write it."""

    contract: str
    address: str
    block: int


class _Page(msgspec.Struct, frozen=True):
    """What one node says about a range of blocks."""

    found: tuple[Arrival, ...]
    reported: tuple[tuple[_Place, int], ...]  # what the events of a block add up to
    parent: str  # of the first block
    up_to: int
    up_to_hash: str

    def __repr__(self) -> str:
        """Where nodes disagree people read this, cut off: what arrived is its beginning."""
        return "; ".join(f"{one.amount} in {one.hash} to {one.to}" for one in self.found) or "nothing"


_Balances = tuple[int | None, int | None]  # before and after; of each None: the contract gives none


def require_same(chain: str, number: int, expected: str, found: str) -> None:
    """`DeepReorganisation` unless a block that was final is the one that it was."""
    if expected.lower() != found:
        raise DeepReorganisation(chain, number, expected, found)


class Incomings:
    """Reads pages of arrivals."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._blocks = BLOCKS_MAX

    async def page(self, wanted: Wanted, after: int, after_hash: str, up_to: int) -> Arrivals:
        """The arrivals in the blocks after `after`, none above `up_to`."""
        name, one_node = self._nodes.network.name, self._nodes.configured == 1
        anchor = await self._nodes.firm_anchor()
        last = min(anchor.number, up_to, after + self._blocks)
        if last <= after:
            if anchor.number == after and after_hash:
                require_same(name, after, after_hash, anchor.hash)
            return Arrivals(up_to=after, up_to_hash=after_hash, found=(), one_node=one_node)
        page = await self._agreed(anchor, range(after + 1, last + 1), wanted)
        require_same(name, after, after_hash or page.parent, page.parent)
        found = await self._checked(anchor, page)
        return Arrivals(up_to=page.up_to, up_to_hash=page.up_to_hash, found=found, one_node=one_node)

    async def _agreed(self, anchor: Anchor, numbers: range, wanted: Wanted) -> _Page:
        async def talk(_name: str, ask: Ask) -> _Page:
            return await _read(ask, anchor, numbers, wanted)

        said = await self._nodes.ask_enough(anchor, talk)
        if len(said) < self._nodes.quorum and self._blocks > 1:
            self._blocks //= 2  # the blocks may be too large for one answer
        page = self._nodes.agree(f"what arrived in blocks {numbers[0]} to {numbers[-1]}", said)
        self._blocks = min(BLOCKS_MAX, self._blocks + 1)
        return page

    # --- balances ----------------------------------------------------------------------------------------------------

    async def _checked(self, anchor: Anchor, page: _Page) -> tuple[Arrival, ...]:
        """The arrivals, after the tokens among them were held against balances."""
        if not page.reported:
            return page.found
        places = [place for place, _ in page.reported]
        calls = [
            balance_call(place.contract, place.address, hex(at))
            for place in places
            for at in (place.block - 1, place.block)
        ]

        async def talk(name: str, ask: Ask) -> tuple[_Balances | None, ...]:
            results = await ask(calls)
            pairs = zip(places, results[::2], results[1::2], strict=True)
            return tuple(self._balances(name, place, before, after) for place, before, after in pairs)

        said = await self._nodes.ask_enough(anchor, talk)
        if len(said) < self._nodes.quorum:
            why = f"too few nodes say what the balances were{self._nodes.missing(said)}"
            raise NodesUnavailable(self._nodes.network.name, why)
        judged: dict[_Place, str | None] = {}
        for number, (place, reported) in enumerate(page.reported):
            able = {name: pair for name, of_node in said.items() if (pair := of_node[number]) is not None}
            judged[place] = self._judged(place, reported, Answers(able, said.silent)) if able else None
        return tuple(_with_verdict(one, judged) for one in page.found)

    def _balances(self, name: str, place: _Place, before: Any, after: Any) -> _Balances | None:
        """Two balances; None if the node has dropped the state, which it says nothing about."""
        try:
            return balance(before), balance(after)
        except CallFailed:
            if self._nodes.has_state(name, place.block - 1):
                raise  # its trouble may pass
            return None

    def _judged(self, place: _Place, reported: int, able: Answers[_Balances]) -> str:
        """Why what arrived is disputed, or "". Nodes that can't say do not outvote one that can."""
        what = f"the balance of {place.address} around block {place.block}"
        alike = len(set(able.values())) == 1
        before, after = next(iter(able.values())) if alike else self._nodes.agree(what, able)
        why = contradiction("recipient", Change(before=before, after=after, reported=reported))
        return f"in block {place.block} {why}" if why else ""


def _with_verdict(one: Arrival, judged: Mapping[_Place, str | None]) -> Arrival:
    if not one.contract:
        return one
    verdict = judged[_Place(one.contract.lower(), one.to.lower(), one.block)]
    return msgspec.structs.replace(one, disputed=verdict or "", by_event_alone=verdict is None)


# --- one node --------------------------------------------------------------------------------------------------------


async def _read(ask: Ask, anchor: Anchor, numbers: range, wanted: Wanted) -> _Page:
    """What one node says about these blocks. `Malformed` if it does not fit together."""
    got = await ask([block_call(number, whole=True) for number in numbers])
    blocks = [incoming(result(one), number, wanted.paying) for number, one in zip(numbers, got, strict=True)]
    require_linked([block.header for block in blocks], anchor)
    events = await _events(ask, blocks, wanted)
    hashes = {block.header.number: _hashes(block, wanted, events[block.header.number]) for block in blocks}
    receipts = await _receipts(ask, blocks, hashes)
    await _look_through(ask, blocks, events, wanted)
    found: list[Arrival] = []
    reported: dict[_Place, int] = {}
    for block in blocks:
        number = block.header.number
        arrived = list(_arrived(block, [receipts[hash_] for hash_ in hashes[number]], events[number], wanted))
        found += arrived
        reported |= _sums(number, arrived, events[number])
    first, last = blocks[0].header, blocks[-1].header
    return _Page(tuple(found), tuple(reported.items()), first.parent, last.number, last.hash)


_Events = dict[str, list[Transfer]]  # by the transaction's hash


async def _events(ask: Ask, blocks: Sequence[Incoming], wanted: Wanted) -> dict[int, _Events]:
    """The Transfer events of the listed tokens, for each block."""
    if not wanted.contracts:
        return {block.header.number: {} for block in blocks}
    chosen = {"address": list(wanted.contracts), "topics": [TRANSFER_TOPIC]}
    got = await ask([Call("eth_getLogs", ({"blockHash": block.header.hash, **chosen},)) for block in blocks])
    found = {}
    for block, one in zip(blocks, got, strict=True):
        found[block.header.number] = events = transfers_by_hash(result(one), block.header.hash)
        if not events.keys() <= set(block.hashes):
            raise Malformed(f"an event of block {block.header.number} is of no transaction in it")
    return found


def _hashes(block: Incoming, wanted: Wanted, events: _Events) -> list[str]:
    """The transactions that may bring something, in the order of the block."""
    relevant = {one.hash for one in block.paying}
    relevant |= {hash_ for hash_, logs in events.items() if any(wanted.tokens(log) for log in logs)}
    return [hash_ for hash_ in block.hashes if hash_ in relevant]


async def _receipts(ask: Ask, blocks: Sequence[Incoming], hashes: Mapping[int, Sequence[str]]) -> dict[str, Receipt]:
    """Their receipts, each of the block in which the transaction is."""
    places = [(block.header, hash_) for block in blocks for hash_ in hashes[block.header.number]]
    if not places:
        return {}
    got = await ask([Call("eth_getTransactionReceipt", (hash_,)) for _, hash_ in places])
    found = {}
    for (header, hash_), one in zip(places, got, strict=True):
        made = receipt(result(one), hash_)
        if made is None or made.block_hash != header.hash or made.block != header.number:
            raise Malformed(f"{hash_} is in block {header.number}, and has no receipt of it")
        found[hash_] = made
    return found


async def _look_through(ask: Ask, blocks: Sequence[Incoming], events: Mapping[int, _Events], wanted: Wanted) -> None:
    """`Malformed` if a token has events in a block, by its receipts, and the node's list of them has none.

    A node whose index of events is behind its blocks, or which has dropped it, answers with an empty list.
    """
    doubtful = [(block, silent) for block in blocks if (silent := _silent(block, events[block.header.number], wanted))]
    if not doubtful:
        return
    got = await ask([Call("eth_getBlockReceipts", (block.header.hash,)) for block, _ in doubtful])
    for (block, silent), one in zip(doubtful, got, strict=True):
        for made in block_receipts(result(one), block.hashes):
            if missing := silent & {log.contract for log in made.transfers}:
                raise Malformed(f"its events of block {block.header.number} lack those of {min(missing)}")


def _silent(block: Incoming, events: _Events, wanted: Wanted) -> set[str]:
    """The tokens of which no event came, although the block's bloom filter allows for some."""
    if not in_bloom(block.bloom, TRANSFER_TOPIC):
        return set()
    heard = {log.contract for logs in events.values() for log in logs}
    return {contract for contract in wanted.contracts.keys() - heard if in_bloom(block.bloom, contract)}


def _arrived(block: Incoming, receipts: Sequence[Receipt], events: _Events, wanted: Wanted) -> Iterator[Arrival]:
    """What a block brought."""
    by_hash = {one.hash: one for one in block.paying}
    for made in receipts:
        logs = events.get(made.hash, [])
        if [log for log in made.transfers if log.contract in wanted.contracts] != logs:
            raise Malformed(f"its events of block {made.block} are others than those in the receipt of {made.hash}")
        if not made.succeeded:
            continue  # it moved nothing, and has no events
        where: dict[str, Any] = {"hash": made.hash, "block": made.block, "block_hash": made.block_hash}
        if (one := by_hash.get(made.hash)) is not None and wanted.coin(one):
            sender, to = _address(one.sender), _address(one.to)
            yield Arrival(part=COIN, sender=sender, to=to, contract="", amount=one.value, **where)
        for log in filter(wanted.tokens, logs):
            # Counted from the transaction's first event, so that it has the same number in another block.
            part, contract = str(log.index - made.first_index), wanted.contracts[log.contract]
            sender, to = _address(log.sender), _address(log.to)
            yield Arrival(part=part, sender=sender, to=to, contract=contract, amount=log.amount, **where)


def _sums(number: int, arrived: Sequence[Arrival], events: _Events) -> dict[_Place, int]:
    """What the events of a block say that each recipient of tokens received, less what it sent."""
    places = {_Place(one.contract.lower(), one.to.lower(), number) for one in arrived if one.contract}
    sums = dict.fromkeys(sorted(places), 0)
    for logs in events.values() if sums else ():
        for log in logs:
            for side, amount in ((log.to, log.amount), (log.sender, -log.amount)):
                if (place := _Place(log.contract, side, number)) in sums:
                    sums[place] += amount
    return sums


def _address(text: str) -> str:
    return checksum_address(address_bytes(text))
