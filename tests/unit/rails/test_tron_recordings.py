"""The simulated node against recordings of a real one (java-tron 4.8.0): same status, same keys, same values.

What may differ: ids, hashes, signatures, block numbers and times. A recording that says "…" was shortened there. Where
a recorded request is whole, it is asked again as it was. A recorded broadcast is mostly cut, and its key is not known:
the note says what it was, and the same is built and signed here, for accounts whose owner has a key of ours.

Not replayed: what no rail asks (`LEFT_OUT`), code of the recorded contract that the simulated token does not have, what
differs by the settings of a node, and repetitions of what is replayed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.tron_fake import KEY, OTHER_KEY

from bursar.rails.tron.addresses import bytes_of, text_of
from bursar.rails.tron.protobuf import data, number
from bursar.signer.curve import public_key, sign_digest, tron_address
from bursar.sim.chain_state import Token
from bursar.sim.tron_nodes import Node
from bursar.sim.tron_tx import read
from bursar.sim.tron_world import FREE_NET, World

FOLDER = Path(__file__).parent / "tron"
SERVICE, ALICE, BOB = (
    "TG7torYgZdi9xTY41BpkMj7iKPef7XHgH3",
    "TE5ZXJewPbgrVHw1s3hrQsP4j8mUtRugcd",
    "TTT4iQMHt15PimrRW5RzoXpKqXrcEceDbv",
)
NEVER = "TDmV28fHh8w6nE2TRZTRxwApobXeHXh8Qk"  # activated
TOKEN = "TB4YUMD83V4ZtHDP6BAHYfA4E7f63Hrjmk"
TRX = 1_000_000
MINE = tron_address(public_key(KEY))
ORDER = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141

MASKED = frozenset(
    {
        *("id", "txID", "txid", "blockID", "parentHash", "txTrieRoot", "witness_address", "witness_signature"),
        *("signature", "raw_data_hex", "ref_block_bytes", "ref_block_hash", "expiration", "timestamp"),
        *("blockNumber", "blockTimeStamp", "number"),
    }
)
LEFT_OUT = frozenset(
    {
        *("createtransaction", "triggersmartcontract", "estimateenergy", "broadcasttransaction", "getsignweight"),
        *("getaccountnet", "getcontractinfo", "getenergyprices", "getbandwidthprices", "getnextmaintenancetime"),
        *("getblock", "getblockbyid", "getblockbylatestnum", "getblockbylimitnext", "gettransactioncountbyblocknum"),
        "getnodeinfo",
    }
)


def entries(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((FOLDER / f"{name}.json").read_text())["entries"]
    return found


def same(recorded: Any, said: Any, where: str, key: str = "") -> None:
    """Like the recording, but for ids, hashes and times."""
    if isinstance(recorded, dict):
        assert isinstance(said, dict), where
        keys = recorded.keys() - {"…"}
        assert keys <= said.keys() and ("…" in recorded or keys == said.keys()), f"{where}: {keys ^ said.keys()}"
        for name in keys:
            same(recorded[name], said[name], f"{where}.{name}", name)
    elif isinstance(recorded, list):
        assert isinstance(said, list) and len(said) == len(recorded), f"{where}: {said}"
        for place, (one, other) in enumerate(zip(recorded, said, strict=True)):
            same(one, other, f"{where}[{place}]", key)
    elif key == "transaction" and isinstance(recorded, str):
        assert isinstance(said, str), where
        if "…" not in recorded:
            same(json.loads(recorded), json.loads(said), where)
    elif key in MASKED or key == "resMessage" or "…" in str(recorded):
        assert type(said) is type(recorded), f"{where}: {said!r}"
        if key in ("id", "txID", "txid", "blockID"):
            assert re.fullmatch(r"[0-9a-f]{64}", said), where
    elif isinstance(recorded, str):
        blank = re.compile(r"\b[0-9a-f]{60,}\b")
        assert blank.sub("#", said) == blank.sub("#", recorded), where
    else:
        assert (said, type(said)) == (recorded, type(recorded)), where


class Replay:
    """A chain with the accounts of the recordings. Their owner's permission names a key of ours."""

    def __init__(self, **world: Any) -> None:
        self.world = World(**world)
        self.token = self.world.deploy(Token(TOKEN, gas=12_414))
        for account in (SERVICE, ALICE, BOB):
            self.account(account, 1_000_000 * TRX)
        self.world.fund(SERVICE, 10**15, TOKEN)
        self.node = Node(self.world, "node", 1)
        self.mine(22)

    def account(self, address: str, balance: int, *, net: bool = True) -> None:
        """An account with a balance, and with free bandwidth or without."""
        self.world.fund(address, balance)
        if not balance:  # it has spent everything
            self.world.fund(address, 0)
        self.world.permissions[address] = MINE
        self.world.mine()
        if not net:
            self.world.state.rewind(self.world.head.number)
            self.world.state.height = self.world.head.number
            self.world.state.mint(FREE_NET, address, 600)
            self.world.state.height += 1

    def mine(self, blocks: int = 1) -> None:
        for _ in range(blocks):
            self.world.mine()

    def ask(self, path: str, params: Any = None, body: bytes | None = None) -> tuple[int, Any]:
        """A POST; the answer as JSON, or as text where it is none."""
        status, _, answer = self.node.serve(path, json.dumps(params).encode() if body is None else body)
        try:
            return status, json.loads(answer)
        except ValueError:
            return status, answer.decode()

    def check(self, entry: dict[str, Any], path: str = "", params: Any = None) -> None:
        """Ask as it was recorded, or otherwise; and compare."""
        call = path or entry["call"]
        body = entry["body"].encode() if "body" in entry and params is None else None
        status, answer = self.ask(call, entry.get("params") if params is None else params, body)
        where = f"{call} ({entry.get('note', '')})"
        assert status == entry["http_status"], where
        if "response" in entry:
            same(entry["response"], answer, where)

    def raw(
        self,
        owner: str | bytes = ALICE,
        to: str | bytes = BOB,
        amount: int = 1_000_010,
        *,
        ahead_ms: int = 60_000,
        expires: int | None = None,
        reference: bytes | None = None,
        memo: bytes = b"",
        fee_limit: int = 0,
        timestamp: int | None = None,
        contract: bytes | None = None,
    ) -> bytes:
        """raw_data of a transfer of TRX, or of any contract."""
        final = self.world.blocks[self.world.finalized]
        place = bytes.fromhex(final.id[12:32]) if reference is None else reference
        if contract is None:
            owner, to = (bytes_of(one) if isinstance(one, str) else one for one in (owner, to))
            contract = wrapped(1, data(1, owner) + data(2, to) + number(3, amount % 2**64))
        at = self.world.head.timestamp + ahead_ms if expires is None else expires
        stamp = self.world.head.timestamp if timestamp is None else timestamp
        return b"".join(
            (
                data(1, place[:2]),
                data(4, place[2:]),
                number(8, at % 2**64),
                data(10, memo),
                data(11, contract) if contract else b"",
                number(14, stamp),
                number(18, fee_limit % 2**64),
            )
        )

    def call(self, owner: str = SERVICE, calldata: bytes = b"", *, value: int = 0, contract: str = TOKEN) -> bytes:
        """A call of a contract."""
        fields = data(1, bytes_of(owner)) + data(2, bytes_of(contract)) + number(3, value) + data(4, calldata)
        return wrapped(31, fields)


