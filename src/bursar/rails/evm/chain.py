"""An EVM chain behind its nodes (`rails.chain.Chain`): fees, nonces, sending, balances, and what became of it all.

What ends a payment is decided in `verdict` from what `fates` collects; which nodes are believed, in `nodes`; what a
transaction offers, in `fees`. Here each question becomes one request per node. Nothing is kept but what is known about
nodes: every answer is of the chain as it is now. Sending never fails because of what a node says (W12): all answers are
handed back, and the fate is asked afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from bursar.model.records import Priority
from bursar.ports import Ports
from bursar.rails.chain import (
    Arrivals,
    Balances,
    Codec,
    Fate,
    Fee,
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
    WalletShort,
    WouldRevert,
)
from bursar.rails.evm.arriving import Incomings, Wanted, require_same
from bursar.rails.evm.codec import EvmCodec, LowerCase, hash_of, transfer_data
from bursar.rails.evm.fates import Fates
from bursar.rails.evm.fees import (
    GAS_LIMIT_DEFAULT_MAX,
    PLAIN_GAS,
    Market,
    Reverted,
    Short,
    gas_limit,
    median,
    offer,
    refusal,
    replacement,
    transfer_answer,
)
from bursar.rails.evm.nodes import TIMEOUT_S, Anchor, Answers, Ask, Nodes, NodesDisagree, block_call, require_linked
from bursar.rails.evm.reading import Block, block, offered
from bursar.rails.evm.rpc import Call, CallError, Endpoint, Malformed, Post, data, quantity, result
from bursar.rails.evm.tokens import balance, balance_call

SCAN_BLOCKS_MAX = 16  # of one page
_DELEGATION = bytes.fromhex("ef0100")  # EIP-7702: an account with a key that lets code act for it
_KNOWN = ("already known", "known transaction", "already imported", "already in mempool", "already exists")


T = TypeVar("T")


_Holding = tuple[int, int, tuple[int | None, ...]]  # coin, nonce and tokens of an address


class _DryRun(msgspec.Struct, frozen=True):
    """What one node says about a payment that has not been made."""

    market: Market
    coin: int
    tokens: int | None  # None: the payment is not of a token, or there is none
    gas: int | Reverted | Short


class EvmChain:
    """One chain. `post` is `bursar.http.Pool.post`; `monotonic` is the clock's."""

    def __init__(
        self,
        network: Network,
        endpoints: Sequence[Endpoint],
        post: Post,
        monotonic: Callable[[], float],
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.network = network
        self.codec: Codec = EvmCodec()
        self._nodes = Nodes(network, endpoints, post, monotonic, timeout_s)
        self._fates = Fates(self._nodes)
        self._incoming = Incomings(self._nodes)
        self._scan_blocks = SCAN_BLOCKS_MAX

    # --- fees --------------------------------------------------------------------------------------------------------

    async def quote(self, sender: str, order: Order, shape: Shape, priority: Priority) -> Fee:
        runs = await self._dry_runs(sender, order, shape)
        market = Market(median(run.market.base for run in runs.values()), self.network.legacy_fees)
        held = [run.tokens for run in runs.values() if run.tokens is not None]
        if held:
            self._require(sender, order.contract, max(held), order.amount)
        gas = self._gas(runs, order)
        ceiling, tip = self.network.ceiling(priority), self.network.tips[priority]
        fee = offer(self.network.name, market, tip, ceiling, gas or PLAIN_GAS)
        coin = order.amount if shape is Shape.PAY and not order.contract else 0
        self._require(sender, self.network.native or "coin", max(run.coin for run in runs.values()), coin + fee.worst)
        if gas is None:
            names = ", ".join(sorted(runs))
            raise NodesUnavailable(self.network.name, f"{names}: the wallet is said to have too little, and has enough")
        return fee

    def _require(self, wallet: str, asset: str, has: int, needs: int) -> None:
        if has < needs:
            raise WalletShort(self.network.name, wallet, asset, has, needs)

    def _gas(self, runs: Answers[_DryRun], order: Order) -> int | None:
        """The gas limit; None if the nodes say nothing but that the wallet has too little coin."""
        estimates = [run.gas for run in runs.values() if isinstance(run.gas, int)]
        if estimates:
            highest = order.gas_limit_max or GAS_LIMIT_DEFAULT_MAX
            limit = gas_limit(max(estimates), highest)
            if limit is None:
                why = f"it takes {max(estimates)} gas, and the limit of the asset is {highest}"
                raise WouldRevert(self.network.name, why)
            return limit
        refused = {name: run.gas for name, run in runs.items() if isinstance(run.gas, Reverted)}
        if not refused:
            return None
        name, reason = sorted(refused.items())[0]
        # A refusal fails the payment for good, so that one node, which may be behind, is not enough.
        if len(refused) < self._nodes.quorum:
            why = f"only {name} says that the payment would fail ({reason.why}){self._nodes.missing(runs)}"
            raise NodesUnavailable(self.network.name, why)
        raise WouldRevert(self.network.name, reason.why)

    async def _dry_runs(self, sender: str, order: Order, shape: Shape) -> Answers[_DryRun]:
        """What each node says to this very payment: it runs against the newest state, and nothing is signed."""
        to, value, payload = sender, 0, b""
        if shape is Shape.PAY:
            to, value = order.contract or order.to, 0 if order.contract else order.amount
            payload = transfer_data(order.to, order.amount) if order.contract else b""
        tokens = bool(payload)
        message = {"from": sender, "to": to, "value": hex(value), "data": "0x" + payload.hex()}
        calls = [
            self._market_call(),
            Call("eth_getBalance", (sender, "latest")),
            Call("eth_estimateGas", (message,)),
        ]
        if tokens:
            calls += [
                Call("eth_call", (message, "latest")),
                balance_call(order.contract, sender, "latest"),
                Call("eth_getCode", (order.contract, "latest")),
            ]

        def read(results: list[Any]) -> _DryRun:
            gas = _tried_token(results[2], results[3], results[5]) if tokens else _tried(results[2])
            held = balance(results[4]) if tokens else None
            return _DryRun(self._market(results[0]), quantity(result(results[1])), held, gas)

        return self._some("a fee", await self._nodes.ask(calls, None, read))

    def _market_call(self) -> Call:
        return Call("eth_gasPrice") if self.network.legacy_fees else Call("eth_feeHistory", ("0x1", "latest", []))

    def _market(self, value: Any) -> Market:
        found = result(value)
        if self.network.legacy_fees:
            return Market(quantity(found), True)
        fees = found.get("baseFeePerGas") if isinstance(found, dict) else None
        if not isinstance(fees, list) or len(fees) != 2:
            raise Malformed("a fee history of one block has two base fees")
        return Market(quantity(fees[1]), False)

    async def higher(self, fee: Fee, priority: Priority) -> Fee | None:
        said = await self._nodes.ask([self._market_call()], None, lambda results: self._market(results[0]).base)
        base = median(self._some("a fee", said).values())
        market = Market(base, self.network.legacy_fees)
        return replacement(fee, market, self.network.tips[priority], self.network.ceiling(priority))

    def _some(self, what: str, said: Answers[T]) -> Answers[T]:
        if not said:
            raise NodesUnavailable(
                self.network.name, f"no node answers when asked for {what}{self._nodes.missing(said)}"
            )
        return said

    # --- nonces and sending ------------------------------------------------------------------------------------------

    async def slot(self, sender: str) -> Slot:
        # Never "pending": a node's pool is its own, and forgets (W11). And never the word of one node: a nonce that is
        # too high leaves a gap, behind which nothing of this wallet is ever included.
        call = Call("eth_getTransactionCount", (sender, "latest"))
        said = await self._nodes.ask([call], None, lambda results: quantity(result(results[0])))
        return Slot(nonce=self._nodes.vouched(f"the nonce of {sender}", said))

    async def send(self, raw: bytes) -> Sent:
        hash_ = hash_of(raw)

        def read(results: list[Any]) -> tuple[bool, str]:
            if isinstance(said := results[0], CallError):
                return any(words in said.message.lower() for words in _KNOWN), f"{said.code}: {said.message}"
            if isinstance(said, str) and said.lower() == hash_:
                return True, "accepted"
            return False, "another hash came back than that of the bytes"

        answered = await self._nodes.ask([Call("eth_sendRawTransaction", ("0x" + raw.hex(),))], None, read)
        words = {name: said for name, (_, said) in answered.items()} | answered.silent
        return Sent(accepted=any(accepted for accepted, _ in answered.values()), answers=words)

    async def fate(self, question: Question) -> Fate:
        return await self._fates.ask(question)

    async def sent_elsewhere(self, hash_: str) -> SentElsewhere | None:
        known_as = hash_.lower()
        call = Call("eth_getTransactionByHash", (known_as,))
        said = await self._nodes.ask([call], None, lambda results: offered(result(results[0]), known_as))
        found = self._nodes.agree_if_there(f"transaction {known_as}", said)
        if found is None:
            return None
        sender = self.codec.check_address(self.network.name, found.sender)
        fee = Fee(gas_limit=found.gas, price=found.price)
        return SentElsewhere(hash=known_as, sender=sender, slot=Slot(nonce=found.nonce), fee=fee)

    # --- what the chain holds ----------------------------------------------------------------------------------------

    async def balances(self, address: str, contracts: Sequence[str]) -> Balances:
        anchor = await self._nodes.firm_anchor()
        return self._agreed(address, contracts, anchor, _one(await self._holdings(anchor, [address], contracts), 0))

    async def balances_of(self, addresses: Sequence[str], contracts: Sequence[str]) -> dict[str, Balances | str]:
        anchor = await self._nodes.firm_anchor()
        said = await self._holdings(anchor, addresses, contracts)
        found: dict[str, Balances | str] = {}
        for place, address in enumerate(addresses):
            try:
                found[address] = self._agreed(address, contracts, anchor, _one(said, place))
            except NodesDisagree as error:  # of the others they may say the same
                found[address] = str(error)
        return found

    async def _holdings(
        self, anchor: Anchor, addresses: Sequence[str], contracts: Sequence[str]
    ) -> Answers[tuple[_Holding, ...]]:
        """What each node says that addresses have at the anchor."""
        at = hex(anchor.number)
        calls = [
            call
            for address in addresses
            for call in (
                Call("eth_getBalance", (address, at)),
                Call("eth_getTransactionCount", (address, at)),
                *(balance_call(contract, address, at) for contract in contracts),
            )
        ]

        def read(results: list[Any]) -> tuple[_Holding, ...]:
            return tuple(_holding(part) for part in _parts(results, 2 + len(contracts)))

        return await self._nodes.ask(calls, anchor.nodes, read)

    def _agreed(self, address: str, contracts: Sequence[str], anchor: Anchor, said: Answers[_Holding]) -> Balances:
        """What nodes say of one address, if they say the same."""
        coin, nonce, tokens = self._nodes.agree(f"balances of {address} at block {anchor.number}", said)
        held = {}
        for contract, amount in zip(contracts, tokens, strict=True):
            if amount is None:
                raise InvalidAddress(self.network.name, contract, "no token is at this address")
            held[contract] = amount
        return Balances(block=anchor.number, block_hash=anchor.hash, coin=coin, tokens=held, nonce=nonce)

    async def final_block(self) -> tuple[int, str]:
        anchor = await self._nodes.firm_anchor()
        return anchor.number, anchor.hash

    async def is_contract(self, address: str) -> bool:
        def read(results: list[Any]) -> bool:
            code = data(result(results[0]))
            return bool(code) and not (len(code) == 23 and code.startswith(_DELEGATION))

        await self._nodes.anchor()  # learns who is behind
        said = await self._nodes.ask([Call("eth_getCode", (address, "latest"))], None, read)
        # A payment fails for it: where nodes differ it waits, until the one that lags has seen the code too.
        known = {name: found for name, found in said.items() if not self._nodes.is_behind(name)}
        return self._nodes.agree(f"code at {address}", Answers(known, said.silent))

    async def nodes(self) -> tuple[NodeStatus, ...]:
        return await self._nodes.status()

    # --- watching ----------------------------------------------------------------------------------------------------

    async def scan(self, addresses: Container[str], after: int, after_hash: str = "") -> Page:
        anchor = await self._nodes.firm_anchor()
        if anchor.number <= after:
            if anchor.number == after and after_hash:
                require_same(self.network.name, after, after_hash, anchor.hash)
            return Page(up_to=after, up_to_hash=after_hash, transactions=())
        blocks = await self._blocks(anchor, after, LowerCase(addresses))
        parent = after_hash or blocks[0].header.parent
        require_same(self.network.name, after, parent, blocks[0].header.parent)
        own = tuple(
            OwnTransaction(
                hash=one.hash,
                sender=self.codec.check_address(self.network.name, one.sender),
                nonce=one.nonce,
                block=found.header.number,
            )
            for found in blocks
            for one in found.own
        )
        last = blocks[-1].header
        return Page(up_to=last.number, up_to_hash=last.hash, transactions=own)

    async def arrivals(
        self, addresses: Container[str], contracts: frozenset[str], after: int, after_hash: str, up_to: int
    ) -> Arrivals:
        return await self._incoming.page(Wanted(addresses, contracts), after, after_hash, up_to)

    async def _blocks(self, anchor: Anchor, after: int, addresses: LowerCase) -> tuple[Block, ...]:
        """The next blocks, read whole at two nodes that say the same about every transaction in them.

        One node could leave out a transaction or name another sender; its block hash would not show it.
        """
        numbers = range(after + 1, min(anchor.number, after + self._scan_blocks) + 1)

        async def read(_name: str, ask: Ask) -> tuple[Block, ...]:
            results = await ask([block_call(number, whole=True) for number in numbers])
            found = tuple(block(result(one), n, addresses) for n, one in zip(numbers, results, strict=True))
            require_linked([one.header for one in found], anchor)
            return found

        said = await self._nodes.ask_enough(anchor, read)
        if len(said) < self._nodes.quorum and self._scan_blocks > 1:
            self._scan_blocks //= 2  # the blocks may be too large for one answer
        found = self._nodes.agree(f"blocks {numbers[0]} to {numbers[-1]}", said)
        self._scan_blocks = min(SCAN_BLOCKS_MAX, self._scan_blocks + 1)
        return found


def chain_behind(network: Network, urls: Sequence[str], post: Post, ports: Ports, timeout_s: float) -> EvmChain:
    """A chain behind nodes at these URLs. They are named by their places, for their URLs are never shown."""
    endpoints = [Endpoint(name=f"{network.name}-{number}", url=url) for number, url in enumerate(urls, 1)]
    return EvmChain(network, endpoints, post, ports.monotonic, timeout_s)


def _parts(results: list[Any], size: int) -> Iterator[list[Any]]:
    """Results, in groups of so many."""
    return (results[start : start + size] for start in range(0, len(results), size))


def _one(said: Answers[tuple[_Holding, ...]], place: int) -> Answers[_Holding]:
    """What nodes say of one of the addresses."""
    return Answers({name: holdings[place] for name, holdings in said.items()}, said.silent)


def _holding(part: list[Any]) -> _Holding:
    coin, nonce, *tokens = part
    return quantity(result(coin)), quantity(result(nonce)), tuple(balance(one) for one in tokens)


def _tried(value: Any) -> int | Reverted | Short:
    """An estimate of gas, or why there is none."""
    return refusal(value) if isinstance(value, CallError) else quantity(value)


def _tried_token(estimate: Any, called: Any, code: Any) -> int | Reverted | Short:
    """A call to an address without code succeeds and does nothing: that is not a token."""
    if not data(result(code)):
        return Reverted("there is no contract at the token's address")
    if isinstance(called, CallError):
        return refusal(called)
    return transfer_answer(data(called)) or _tried(estimate)
