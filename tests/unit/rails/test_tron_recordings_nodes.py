"""The simulated node against recordings of what depends on the node: exact texts, many broadcasts at once, one witness,
staked resources, settings. Each entry of these files is replayed, or is in `NOT_REPLAYED` with the reason.

What may differ is in `test_tron_recordings`. Exact texts are compared whole, but for hashes, heights and times.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import pytest
from tests.tron_fake import KEY, OTHER_KEY
from tests.unit.rails.test_tron_recordings import (
    ALICE,
    BOB,
    FOLDER,
    MINE,
    NEVER,
    SERVICE,
    TOKEN,
    TRX,
    Replay,
    entries,
    same,
    signature,
    signed,
)

from bursar.rails.tron.addresses import bytes_of, text_of
from bursar.rails.tron.protobuf import data, number
from bursar.signer.curve import sign_digest
from bursar.sim.chain_faults import Fault
from bursar.sim.chain_state import Token
from bursar.sim.tron_nodes import Nodes
from bursar.sim.tron_tx import read
from bursar.sim.tron_world import FREE_NET, Terms

NO_RAIL_ASKS = "no rail asks this"
BY_A_STAKE = "stakes are given to an account, and not made by a transaction"
NOT_REPLAYED: dict[tuple[str, int], str] = {
    ("one_witness", 12): NO_RAIL_ASKS,
    ("one_witness", 14): NO_RAIL_ASKS,
    **{("staked_resources", place): BY_A_STAKE for place in range(4)},
    ("node_settings", 15): NO_RAIL_ASKS,
    ("node_settings", 28): NO_RAIL_ASKS,
    ("node_settings_peers", 1): NO_RAIL_ASKS,
    ("node_settings_peers", 10): NO_RAIL_ASKS,
    ("wire_text", 5): NO_RAIL_ASKS,
    ("wire_text", 6): NO_RAIL_ASKS,
    ("wire_text", 18): NO_RAIL_ASKS,
    ("wire_text", 21): NO_RAIL_ASKS,
    ("wire_text", 22): NO_RAIL_ASKS,
    ("wire_text", 25): "GET, which no rail does: the other status is of the method",
}
NOT_REPLAYED |= {("raw_data_txid", place): NO_RAIL_ASKS for place in (*range(31), 38, 39)}
BY_ONE_TEST = (
    "raw_data_txid",
    "concurrency",
    "one_witness",
    "staked_resources",
    "node_settings",
    "node_settings_peers",
    "wire_text",
)
ELSEWHERE = frozenset(
    {
        *("transfer_lifecycle", "broadcast_outcomes", "late_and_lost", "fork", "restart", "fees_activation_memo"),
        *("trc20_deploy_calls", "trc20_transfers", "accounts_addresses", "node_blocks"),
        "http_variants",
    }
)
STAKER = "TEudf4Cf3ec3aGQTspJrVZKxWJ3USvsyox"


class Played:
    """The entries of one file, each of which must be asked for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.left = {place: one for place, one in enumerate(entries(name)) if (name, place) not in NOT_REPLAYED}

    def __getitem__(self, place: int) -> dict[str, Any]:
        return self.left.pop(place)

    def over(self) -> None:
        """All have been asked for."""
        assert not self.left, f"{self.name}: {sorted(self.left)} are not replayed"


def test_every_recording_is_replayed_somewhere() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == ELSEWHERE | set(BY_ONE_TEST)
    for name, place in NOT_REPLAYED:
        assert place < len(entries(name))


def send(replay: Replay, raw: bytes) -> dict[str, Any]:
    """A broadcast, signed with the right key."""
    _, answer = replay.ask("/wallet/broadcasthex", {"transaction": signed(raw).hex()})
    found: dict[str, Any] = answer
    return found


def used(replay: Replay, resource: str, address: str, amount: int) -> None:
    """An account has used some of what it has."""
    state = replay.world.state
    state.rewind(replay.world.head.number)
    state.height = replay.world.head.number
    state.mint(resource, address, amount)
    state.height += 1


def payment(to: str, amount: int) -> bytes:
    """The call of a token."""
    return bytes.fromhex("a9059cbb") + bytes_of(to)[1:].rjust(32, b"\0") + amount.to_bytes(32, "big")


def id_of(raw: bytes) -> str:
    return read(raw, ()).id


# --- bytes that are written in another way ---------------------------------------------------------------------------