def wrapped(kind: int, value: bytes, *, url: str = "", permission: int = 0) -> bytes:
    name = url or {1: "TransferContract", 31: "TriggerSmartContract"}[kind]
    any_ = data(1, f"type.googleapis.com/protocol.{name}".encode()) + data(2, value)
    return number(1, kind) + data(2, any_) + number(5, permission)


def signed(raw: bytes, *signatures: bytes) -> bytes:
    return data(1, raw) + b"".join(data(2, one) for one in signatures or (signature(raw),))


def signature(raw: bytes, key: bytearray = KEY) -> bytes:
    return sign_digest(key, bytes.fromhex(read(raw, ()).id))


# --- one transfer through every call, byte by byte -------------------------------------------------------------------


def test_lifecycle_of_a_transfer_is_the_recorded_one() -> None:
    """The very bytes, whose real signature the node verifies: unknown, waiting, in a block, solidified, expired."""
    first = 1_794_967_674_000 - 156 * 3_000
    world = World(first=first, ids={134: f"{134:016x}2dc3400f9103d403{'0' * 32}"})
    world.fund(SERVICE, 10**15)
    world.fund(BOB, 10**12)
    replay = Replay.__new__(Replay)
    replay.world, replay.node = world, Node(world, "node", 1)
    while world.head.number < 155:
        world.mine()
    at = iter(entries("transfer_lifecycle"))
    whole = next(at)["transaction_hex"]
    state, seen = "never seen", set()
    for entry in at:
        note = entry.get("note", "")
        if "call" not in entry:
            continue
        method = entry["call"].rpartition("/")[2]
        if method in LEFT_OUT:
            continue
        if note.startswith("in a block") and state == "waiting":
            replay.mine()
            state = "in a block"
        elif note.startswith("solidified") and state == "in a block":
            replay.mine(20)
            state = "solidified"
        elif note.endswith("after its expiration"):
            while world.head.timestamp <= 1_794_967_848_168:
                replay.mine()
        params = {"transaction": whole} if method == "broadcasthex" else None
        if method in ("getaccount", "getnowblock"):
            status, answer = replay.ask(entry["call"], entry["params"])
            assert (status, answer["address"]) == (200, entry["response"]["address"])
            assert answer["balance"] == entry["response"]["balance"], f"{entry['call']} {note}"
        else:
            replay.check(entry, params=params or entry.get("params") or {})
        if method == "broadcasthex" and state == "never seen":
            state = "waiting"
        seen.add((entry["call"], state))
    assert len(seen) > 25 and state == "solidified"


