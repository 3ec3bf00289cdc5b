"""A small EVM chain in memory, and nodes that show it: honest unless a test makes one lie, lag, hang or fail.

The chain mines what its nodes were sent, one nonce after the other, and does what the bytes say; gas is 21,000 for coin
and 50,000 for tokens. A token is whatever the test says: `Token.events` makes the Transfer logs of a call, and what
they say moves, unless `Token.moves` says otherwise.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from coincurve import PrivateKey
from eth_hash.auto import keccak

from bursar.model.records import Priority
from bursar.rails.chain import Decoded, Fee, Network, Order, Question, Shape, Signed, Slot, Try
from bursar.rails.evm.chain import EvmChain
from bursar.rails.evm.codec import EvmCodec, address_of, transfer_data
from bursar.rails.evm.reading import TRANSFER_TOPIC
from bursar.rails.evm.rpc import Endpoint
from bursar.sim.chain_state import Movement
from bursar.sim.evm_rpc import bloom

CODEC = EvmCodec()
KEY = PrivateKey(b"\x11" * 32)
WALLET = address_of(KEY.public_key.format(compressed=False))
ALICE = CODEC.check_address("fake", "0x" + 20 * "a1")
BOB = CODEC.check_address("fake", "0x" + 20 * "b0")
TOKEN = CODEC.check_address("fake", "0x" + 20 * "70")
GWEI = 10**9

Event = tuple[str, str, str, int]  # contract, from, to, amount
Lie = Callable[[list[Any], Any], Any]  # parameters and the honest result → what the node says


class CallRefused(Exception):
    """An error in place of a result."""

    def __init__(self, code: int, message: str, data: str = "") -> None:
        super().__init__(message)
        self.error = {"code": code, "message": message} | ({"data": data} if data else {})


@dataclass
class Token:
    """What a contract does."""

    balance: int = 10**18  # of every address, before anything moved
    returns: str = "0x" + 63 * "0" + "1"
    reverts: str = ""  # the reason; "": it does not
    events: Callable[[str, str, int], list[Event]] = lambda sender, to, amount: [(TOKEN, sender, to, amount)]
    moves: Callable[[str, str, int], list[Event]] | None = None


@dataclass
class Mined:
    signed: Signed
    sender: str
    decoded: Decoded
    succeeded: bool = True
    events: list[Event] = field(default_factory=list)
    moves: list[Event] = field(default_factory=list)


@dataclass
class FakeBlock:
    hash: str
    parent: str
    transactions: list[Mined]


class FakeChain:
    """The truth."""

    def __init__(self, chain_id: int = 56) -> None:
        self.chain_id = chain_id
        self.blocks = [FakeBlock(_hash("genesis"), _hash("nothing"), [])]
        self.pool: dict[str, Signed] = {}
        self.tokens: dict[str, Token] = {TOKEN: Token()}
        self.code: dict[str, str] = {TOKEN.lower(): "0x6001"}
        self.coin = 10**20
        self.base = GWEI
        self.failing: set[str] = set()  # hashes that revert when they are mined
        self._salt = count()

    def mine(self, blocks: int = 1) -> None:
        for _ in range(blocks):
            block = FakeBlock(_hash(f"block {next(self._salt)}"), self.blocks[-1].hash, [])
            self.blocks.append(block)
            for hash_, signed in list(self.pool.items()):
                decoded, sender, _ = CODEC.read(signed.raw)
                if decoded.slot.nonce != self.nonce(sender, len(self.blocks) - 1):
                    continue
                del self.pool[hash_]
                succeeded = hash_ not in self.failing
                mined = Mined(signed, sender, decoded, succeeded)
                if succeeded and decoded.contract:
                    token, call = self.tokens[decoded.contract], (sender, decoded.to, decoded.amount)
                    mined.events = token.events(*call)
                    mined.moves = mined.events if token.moves is None else token.moves(*call)
                block.transactions.append(mined)

    def reorganise(self, depth: int) -> None:
        """Replace the last blocks by as many empty ones. What was in them is gone."""
        del self.blocks[-depth:]
        pool, self.pool = self.pool, {}
        self.mine(depth)
        self.pool = pool

    def nonce(self, sender: str, height: int) -> int:
        mined = [one for block in self.blocks[: height + 1] for one in block.transactions]
        return sum(one.sender.lower() == sender.lower() for one in mined)

    def tokens_of(self, contract: str, address: str, height: int) -> int:
        mined = [one for block in self.blocks[: height + 1] for one in block.transactions]
        moves = [move for one in mined for move in one.moves if move[0].lower() == contract.lower()]
        received = sum(amount for _, _, to, amount in moves if to.lower() == address.lower())
        return received - sum(amount for _, sender, _, amount in moves if sender.lower() == address.lower())

    def place(self, hash_: str, height: int) -> tuple[int, int] | None:
        for number, block in enumerate(self.blocks[: height + 1]):
            for index, one in enumerate(block.transactions):
                if one.signed.hash == hash_:
                    return number, index
        return None


class FakeNode:
    """One node: JSON-RPC over the chain, up to `behind` blocks ago."""

    def __init__(self, name: str, chain: FakeChain) -> None:
        self.name = name
        self.chain = chain
        self.behind = 0
        self.down = False
        self.hangs = False
        self.lies: dict[str, Lie] = {}
        self.requests: list[list[str]] = []  # methods of each batch
        self.final_lag = 2

    @property
    def height(self) -> int:
        return max(0, len(self.chain.blocks) - 1 - self.behind)

    async def answer(self, body: bytes) -> tuple[int, bytes]:
        calls = json.loads(body)
        self.requests.append([call["method"] for call in calls])
        if self.hangs:
            await asyncio.Event().wait()
        if self.down:
            raise ConnectionError(f"https://{self.name}.example/secret-key refused")
        answers = []
        for call in reversed(calls):  # the order of answers means nothing
            reply = {"jsonrpc": "2.0", "id": call["id"]}
            try:
                reply["result"] = self.result(call["method"], call["params"])
            except CallRefused as refused:
                reply["error"] = refused.error
            answers.append(reply)
        return 200, json.dumps(answers).encode()

    def result(self, method: str, params: list[Any]) -> Any:
        honest = getattr(self, method)(*params)
        lie = self.lies.get(method)
        return honest if lie is None else lie(params, honest)

    # --- methods, by the names of the interface ---

    def eth_chainId(self) -> str:
        return hex(self.chain.chain_id)

    def _number(self, at: str) -> int:
        named = {"latest": self.height, "finalized": max(0, self.height - self.final_lag)}
        return named[at] if at in named else int(at, 16)

    def eth_getBlockByNumber(self, at: str, whole: bool) -> Any:
        number = self._number(at)
        if number > self.height:
            return None
        block = self.chain.blocks[number]
        listed = [self._transaction(number, i) if whole else m.signed.hash for i, m in enumerate(block.transactions)]
        shown = {"number": hex(number), "hash": block.hash, "parentHash": block.parent, "transactions": listed}
        events = [
            Movement(contract.lower(), sender.lower(), to.lower(), amount)
            for one in block.transactions
            for contract, sender, to, amount in one.events
        ]
        return shown | {"logsBloom": bloom(events)}

    def _transaction(self, number: int, index: int) -> dict[str, Any]:
        block = self.chain.blocks[number]
        inside = {"blockNumber": hex(number), "blockHash": block.hash, "transactionIndex": hex(index)}
        return _shown(block.transactions[index].signed) | inside

    def eth_getTransactionByHash(self, hash_: str) -> Any:
        if place := self.chain.place(hash_, self.height):
            return self._transaction(*place)
        if signed := self.chain.pool.get(hash_):
            return _shown(signed) | {"blockNumber": None, "blockHash": None, "transactionIndex": None}
        return None

    def eth_getTransactionReceipt(self, hash_: str) -> Any:
        place = self.chain.place(hash_, self.height)
        if place is None:
            return None
        block = self.chain.blocks[place[0]]
        mined = block.transactions[place[1]]
        return {
            "transactionHash": hash_,
            "blockNumber": hex(place[0]),
            "blockHash": block.hash,
            "status": hex(mined.succeeded),
            "gasUsed": hex(50_000 if mined.decoded.contract else 21_000),
            "effectiveGasPrice": hex(mined.decoded.fee.price),
            "logs": [log for log in _logs(block) if log["transactionHash"] == hash_],
        }

    def eth_getBlockReceipts(self, hash_: str) -> Any:
        block = next(one for one in self.chain.blocks if one.hash == hash_)
        return [self.eth_getTransactionReceipt(one.signed.hash) for one in block.transactions]

    def eth_getLogs(self, wanted: dict[str, Any]) -> Any:
        block = next((one for one in self.chain.blocks if one.hash == wanted["blockHash"]), None)
        if block is None:
            raise CallRefused(-32000, "unknown block")
        places = list(enumerate(wanted["topics"]))
        return [
            log
            for log in _logs(block)
            if log["address"] in _named(wanted["address"])
            and all(one is None or log["topics"][place] in one for place, one in places)
        ]

    def eth_getTransactionCount(self, sender: str, at: str) -> str:
        return hex(self.chain.nonce(sender, self._number(at)))

    def eth_sendRawTransaction(self, raw: str) -> str:
        signed = Signed(raw=bytes.fromhex(raw[2:]), hash="0x" + keccak(bytes.fromhex(raw[2:])).hex())
        decoded, sender, _ = CODEC.read(signed.raw)
        assert decoded.slot.nonce is not None
        if decoded.slot.nonce < self.chain.nonce(sender, self.height):
            raise CallRefused(-32000, "nonce too low: next nonce 7, tx nonce 3")
        if signed.hash in self.chain.pool:
            raise CallRefused(-32000, "already known")
        self.chain.pool[signed.hash] = signed
        return signed.hash

    def eth_feeHistory(self, blocks: str, newest: str, percentiles: list[int]) -> Any:
        return {"oldestBlock": hex(self.height), "baseFeePerGas": [hex(1), hex(self.chain.base)], "gasUsedRatio": [0.5]}

    def eth_gasPrice(self) -> str:
        return hex(self.chain.base)

    def eth_getBalance(self, address: str, at: str) -> str:
        return hex(self.chain.coin)

    def eth_getCode(self, address: str, at: str) -> str:
        return self.chain.code.get(address.lower(), "0x")

    def _token(self, address: str) -> Token | None:
        return next((token for at, token in self.chain.tokens.items() if at.lower() == address.lower()), None)

    def eth_estimateGas(self, message: dict[str, str]) -> str:
        if int(message["value"], 16) > self.chain.coin:
            raise CallRefused(-32000, "insufficient funds for gas * price + value: address has 1 want 2")
        self.eth_call(message, "latest")
        return hex(21_000 if message["data"] == "0x" else 48_000)

    def eth_call(self, message: dict[str, str], at: str) -> str:
        token = self._token(message["to"])
        if token is None:
            return "0x"
        if message["data"].startswith("0x70a08231"):
            held = self.chain.tokens_of(message["to"], "0x" + message["data"][-40:], self._number(at))
            return f"0x{token.balance + held:064x}"
        if token.reverts:
            reason = token.reverts.encode()
            words = (
                (32).to_bytes(32, "big") + len(reason).to_bytes(32, "big") + reason.ljust(-(-len(reason) // 32) * 32)
            )
            raise CallRefused(3, f"execution reverted: {token.reverts}", "0x08c379a0" + words.hex())
        return token.returns


def _hash(text: str) -> str:
    return "0x" + keccak(text.encode()).hex()


def _topic(address: str) -> str:
    return "0x" + 24 * "0" + address[2:].lower()


def _named(named: str | list[str]) -> list[str]:
    return [one.lower() for one in ([named] if isinstance(named, str) else named)]


def _logs(block: FakeBlock) -> list[dict[str, Any]]:
    events = [(mined.signed.hash, event) for mined in block.transactions for event in mined.events]
    return [
        {
            "address": contract.lower(),
            "topics": [TRANSFER_TOPIC, _topic(sender), _topic(to)],
            "data": f"0x{amount:064x}",
            "logIndex": hex(i),
            "blockHash": block.hash,
            "transactionHash": hash_,
        }
        for i, (hash_, (contract, sender, to, amount)) in enumerate(events)
    ]


def _shown(signed: Signed) -> dict[str, Any]:
    decoded, sender, _ = CODEC.read(signed.raw)
    token = decoded.contract
    return {
        "hash": signed.hash,
        "from": sender.lower(),
        "nonce": hex(decoded.slot.nonce or 0),
        "to": (token or decoded.to).lower(),
        "value": hex(0 if token else decoded.amount),
        "input": "0x" + transfer_data(decoded.to, decoded.amount).hex() if token else "0x",
        "gas": hex(decoded.fee.gas_limit),
        "gasPrice": hex(decoded.fee.price - 1),  # what it costs by now; the most is below
        "maxFeePerGas": hex(decoded.fee.price),
    }


class World:
    """A chain, its nodes, and a clock that the test moves."""

    def __init__(self, names: str = "ab", chain_id: int = 56) -> None:
        self.chain = FakeChain(chain_id)
        self.nodes = {name: FakeNode(name, self.chain) for name in names}
        self.now = 1000.0
        self.sent: dict[str, Signed] = {}

    def open(self, **network: Any) -> EvmChain:
        """Our side of the chain: finality by tag, one block of depth."""
        settings = {"fee_ceilings": (100 * GWEI, 50 * GWEI, 20 * GWEI), "tips": (2 * GWEI, GWEI, GWEI)} | network
        endpoints = [Endpoint(name=name, url=f"https://{name}.example/secret-key") for name in self.nodes]
        of_chain = Network(name="fake", kind="evm", chain_id=56, **settings)
        return EvmChain(of_chain, endpoints, self.post, lambda: self.now, timeout_s=0.05)

    async def post(self, url: str, headers: Mapping[str, str], body: bytes, timeout_s: float) -> tuple[int, bytes]:
        return await self.nodes[url[8]].answer(body)

    def sign(self, order: Order, nonce: int = 0, shape: Shape = Shape.PAY, price: int = 3 * GWEI) -> Signed:
        network = Network(name="fake", kind="evm", chain_id=56)
        fee = Fee(gas_limit=100_000, price=price, tip=GWEI)
        unsigned = CODEC.build(network, WALLET, order, shape, Slot(nonce=nonce), fee)
        return CODEC.signed(unsigned, KEY.sign_recoverable(CODEC.digest(unsigned), hasher=None), WALLET)

    def submit(self, signed: Signed) -> Signed:
        """Put it into the pool of every node."""
        self.chain.pool[signed.hash] = signed
        return signed

    def finish(self) -> None:
        """Mine until everything in the pool is final."""
        self.chain.mine(4)


COIN = Order(payout="payout-1", to=ALICE, amount=5 * 10**17)
TOKENS = Order(payout="payout-2", to=ALICE, contract=TOKEN, amount=2_500_000)


def question(
    order: Order, *tries: tuple[Signed, Shape] | Signed, nonce: int = 0, consumer: str = "", one_node: bool = False
) -> Question:
    pairs = [one if isinstance(one, tuple) else (one, Shape.PAY) for one in tries]
    named = tuple(Try(hash=signed.hash, shape=shape, slot=Slot(nonce=nonce)) for signed, shape in pairs)
    return Question(sender=WALLET, order=order, tries=named, consumer=consumer, one_node_is_enough=one_node)


NORMAL = Priority.NORMAL