def test_bytes_in_another_order_or_with_more_in_them_are_taken_as_recorded() -> None:
    replay, played = Replay(), Played("raw_data_txid")
    usual = replay.raw()
    stamp = number(14, replay.world.head.timestamp)
    assert usual.endswith(stamp)
    in_front = stamp + usual.removesuffix(stamp)
    wrong = played[31]
    _, said = replay.ask(
        wrong["call"], {"transaction": signed(in_front, sign_digest(KEY, sha256(in_front).digest())).hex()}
    )
    assert (said["result"], said["code"]) == (False, wrong["response"]["code"])
    assert said["txid"] == id_of(usual), "the node writes it anew before it computes the hash"

    more = usual + data(99, b"x")
    replay.check(played[32], params={"transaction": signed(more).hex()})
    _, said = replay.ask(played[33]["call"], {"value": id_of(more)})
    assert said["raw_data_hex"] == more.hex()
    replay.check(
        played[34], params={"transaction": signed(replay.raw(amount=7) + number(3, 77) + data(12, b"x")).hex()}
    )

    used(replay, FREE_NET, ALICE, 600)
    with_result = replay.raw(amount=1_500_022)
    sent = signed(with_result) + data(5, number(1, 5) + number(3, 2))
    replay.check(played[35], params={"transaction": sent.hex()})
    replay.check(played[36], params={"value": id_of(with_result)})
    replay.mine()
    replay.check(played[37], params={"value": id_of(with_result)})
    played.over()


# --- at once ---------------------------------------------------------------------------------------------------------


def test_broadcasts_at_once_are_answered_as_recorded() -> None:
    replay, played = Replay(), Played("concurrency")
    replay.account(NEVER, 1_000 * TRX, net=False)

    raw = replay.raw(NEVER, BOB)
    recorded = [(one["http_status"], one["code"], one["message"]) for one in played[0]["answers"]]
    said = []
    for _ in recorded:
        status, answer = replay.ask("/wallet/broadcasthex", {"transaction": signed(raw).hex()})
        said.append((status, answer["code"], answer["message"]))
    assert sorted(said) == sorted(recorded)
    replay.mine()
    replay.check(played[1], params={"value": id_of(raw)})

    twenty = played[2]
    raws = [replay.raw(NEVER, BOB, timestamp=1_794_967_000_000 + ms) for ms in range(20)]
    assert [send(replay, one)["code"] for one in raws] == twenty["codes"]
    replay.mine()
    in_order = [one.tx.id for one in replay.world.head.included] == [id_of(one) for one in raws]
    assert in_order is twenty["order_in_block_is_order_of_broadcast"] and len(set(twenty["blocks"])) == 1

    first, second = replay.raw(timestamp=7), replay.raw(timestamp=7)
    assert (id_of(first) == id_of(second)) is played[3]["raw_equal"]
    for place, raw in ((4, first), (5, second), (6, replay.raw(timestamp=8))):
        replay.check(played[place], params={"transaction": signed(raw).hex()})

    thirty = played[7]
    codes = {send(replay, replay.raw(amount=number + 1))["code"] for number in range(30)}
    replay.mine()
    assert sorted(codes) == thirty["codes"] and len(replay.world.head.included) == 32 and len(thirty["blocks"]) == 1

    replay.account(STAKER, 10 * TRX)
    raws = [replay.raw(STAKER, BOB, 6 * TRX, timestamp=number) for number in (1, 2)]
    for place, raw in ((8, raws[0]), (9, raws[1]), (10, raws[1])):
        if place == 10:
            replay.mine()
        replay.check(played[place], params={"transaction": signed(raw).hex()})

    new = text_of(b"\x41" + b"\x52" * 20)
    replay.world.permissions[new] = MINE
    used(replay, FREE_NET, ALICE, 600)
    raws = [replay.raw(ALICE, new, 8 * TRX), replay.raw(new, BOB, 7 * TRX)]
    for place, raw in zip((11, 12), raws, strict=True):
        replay.check(played[place], params={"transaction": signed(raw).hex()})
    replay.mine()
    for place, raw in zip((13, 14), raws, strict=True):
        replay.check(played[place], params={"value": id_of(raw)})

    nodes, raw = Nodes(replay.world, ("one",), 1), replay.raw(amount=99)
    assert asyncio.run(hangs_up(nodes, signed(raw)))
    replay.mine()
    assert (replay.world.find(id_of(raw)) is not None) is played[15]["in_a_block"]
    played.over()