# --- what needs no state: addresses, malformed questions, unknown paths ----------------------------------------------


def posts(name: str) -> Iterator[dict[str, Any]]:
    """Recorded POSTs of JSON to what a rail asks."""
    for entry in entries(name):
        json_body = "urlencoded" not in str(entry.get("headers", {}))
        is_post = entry.get("call", "").startswith("/wallet") and entry.get("method", "POST") == "POST"
        if is_post and json_body and entry["call"].rpartition("/")[2] not in LEFT_OUT:
            yield entry


def test_addresses_are_validated_as_recorded() -> None:
    replay, asked = Replay(), 0
    for entry in posts("accounts_addresses"):
        if (
            entry["call"].endswith("validateaddress")
            or "Error" in entry.get("response", {})
            or not entry.get("response")
        ):
            replay.check(entry)
            asked += 1
    assert asked >= 30


def test_malformed_questions_are_answered_as_recorded() -> None:
    replay, asked = Replay(), 0
    for entry in posts("http_variants"):
        said = entry.get("response")
        if entry.get("note", "").endswith(("on the full-node port", "on the solidity port")):
            continue  # the simulated node answers both at one address, as gateways do
        if said in ({}, None) or "Error" in said:
            exact = entry.get("note") not in ("malformed JSON", "no JSON", "empty body")  # the parser's own words
            status, answer = replay.ask(
                entry["call"], entry.get("params"), entry["body"].encode() if "body" in entry else None
            )
            assert status == entry["http_status"], entry
            if exact and said is not None:
                same(said, answer, str(entry.get("note")))
            elif said is not None:
                assert list(answer) == ["Error"] and answer["Error"].startswith("class ")
            asked += 1
    assert asked >= 20


# --- blocks and accounts ---------------------------------------------------------------------------------------------


def test_blocks_have_the_recorded_fields() -> None:
    replay = Replay()
    sent = signed(replay.raw(SERVICE, BOB, 2_500_000, expires=1_794_967_848_168))
    replay.ask("/wallet/broadcasthex", {"transaction": sent.hex()})
    replay.mine()
    full = replay.world.head.number
    replay.mine(25)
    final, head = replay.world.finalized, replay.world.head.number
    places = {156: full, 155: full - 1, 440: head, 1440: head + 1_000, -1: -1}
    asked = 0
    for entry in entries("node_blocks"):
        method = entry.get("call", "").rpartition("/")[2]
        params = entry.get("params") or {}
        if method == "getchainparameters" and entry["http_status"] == 200:
            recorded = {one["key"]: one.get("value", 0) for one in entry["response"]["chainParameter"]}
            _, said = replay.ask(entry["call"], {})
            for one in said["chainParameter"]:
                assert one.get("value", 0) == recorded[one["key"]], one
                assert one.get("value") != 0, "0 is left out"
        elif method == "getblockbynum" and params.get("num") == 0:
            _, said = replay.ask(entry["call"], {"num": 0})
            recorded = entry["response"]["block_header"]["raw_data"]
            assert said["block_header"]["raw_data"].keys() == recorded.keys(), "the genesis block has no number"
        elif method in ("getnowblock", "getblockbynum", "gettransactioninfobyblocknum"):
            number_ = params.get("num")
            replay.check(entry, params={} if number_ is None else {"num": places[number_]})
        else:
            continue
        asked += 1
    assert asked >= 13 and final >= full


def test_accounts_have_the_recorded_balance_and_kind() -> None:
    replay, asked = Replay(), 0
    for entry in posts("accounts_addresses"):
        said = entry.get("response", {})
        if entry["call"].endswith("/getaccount") and "balance" in said and said["balance"] > 0:
            _, answer = replay.ask(entry["call"], entry["params"])
            assert answer["address"] == said["address"] and isinstance(answer["balance"], int)
            assert answer.keys() <= said.keys() | {"type"}
            asked += 1
        elif entry["call"].endswith("/getaccountresource") and "freeNetLimit" in said:
            _, answer = replay.ask(entry["call"], {"address": ALICE, "visible": True})
            assert answer.keys() <= said.keys() and answer["freeNetLimit"] == said["freeNetLimit"]
            asked += 1
    assert asked >= 4


# --- calls of a token that change nothing ----------------------------------------------------------------------------

NOT_THIS_TOKEN = {  # code of the recorded contract that the simulated one does not have
    "uses up energy",
    "parameter too short",
    "parameter missing",
    "neither function_selector nor data",
    "value to a function that takes none",
}


def test_constant_calls_answer_as_recorded() -> None:
    replay, asked = Replay(), 0
    for entry in posts("trc20_deploy_calls"):
        method = entry["call"].rpartition("/")[2]
        note = entry.get("note", "")
        if method == "getcontract" and entry["http_status"] == 200:
            _, said = replay.ask(entry["call"], entry["params"])
            assert said.keys() <= entry["response"].keys()
            assert said.get("contract_address") == entry["response"].get("contract_address")
        elif (
            method == "triggerconstantcontract" and "symbol" not in str(entry["params"]) and note not in NOT_THIS_TOKEN
        ):
            if "solidified yet" in note:
                continue  # the token of the simulation is there from the start
            _, said = replay.ask(entry["call"], entry["params"])
            recorded = entry["response"]
            for name in ("result", "energy_used", "constant_result"):
                same(recorded.get(name), said.get(name), f"{note} {name}")
            if "transaction" in recorded:
                same(recorded["transaction"]["ret"], said["transaction"]["ret"], note)
            for one, other in zip(recorded.get("logs", []), said.get("logs", []), strict=True):
                assert (one["data"], one["topics"]) == (other["data"], other["topics"])
        else:
            continue
        asked += 1
    assert asked >= 18


# --- broadcasts, case by case ----------------------------------------------------------------------------------------


def high(raw: bytes) -> bytes:
    one = signature(raw)
    return one[:32] + (ORDER - int.from_bytes(one[32:64], "big")).to_bytes(32, "big") + bytes([1 - one[64]])


def v_27(raw: bytes) -> bytes:
    one = signature(raw)
    return one[:64] + bytes([one[64] + 27])