async def hangs_up(nodes: Nodes, sent: bytes) -> bool:
    """A broadcast whose answer never comes."""

    async def sleep(_seconds: float) -> None:
        """The network takes no time."""

    nodes["one"].script.append(Fault.REPLY_LOST)
    body = json.dumps({"transaction": sent.hex()}).encode()
    try:
        await nodes.transport(sleep)(f"{nodes.url('one')}/wallet/broadcasthex", {}, body, 1.0)
    except ConnectionError:
        return True
    return False


# --- one witness -----------------------------------------------------------------------------------------------------


def test_chain_with_one_witness_is_as_recorded() -> None:
    """Two blocks behind; included after the expiration; a token that many call takes more energy."""
    replay, played = Replay(terms=Terms(byte=10, free_net=5_000, solidified=2)), Played("one_witness")
    for place in range(4):
        entry, raw = played[place], replay.raw(amount=place + 1)
        assert send(replay, raw)["result"] is True
        seconds = {"wallet": 0, "walletsolidity": 0}
        for second in range(3, 30, 3):
            replay.mine()
            for interface, at in seconds.items():
                found = replay.ask(f"/{interface}/gettransactioninfobyid", {"value": id_of(raw)})[1]
                seconds[interface] = at or (second if found else 0)
        assert seconds["wallet"] == round(entry["seconds_until_in_a_block"])
        assert seconds["walletsolidity"] == round(entry["seconds_until_on_walletsolidity"])
    heads = played[4]
    numbers = [
        replay.ask(f"/{one}/getnowblock", {})[1]["block_header"]["raw_data"]["number"]
        for one in ("wallet", "walletsolidity")
    ]
    assert numbers[0] - numbers[1] == heads["wallet"] - heads["walletsolidity"]

    raw = replay.raw(ahead_ms=4_000)
    replay.check(played[5], params={"transaction": signed(raw).hex()})
    parent = replay.world.head.timestamp
    replay.world.mine(missed=2)
    replay.check(played[6], params={"value": id_of(raw)})
    got, block = played[7], replay.world.head
    assert block.timestamp - (parent + 4_000) == got["block_after_expiration_ms"]
    assert block.timestamp - parent == got["block_timestamp"] - got["parent_block_timestamp"]

    token = "TGcAYZsaykSFyHWRPTdBm361zrJqY78rVp"
    replay.world.deploy(Token(token, gas=12_414))
    replay.world.fund(SERVICE, 10**15, token)
    replay.mine()
    calldata = payment(BOB, TRX)
    for place in (8, 9, 10, 11):
        if place == 10:
            replay.world.penalties[token] = 2_421
            used(replay, FREE_NET, SERVICE, 5_000)
        raw = replay.raw(
            contract=replay.call(SERVICE, calldata, contract=token), fee_limit=10**8, timestamp=place + 2**41
        )
        assert send(replay, raw)["result"] is True
        replay.mine()
        replay.check(played[place], params={"value": id_of(raw)})
    run = played[13]
    _, said = replay.ask(run["call"], run["params"])
    same(run["response"], {name: value for name, value in said.items() if name != "transaction"}, "dry run")
    played.over()


# --- staked resources ------------------------------------------------------------------------------------------------