TRANSFER = b"".join((data(1, bytes_of(ALICE)), data(2, bytes_of(BOB)), number(3, 1_000)))
Case = Callable[[Replay], bytes]
OUTCOMES: dict[str, Case] = {
    "success, broadcasthex": lambda r: signed(r.raw()),
    "signed with another key": lambda r: signed(r.raw(), signature(r.raw(), OTHER_KEY)),
    "no signature": lambda r: data(1, r.raw()),
    "65 zero bytes as signature": lambda r: signed(r.raw(), bytes(65)),
    "64 bytes as signature": lambda r: signed(r.raw(), signature(r.raw())[:64]),
    "the same signature twice": lambda r: signed(r.raw(), signature(r.raw()), signature(r.raw())),
    "a right and a foreign signature": lambda r: signed(r.raw(), signature(r.raw()), signature(r.raw(), OTHER_KEY)),
    "the right signature with v 27/28": lambda r: signed(r.raw(), v_27(r.raw())),
    "three bytes behind a right signature": lambda r: signed(r.raw(), signature(r.raw()) + b"\0\0\0"),
    "signature with high s": lambda r: signed(r.raw(), high(r.raw())),
    "expiration 60 s ago": lambda r: signed(r.raw(ahead_ms=-60_000)),
    "expiration = timestamp of the head": lambda r: signed(r.raw(ahead_ms=0)),
    "expiration = head + 2999 ms": lambda r: signed(r.raw(ahead_ms=2_999)),
    "expiration = head + 3000 ms": lambda r: signed(r.raw(ahead_ms=3_000)),
    "expiration 24 h + 6 s after": lambda r: signed(r.raw(ahead_ms=86_406_000)),
    "expiration 0": lambda r: signed(r.raw(expires=0)),
    "expiration negative": lambda r: signed(r.raw(expires=-1)),
    "ref_block_hash wrong": lambda r: signed(r.raw(reference=b"\0\1" + b"x" * 8)),
    "ref_block_bytes of a block that does not": lambda r: signed(r.raw(reference=b"\x7f\xff" + b"x" * 8)),
    "no ref block": lambda r: signed(r.raw(reference=b"")),
    "ref block = head": lambda r: signed(r.raw(reference=bytes.fromhex(r.world.head.id[12:32]))),
    "ref block = genesis": lambda r: signed(r.raw(reference=bytes.fromhex(r.world.blocks[0].id[12:32]))),
    "more than the balance": lambda r: signed(r.raw(amount=10**17)),
    "amount 0": lambda r: signed(r.raw(amount=0)),
    "amount -1": lambda r: signed(r.raw(amount=-1)),
    "amount 2^63-1": lambda r: signed(r.raw(amount=2**63 - 1)),
    "to oneself": lambda r: signed(r.raw(to=ALICE)),
    "sender never activated": lambda r: signed(r.raw(NEVER, amount=1_000)),
    "to_address of one byte": lambda r: signed(r.raw(to=b"\x41")),
    "to_address with prefix a0": lambda r: signed(r.raw(to=b"\xa0" + bytes_of(BOB)[1:])),
    "to 41 + twenty zero bytes": lambda r: signed(r.raw(to=b"\x41" + bytes(20))),
    "owner_address of two bytes": lambda r: signed(r.raw(owner=b"\x41\x41")),
    "no contract": lambda r: signed(r.raw(contract=b"")),
    "two contracts": lambda r: signed(r.raw() + data(11, wrapped(1, TRANSFER))),
    "type TriggerSmartContract with the value": lambda r: signed(
        r.raw(contract=wrapped(31, TRANSFER, url="TransferContract"))
    ),
    "type_url of another contract": lambda r: signed(r.raw(contract=wrapped(1, TRANSFER, url="TriggerSmartContract"))),
    "Permission_id 2": lambda r: signed(r.raw(contract=wrapped(1, TRANSFER, permission=3))),
    "500 kB of memo": lambda r: signed(r.raw(memo=b"x" * 512_000)),
    "without timestamp": lambda r: signed(r.raw(timestamp=0)),
    "timestamp far in the future": lambda r: signed(r.raw(timestamp=2**50)),
    "a TRX transfer with fee_limit 5": lambda r: signed(r.raw(fee_limit=5)),
}
AGAIN = ("the same again: waiting", "the same content with the usual signature", "0x in front")


def outcome(note: str) -> Case | None:
    return next((make for start, make in OUTCOMES.items() if note.startswith(start)), None)


@pytest.mark.parametrize(
    "entry", [e for e in posts("broadcast_outcomes") if "broadcasthex" in e["call"]], ids=lambda e: e["note"][:40]
)
def test_broadcasts_are_answered_as_recorded(entry: dict[str, Any]) -> None:
    replay, note = Replay(), entry["note"]
    replay.world.permissions[NEVER] = MINE
    make = outcome(note)
    if note in ("not hex", "empty text", "no transaction", "hex, but no transaction"):
        replay.check(entry)
        return
    if note == "raw_data instead of the transaction":
        assert "Error" in replay.ask(entry["call"], {"transaction": replay.raw().hex()})[1]
        return
    if note.startswith("the same bytes 9 s later"):  # too far ahead then, and taken now
        sent = signed(replay.raw(ahead_ms=86_406_000))
        assert replay.ask(entry["call"], {"transaction": sent.hex()})[1]["code"] == "TRANSACTION_EXPIRATION_ERROR"
        replay.mine(3)
    elif note.startswith(AGAIN):
        sent = signed(replay.raw())
        other = signed(replay.raw(), high(replay.raw())) if "usual signature" in note else sent
        assert replay.ask(entry["call"], {"transaction": other.hex()})[1]["result"] is True
    else:
        assert make is not None, note
        sent = make(replay)
    said = replay.ask(entry["call"], {"transaction": ("0x" if "0x" in note else "") + sent.hex()})
    recorded = dict(entry["response"])
    if "signed by" in recorded["message"] or "Too big" in recorded["message"] or "contract size" in recorded["message"]:
        kept = re.compile(r"[0-9a-f]{60,}|T[1-9A-Za-z]{33}|\d{6} bytes")
        assert kept.sub("#", said[1]["message"]) == kept.sub("#", recorded["message"])
        said[1]["message"] = recorded["message"]
    if "fee_limit 5" not in note:  # the order of the fields in the text is not the same there
        recorded["transaction"] = "…"
    same(recorded, said[1], note)
    assert (sent in (b"",) or said[1]["txid"]) and (said[1]["txid"] in replay.world.pool) is (
        recorded["code"] in ("SUCCESS", "DUP_TRANSACTION_ERROR")
    )


# --- what each transfer of TRX costs ---------------------------------------------------------------------------------