def test_staked_resources_pay_as_recorded() -> None:
    replay, played = Replay(), Played("staked_resources")
    replay.account(STAKER, 1_400_000 * TRX)
    replay.world.fund(STAKER, 10**12, TOKEN)
    replay.world.fund(BOB, TRX, TOKEN)
    replay.mine()
    replay.world.stakes[STAKER] = (100_000, 500_000)
    used(replay, FREE_NET, STAKER, 252)

    before = played[4]
    _, said = replay.ask(before["call"], before["params"])
    same({name: one for name, one in before["response"].items() if name != "NetUsed"}, said, "before")
    account = played[5]
    _, said = replay.ask(account["call"], account["params"])
    assert said.keys() <= account["response"].keys() and said["balance"] == account["response"]["balance"]

    new = text_of(b"\x41" + b"\x53" * 20)
    raws: dict[int, Callable[[], bytes]] = {
        6: lambda: replay.raw(STAKER),
        8: lambda: replay.raw(STAKER, new),
        10: lambda: token_of(payment(BOB, TRX)),
        12: lambda: token_of(payment(text_of(b"\x41" + bytes.fromhex(to_of(entries("staked_resources")[13]))), TRX)),
        14: lambda: token_of(payment(BOB, 10**15)),
        16: lambda: token_of(payment(BOB, TRX), 0),
        18: lambda: token_of(payment(BOB, TRX), 200_000),
    }

    def token_of(calldata: bytes, fee_limit: int = 100 * TRX) -> bytes:
        return replay.raw(contract=replay.call(STAKER, calldata), fee_limit=fee_limit)

    for place, make in raws.items():
        raw = make()
        replay.check(played[place], params={"transaction": signed(raw).hex()})
        replay.mine()
        became = played[place + 1]
        if place == 14:  # this token gives another reason
            became = {**became, "response": {**became["response"], "contractResult": ["…"]}}
        replay.check(became, params={"value": id_of(raw)})

    after = played[20]
    _, said = replay.ask(after["call"], after["params"])
    recorded = {name: one for name, one in after["response"].items() if name not in ("NetUsed", "EnergyUsed")}
    same(recorded, {name: one for name, one in said.items() if name not in ("NetUsed", "EnergyUsed")}, "after")
    # A real account has a little of it back by then.
    assert 0 <= said["EnergyUsed"] - after["response"]["EnergyUsed"] < 10
    played.over()


def to_of(entry: dict[str, Any]) -> str:
    """Who has received tokens, as the recorded event says."""
    topic: str = entry["response"]["log"][0]["topics"][2]
    return topic[24:]


# --- settings --------------------------------------------------------------------------------------------------------


def test_node_without_blocks_and_its_settings_answer_as_recorded() -> None:
    replay, played = Replay(), Played("node_settings")
    replay.world.state.rewind(replay.world.head.number)
    replay.account(BOB, 1_000_005_100_006 - replay.world.balance(BOB))
    replay.mine(21)
    stuck, clock = played[0], 11_967  # milliseconds by which the clock is ahead of the head
    assert stuck["clock"] - stuck["head_timestamp"] == clock
    first, second = (
        replay.raw(ahead_ms=10_000, amount=1_700_001),
        replay.raw(ahead_ms=clock + 12_000, amount=1_700_002),
    )
    for place, raw in ((1, first), (2, second)):
        replay.check(played[place], params={"transaction": signed(raw).hex()})
    for places, raw in (((3, 4, 5), first), ((6, 7, 8), second)):
        replay.check(played[places[0]], params={"value": id_of(raw)})
        replay.check(played[places[1]], params={"value": id_of(raw)})
        replay.check(played[places[2]], params={"transaction": signed(raw).hex()})
    replay.check(played[9], params={})
    for place in (10, 11):
        replay.check(played[place])
    replay.world.restart()
    replay.check(played[12], params={"value": id_of(second)})
    while replay.world.head.timestamp < read(second, ()).expires:
        replay.mine()
    replay.check(played[13], params={"transaction": signed(second).hex()})

    settings = replay.node.settings
    settings.peers = 0
    raw = replay.raw(amount=1_700_003)
    replay.check(played[14], params={"transaction": signed(raw).hex()})
    replay.check(played[16], params={"value": id_of(raw)})
    settings.peers = None

    settings.cache = True
    refused = dict(played[17])
    _, said = replay.ask(refused["call"], {"transaction": signed(raw, signature(raw, OTHER_KEY)).hex()})
    kept = re.compile(r"[0-9a-f]{60,}|T[1-9A-Za-z]{33}")
    assert kept.sub("#", said["message"]) == kept.sub("#", refused["response"]["message"])
    assert (said["code"], said["result"]) == ("SIGERROR", False)
    replay.check(played[18], params={"transaction": signed(raw).hex()})
    for place in (19, 20):
        replay.check(played[place], params={"value": id_of(raw)})
    too_much, good = replay.raw(amount=10**17), replay.raw()
    for place, raw in ((21, too_much), (22, too_much), (23, good), (24, good), (25, good)):
        if place == 25:
            replay.mine()
            assert replay.world.find(id_of(good)) is not None
        replay.check(played[place], params={"transaction": signed(raw).hex()})

    settings.constant = False
    for place in (26, 27):
        replay.check(played[place])
    played.over()


def test_settings_for_peers_and_what_waits_answer_as_recorded() -> None:
    replay, played = Replay(terms=Terms(solidified=8)), Played("node_settings_peers")
    settings = replay.node.settings
    settings.peers, settings.peers_min = 1, 2
    raw = replay.raw()
    replay.check(played[0], params={"transaction": signed(raw).hex()})
    replay.check(played[2], params={"value": id_of(raw)})
    settings.peers_min, settings.pending_max = 1, 2
    raws = [replay.raw(amount=number) for number in range(1, 6)]
    for place, raw in enumerate(raws, 3):
        replay.check(played[place], params={"transaction": signed(raw).hex()})
    replay.mine()
    assert [replay.world.find(id_of(raw)) is not None for raw in raws] == played[8]["in_block"]
    settings.unsolidified_max = 8
    replay.check(played[9], params={"transaction": signed(replay.raw(amount=6)).hex()})
    settings.unsolidified_max = 9
    assert send(replay, replay.raw(amount=6))["result"] is True
    played.over()


# --- exact texts -----------------------------------------------------------------------------------------------------


def blank(said: str) -> str:
    """A text without hashes, addresses, amounts, block numbers and times; every other character stays."""
    text = re.sub(r"\b[0-9a-f]{16,}\b|\bT[1-9A-Za-z]{33}\b", "#", said)
    text = re.sub(r'(ref_block_(?:bytes|hash)\\?": ?\\?")[0-9a-f]+', r"\1#", text)
    return re.sub(r'("(?:number|blockNumber|fee_limit)": ?)\d+|\b\d{7,}\b', r"\g<1>0", text)


def test_texts_are_the_recorded_ones_to_the_space() -> None:
    replay, played = Replay(), Played("wire_text")
    used(replay, FREE_NET, BOB, 342)
    replay.account(NEVER, 1_000 * TRX, net=False)
    replay.world.permissions[SERVICE] = MINE
    replay.mine(20)

    def check(place: int, params: Any = None, *, cut: Callable[[str], str] = blank) -> None:
        entry = played[place]
        asked = entry["params"] if params is None else params
        status, kind, body = replay.node.serve(entry["call"], json.dumps(asked or {}).encode())
        assert status == entry["http_status"] and kind == entry["response_headers"]["Content-Type"], entry["call"]
        assert cut(body.decode()) == cut(entry["response_text"]), entry["call"]

    raw = replay.raw(contract=replay.call(SERVICE, bytes.fromhex("9975038c")), fee_limit=5)
    send(replay, raw)
    replay.mine()
    check(0)
    check(1)
    for place in (2, 19, 20, 23, 24):
        check(place)
    check(16, cut=str)
    raw = replay.raw(NEVER, BOB, 2_300_001)
    for place in (3, 4):
        check(place, {"transaction": signed(raw).hex()})
    for place in (7, 8):
        check(place, {"value": id_of(raw)})
    replay.mine()
    for place in (9, 10, 11):
        check(place, {"value": id_of(raw)})
    replay.world.fund(BOB, TRX, TOKEN)
    replay.mine()
    contract = replay.call(SERVICE, payment(BOB, TRX))
    used(replay, FREE_NET, SERVICE, 600)
    raw = replay.raw(contract=contract, fee_limit=10**8)
    send(replay, raw)
    replay.mine()
    check(12, {"value": id_of(raw)})
    check(14)
    check(15, {"address": text_of(b"\x41" + b"\x54" * 20), "visible": True})
    for place, last in ((13, '"frozenV2"'), (17, '"transaction"'), (26, '"key"')):
        # Of accounts, dry runs and parameters only what a rail reads is there; what is, is spelt as it was.
        entry = played[place]
        _, kind, body = replay.node.serve(entry["call"], json.dumps(entry["params"] or {}).encode())
        assert kind == entry["response_headers"]["Content-Type"] and last in body.decode()
        said, recorded = body.decode(), entry["response_text"]
        colons = re.compile(r'": ?')
        assert set(colons.findall(said)) == set(colons.findall(recorded)), entry["call"]
        assert set(re.findall(r", ?", said)) == {","} and said.endswith("}\n")
    played.over()


@pytest.mark.parametrize("name", BY_ONE_TEST)
def test_entries_that_are_not_replayed_have_a_reason_and_are_calls_of_no_rail(name: str) -> None:
    for place, entry in enumerate(entries(name)):
        if NOT_REPLAYED.get((name, place)) == NO_RAIL_ASKS:
            method = entry.get("call", "").rpartition("/")[2]
            assert method not in Replay().node._methods()