def groups(name: str) -> dict[str, dict[str, dict[str, Any]]]:
    """By what the notes say: the broadcast, what became of it, and what was measured."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for entry in entries(name):
        what = entry.get("what") or entry.get("note", "").partition(" — ")[0]
        method = entry.get("call", "what").rpartition("/")[2]
        if isinstance(what, str):
            found.setdefault(what, {}).setdefault(method, entry)
    return {what: one for what, one in found.items() if "broadcasthex" in one and "what" in one}


FEES = groups("fees_activation_memo")


@pytest.mark.parametrize("what", [what for what in FEES if "amount" in FEES[what]["what"]])
def test_transfer_costs_what_was_recorded(what: str) -> None:
    """Given balances and free bandwidth as they were, then answer, receipt and balances are as they were."""
    group = FEES[what]
    measured, info = group["what"], group.get("gettransactioninfobyid", {}).get("response", {})
    net = "net_usage" in info.get("receipt", {}) or what.startswith(("to a never", "again", "fund p with 1"))
    sender, receiver = NEVER, "TRXzmEpuNZ2Y7zuPtZ5ULK8ehxMhsv1wWS"
    receiver = text_of(b"\x41" + b"\x51" * 20)
    replay = Replay()
    replay.account(sender, measured["sender_before"], net=net)
    if measured["receiver_before"]:
        replay.account(receiver, measured["receiver_before"])
    memo = {"with memo of 5 bytes": b"hello", "with memo, utf-8": b"x" * 16}.get(what, b"")
    sent = signed(replay.raw(sender, receiver, measured["amount"], memo=memo))
    assert len(sent) == measured["transaction_bytes"]
    replay.check(group["broadcasthex"], params={"transaction": sent.hex()})
    replay.mine()
    if info:
        hash_ = read(replay.world.head.included[0].tx.raw_data, ()).id
        replay.check(group["gettransactioninfobyid"], params={"value": hash_})
    assert replay.world.balance(sender) == measured["sender_after"]
    assert replay.world.balance(receiver) == measured["receiver_after"]


# --- what each transfer of a token costs, and how it shows -----------------------------------------------------------

TOKENS = groups("trc20_transfers")
CALLS: dict[str, dict[str, Any]] = {
    "success: 1 token to bob, who had none": {"to": BOB, "amount": TRX},
    "success: 1 token to bob again": {"to": BOB, "amount": TRX, "held": TRX},
    "success: to a never-activated account": {"to": NEVER, "amount": TRX},
    "revert: bob has 2 tokens": {"owner": BOB, "to": ALICE, "amount": 5_000_000 * TRX, "own": 2 * TRX},
    "revert: unknown function": {"calldata": bytes.fromhex("f0d58899")},
    "fee_limit 0.1 TRX": {"to": BOB, "amount": TRX, "held": TRX, "fee_limit": 100_000},
    "fee_limit 1 sun": {"to": BOB, "amount": TRX, "held": TRX, "fee_limit": 1},
    "fee_limit 0": {"to": BOB, "amount": TRX, "held": TRX, "fee_limit": 0},
    "fee_limit 15001 TRX": {"to": BOB, "amount": TRX, "fee_limit": 15_001 * TRX},
    "fee_limit negative": {"to": BOB, "amount": TRX, "fee_limit": -1},
    "amount 0: succeeds": {"to": BOB, "amount": 0, "held": TRX},
    "to oneself": {"to": SERVICE, "amount": TRX},
    "to the token contract itself": {"to": TOKEN, "amount": TRX},
    "address that is no contract": {"to": BOB, "amount": TRX, "contract": ALICE},
    "owner never activated": {"owner": NEVER, "to": BOB, "amount": TRX},
    "sender without TRX left": {"owner": NEVER, "to": BOB, "amount": TRX, "balance": 0},
    "sender with 1 TRX": {"owner": NEVER, "to": BOB, "amount": TRX, "balance": TRX, "own": TRX},
}


@pytest.mark.parametrize("what", [what for what in TOKENS if any(what.startswith(one) for one in CALLS)])
def test_token_transfer_shows_and_costs_what_was_recorded(what: str) -> None:
    case = dict(next(case for start, case in CALLS.items() if what.startswith(start)))
    group = TOKENS[what]
    info = group.get("gettransactioninfobyid", {}).get("response", {})
    owner, replay = case.get("owner", SERVICE), Replay()
    replay.world.permissions[owner] = MINE
    net = "net_usage" in info.get("receipt", {})
    if "balance" in case or owner != NEVER:
        replay.account(owner, case.get("balance", 10_000 * TRX), net=net)
    for address, amount in ((case.get("to", ""), case.get("held", 0)), (owner, case.get("own", 0))):
        if amount:
            replay.world.fund(address, amount, TOKEN)
            replay.world.mine()
    if not net and owner == SERVICE:
        replay.account(owner, TRX, net=False)
    limit = case.get("fee_limit", group["what"]["fee_limit"])
    calldata = case.get("calldata") or bytes.fromhex("a9059cbb") + bytes_of(case["to"])[1:].rjust(32, b"\0") + case[
        "amount"
    ].to_bytes(32, "big")
    contract = replay.call(owner, calldata, contract=case.get("contract", TOKEN))
    sent = signed(replay.raw(contract=contract, fee_limit=limit))
    replay.check(group["broadcasthex"], params={"transaction": sent.hex()})
    before = replay.world.balance(owner)
    replay.mine()
    if info:
        hash_ = replay.world.head.included[0].tx.id
        recorded = {**info, "contractResult": info["contractResult"] if "insufficient" not in what else []}
        if info["receipt"]["result"] == "REVERT" and info["contractResult"] != [""]:
            recorded["contractResult"] = ["…"]  # this token gives another reason
        _, said = replay.ask(group["gettransactioninfobyid"]["call"], {"value": hash_})
        if owner == BOB:
            same({**recorded, "fee": "…"} if "fee" not in recorded else recorded, said, what)
        else:
            same(recorded, said, what)
        assert before >= replay.world.balance(owner)


# --- late, lost, replaced, restarted ---------------------------------------------------------------------------------


def by_note(name: str) -> list[dict[str, Any]]:
    return [entry for entry in entries(name) if "call" in entry]


def test_late_and_lost_transactions_are_as_recorded() -> None:
    """A transaction gets into a block after its expiration; one is dropped and taken again; one is never included."""
    replay = Replay()
    at = iter(by_note("late_and_lost"))
    for missed in (2, 6):
        sent = signed(replay.raw(ahead_ms=4_000, amount=missed))
        replay.world.state.mint(FREE_NET, ALICE, 600)
        replay.check(next(at), params={"transaction": sent.hex()})
        replay.world.mine(missed=missed)
        entry = next(at)
        found = read(replay.world.head.included[0].tx.raw_data, ())
        assert replay.world.head.timestamp > found.expires
        _, said = replay.ask(entry["call"], {"value": found.id})
        assert said.keys() - {"fee"} == entry["response"].keys() - {"fee"}
    raw = replay.raw(ahead_ms=45_000, amount=7)
    sent, id_ = signed(raw), read(raw, ()).id
    for entry in at:
        note = entry["note"]
        if note.startswith("accepted, expiration 20 s"):
            raw = replay.raw(ahead_ms=20_000, amount=8)
            sent, id_ = signed(raw), read(raw, ()).id
        elif note.startswith(("two blocks later", "dropped")):
            replay.world.drop(id_)
        elif note == "and in a block" and replay.world.find(id_) is None:
            replay.mine()
        elif note.startswith("expired by the head"):
            while replay.world.head.timestamp < read(raw, ()).expires:
                replay.mine()
        elif note.startswith("expired by the solidified"):
            replay.mine(20)
        method = entry["call"].rpartition("/")[2]
        status, said = replay.ask(
            entry["call"], {"transaction": sent.hex()} if method == "broadcasthex" else {"value": id_}
        )
        assert status == 200
        if method == "broadcasthex":
            same(entry["response"], said, note)
        else:
            assert bool(said) is bool(entry["response"]), f"{entry['call']} {note}"


def test_replaced_blocks_are_as_recorded() -> None:
    """`late` is gone with its block; `long` comes back in another one."""
    replay = Replay()
    raws = {name: replay.raw(ahead_ms=ms) for name, ms in (("late", 9_000), ("long", 600_000))}
    ids = {name: read(raw, ()).id for name, raw in raws.items()}
    state = "broadcast"
    for entry in by_note("fork"):
        name, _, rest = entry["note"].partition(": ")
        if rest.startswith("in a block of Y") and state == "broadcast":
            replay.mine(3)
            state = "in a block"
        elif rest.startswith("right after the change") and state == "in a block":
            replay.world.reorg(3, returns=lambda tx: tx.id == ids["long"], empty=True)
            state = "replaced"
        elif rest.startswith("when `long`") and state == "replaced":
            replay.mine()
            state = "in a block again"
        elif rest == "solidified" and state == "in a block again":
            replay.mine(21)
            state = "solidified"
        method = entry["call"].rpartition("/")[2]
        if method == "broadcasthex":
            replay.check(entry, params={"transaction": signed(raws[name]).hex()})
        else:
            replay.check(entry, params={"value": ids[name]})
    assert state == "solidified"


def test_restart_forgets_what_was_recorded_as_forgotten() -> None:
    """All that is not solidified, even what is in a block."""
    replay = Replay()
    raw = replay.raw()
    id_, sent = read(raw, ()).id, signed(raw)
    for blocks in (0, 3):
        assert replay.ask("/wallet/broadcasthex", {"transaction": sent.hex()})[1]["result"] is True
        replay.mine(blocks)
        replay.world.restart()
        for entry in by_note("restart"):
            if entry["note"].startswith("a: killed") and "byid" in entry["call"]:
                replay.check(entry, params={"value": id_})
