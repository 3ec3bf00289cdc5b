"""Nodes of the simulated TRON chain: the HTTP interface of java-tron 4.8.0, as it was recorded.

A node's answers are true of its own view: it may lag, have forgotten old transactions (`keeps`), be a lite node, or
lie. Its newest state includes what waits; what it calls final is some blocks behind. Each request may break on the way
(`chain_faults`). `Nodes.post` is the transport that a rail is given; `Node.serve` is for an HTTP server.

A test replays the recordings against this (`tests/unit/rails/test_tron_recordings.py`), so that it can't drift
from the real node. Not here, because no rail asks for it: building transactions, making stakes, prices, GET.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from typing import Any, Final
from urllib.parse import urlsplit

from eth_hash.auto import keccak

from bursar.rails.tron.addresses import PREFIX, TEXT_LENGTH, bytes_of, text_of
from bursar.rails.tron.protobuf import NotProtobuf
from bursar.rails.tron.reading import TRANSFER_TOPIC
from bursar.sim.chain_faults import FaultyNetwork, HttpStatus, Machine, Sleep
from bursar.sim.chain_state import COIN, Movement
from bursar.sim.tron_settings import Settings
from bursar.sim.tron_tx import Tx, parse, raw_data_json, transaction_json
from bursar.sim.tron_world import (
    ENERGY,
    ENERGY_TOTAL,
    ENERGY_WEIGHT,
    FREE_NET,
    NET,
    NET_TOTAL,
    NET_WEIGHT,
    Block,
    Included,
    Refused,
    World,
)

_JSON: Final = "application/json;charset=utf-8"
_HTML: Final = "text/html;charset=iso-8859-1"
_MESSAGES: Final = {
    "REVERT": "REVERT opcode executed",
    "OUT_OF_ENERGY": "Not enough energy for 'SSTORE' operation executing",
}
_SOLID: Final = frozenset(
    {
        "getnowblock",
        "getblockbynum",
        "gettransactionbyid",
        "gettransactioninfobyid",
        "gettransactioninfobyblocknum",
        "getaccount",
        "triggerconstantcontract",
    }
)
_SPACED: Final = frozenset(  # after the colons of their answers
    {"getaccount", "getaccountresource", "getchainparameters", "gettransactioninfobyid"}
)
_PARSE: Final = "class org.tron.core.services.http.JsonFormat$ParseException"
_PROTOBUF: Final = "class com.google.protobuf.InvalidProtocolBufferException"
_HEX: Final = (
    "class org.bouncycastle.util.encoders.DecoderException : exception decoding Hex string: invalid characters"
)
_NULL: Final = "class java.lang.NullPointerException : null"


class Error(Exception):
    """What a node answers as `{"Error": …}`."""


class Node(Machine):
    """One node."""

    def __init__(self, world: World, name: str, seed: object) -> None:
        super().__init__(name, seed)
        self.world = world
        self.settings = Settings()
        self.lite = False  # it says so when it is asked for transactions

    @property
    def head(self) -> int:
        """The last block that it has seen."""
        return max(0, self.world.head.number - self.lag)

    @property
    def final(self) -> int:
        """The last block that it calls final."""
        return max(0, self.head - self.world.terms.solidified)

    def serve(self, path: str, body: bytes) -> tuple[int, str, bytes]:
        """A POST: HTTP status, content type and body of the answer."""
        interface, _, method = path.lstrip("/").partition("/")
        known = method in (_SOLID if interface == "walletsolidity" else self._methods())
        if interface not in ("wallet", "walletsolidity") or not known or not path.startswith(f"/{interface}/"):
            return 405, _HTML, _page(405, "HTTP method POST is not supported by this URL", path)
        if self.lite and "transaction" in method:
            return 200, _JSON, b"this API is closed because this node is a lite fullnode"
        try:
            answer = self._answer(interface, method, _params(body))
        except Error as error:
            answer = {"Error": str(error)}
        answer = self.lied(f"{interface}/{method}", (body,), answer)
        spaced = method in _SPACED and not (isinstance(answer, dict) and "Error" in answer)
        return 200, _JSON, json.dumps(answer, separators=(",", ": " if spaced else ":")).encode() + b"\n"

    def _methods(self) -> dict[str, Callable[[dict[str, Any], int | None], Any]]:
        return {
            "broadcasthex": self._broadcast_hex,
            "getaccount": self._account,
            "getaccountresource": self._resource,
            "getblockbynum": self._block,
            "getchainparameters": lambda _params, _at: self._parameters(),
            "getcontract": self._contract,
            "getnowblock": lambda _params, at: self._block({"num": self.head if at is None else at}, at),
            "getpendingsize": lambda _params, _at: {"pendingSize": len(self.world.pool)},
            "gettransactionbyid": self._transaction,
            "gettransactionfrompending": self._pending,
            "gettransactioninfobyblocknum": self._infos,
            "gettransactioninfobyid": self._info,
            "gettransactionlistfrompending": lambda _params, _at: self._pool_ids(),
            "triggerconstantcontract": self._call,
            "validateaddress": lambda params, _at: _validated(params.get("address")),
        }

    def _answer(self, interface: str, method: str, params: dict[str, Any]) -> Any:
        """`at` is the height of a final state; None: the newest, with what waits."""
        return self._methods()[method](params, self.final if interface == "walletsolidity" else None)

    def _at(self, at: int | None) -> int | None:
        """The height of the state that is shown. A node that lags knows nothing of what waits."""
        return self.head if at is None and self.lag else at

    # --- transactions ------------------------------------------------------------------------------------------------

    def _broadcast_hex(self, params: dict[str, Any], _at: int | None) -> dict[str, Any]:
        text = params.get("transaction", "").removeprefix("0x")
        try:
            tx = parse(bytes.fromhex(text))
        except NotProtobuf as error:
            zero = "Protocol message contained an invalid tag (zero)."
            raise Error(f"{_PROTOBUF} : {zero if 'number 0' in str(error) else error}") from None
        except ValueError:
            raise Error(f"{_HEX} encountered in Hex string") from None
        code, message = "SUCCESS", ""
        try:
            self.settings.check(tx.id, len(self.world.pool), self.head - self.final)
            self.world.check(tx, self.world.blocks[self.head])
            self.world.submit(bytes.fromhex(text))
        except Refused as refused:
            code, message = refused.code, refused.message
        shown = {"raw_data": _raw_text(tx), "signature": [one.hex() for one in tx.signatures]} if tx.raw_data else {}
        printed = {"transaction": json.dumps(shown, separators=(",", ": "))}
        return {"result": code == "SUCCESS", "code": code, "txid": tx.id, "message": message} | printed

    def _found(self, params: dict[str, Any], at: int | None) -> tuple[Block, Included] | None:
        """A transaction in a block that the node still has, up to its head or to what it calls final."""
        found = self.world.find(_hex(params.get("value")))
        top = self.head if at is None else at
        if found is None or found[0].number > top:
            return None
        return found if self.keeps is None or found[0].number > self.head - self.keeps else None

    def _transaction(self, params: dict[str, Any], at: int | None) -> dict[str, Any]:
        found = self._found(params, at)
        if found is None:
            return self._pending(params, at) if at is None else {}
        return transaction_json(found[1].tx, found[1].result, visible=_visible(params))

    def _pending(self, params: dict[str, Any], _at: int | None) -> dict[str, Any]:
        one = None if self.lag else self.world.pool.get(_hex(params.get("value")))
        return {} if one is None else transaction_json(one.tx, one.result, visible=_visible(params))

    def _pool_ids(self) -> dict[str, Any]:
        return {"txId": list(self.world.pool)} if self.world.pool else {}

    def _info(self, params: dict[str, Any], at: int | None) -> dict[str, Any]:
        found = self._found(params, at)
        return {} if found is None else info_json(*found)

    def _infos(self, params: dict[str, Any], at: int | None) -> list[dict[str, Any]]:
        number = _int(params, "num", 7)
        forgotten = self.keeps is not None and number <= self.head - self.keeps
        if forgotten or not 0 <= number <= (self.head if at is None else at):
            return []
        block = self.world.blocks[number]
        return [info_json(block, one) for one in block.included]

    # --- blocks ------------------------------------------------------------------------------------------------------

    def _block(self, params: dict[str, Any], at: int | None) -> dict[str, Any]:
        number = _int(params, "num", 7)
        if not 0 <= number <= (self.head if at is None else at):
            return {}
        return block_json(self.world.blocks[number], visible=_visible(params))

    def _parameters(self) -> dict[str, Any]:
        terms = self.world.terms
        found = {
            "getCreateAccountFee": terms.create_account,
            "getTransactionFee": terms.byte,
            "getCreateNewAccountFeeInSystemContract": terms.new_account,
            "getEnergyFee": terms.energy,
            "getMaxFeeLimit": terms.fee_limit_max,
            "getFreeNetLimit": terms.free_net,
            "getMemoFee": terms.memo,
            "getAllowDynamicEnergy": 0,
        }
        return {"chainParameter": [{"key": k} | ({"value": v} if v else {}) for k, v in found.items()]}

    # --- accounts and contracts --------------------------------------------------------------------------------------

    def _account(self, params: dict[str, Any], at: int | None) -> dict[str, Any]:
        visible = _visible(params)
        address, at = _address(params, "address", visible=visible), self._at(at)
        if not address or not self.world.exists(address, at):
            return {}
        shown = address if visible else bytes_of(address).hex()
        balance = self.world.balance(address, COIN, at)
        used = self.world.state.get(FREE_NET, address, at)
        found: dict[str, Any] = {"type": "Contract"} if address in self.world.tokens else {}
        found |= {"address": shown} | ({"balance": balance} if balance else {})
        found |= {"free_net_usage": used} if used else {}
        found |= {"net_window_size": 28800, "account_resource": {"energy_window_size": 28800}}
        return found | {"frozenV2": [{}, {"type": "ENERGY"}, {"type": "TRON_POWER"}]}

    def _resource(self, params: dict[str, Any], _at: int | None) -> dict[str, Any]:
        address = _address(params, "address", visible=_visible(params))
        if not address or not self.world.exists(address):
            return {}
        used = self.world.state.get(FREE_NET, address)
        net, energy = self.world.limits(address)
        found = {"freeNetUsed": used, "freeNetLimit": self.world.terms.free_net}
        found |= {"NetUsed": self.world.state.get(NET, address), "NetLimit": net}
        found |= {"TotalNetLimit": NET_TOTAL, "TotalNetWeight": NET_WEIGHT}
        found |= {"tronPowerLimit": sum(self.world.stakes.get(address, ()))}
        found |= {"EnergyUsed": self.world.state.get(ENERGY, address), "EnergyLimit": energy}
        found |= {"TotalEnergyLimit": ENERGY_TOTAL, "TotalEnergyWeight": ENERGY_WEIGHT}
        return {name: value for name, value in found.items() if value}

    def _contract(self, params: dict[str, Any], _at: int | None) -> dict[str, Any]:
        visible = _visible(params)
        address = _address(params, "value", visible=visible)
        if address not in self.world.tokens:
            return {}
        shown = address if visible else bytes_of(address).hex()
        return {"bytecode": "00", "consume_user_resource_percent": 100, "abi": {}, "contract_address": shown}

    def _call(self, params: dict[str, Any], at: int | None) -> dict[str, Any]:
        visible, at = _visible(params), self._at(at)

        def said(message: str) -> str:
            return message if visible else message.encode().hex()

        def fails(code: str, message: str) -> dict[str, Any]:
            return {"result": {"code": code, "message": said(message)}}

        if not self.settings.constant:
            return fails("CONTRACT_VALIDATE_ERROR", "this node does not support constant")
        invalid = "class java.security.InvalidParameterException"
        try:
            owner = _address(params, "owner_address", visible=visible)
            contract = _address(params, "contract_address", visible=visible)
            called = bytes.fromhex(params["data"]) if "data" in params else _selected(params)
        except Error as error:
            return fails("OTHER_ERROR", str(error))
        except ValueError:
            return fails("OTHER_ERROR", f"{_HEX} encountered in Hex string")
        if not owner:
            return fails("OTHER_ERROR", f"{invalid} : owner_address isn't set.")
        if not contract:
            return fails("OTHER_ERROR", f"{invalid} : At least one of contract_address and data must be set.")
        if contract not in self.world.tokens:
            return fails("CONTRACT_VALIDATE_ERROR", "Smart contract is not exist.")
        result, energy, returned, events, moves = self.world.call(contract, owner, called, at)
        ended = {"result": True} | ({} if result == "SUCCESS" else {"message": said(_MESSAGES[result])})
        found: dict[str, Any] = {"result": ended, "energy_used": energy, "constant_result": [returned.hex()]}
        if events:
            found["logs"] = [log_json(event) for event in events]
        if penalty := self.world.penalty(contract, result, moves):
            found["energy_penalty"] = penalty
        return found | {"transaction": {"ret": [{} if result == "SUCCESS" else {"ret": "FAILED"}], "visible": visible}}


class Nodes(FaultyNetwork):
    """The chain's nodes, and the network between them and their callers."""

    def __init__(self, world: World, names: Iterable[str], seed: object, *, trouble: float = 0.0) -> None:
        super().__init__(trouble)
        self.world = world
        self.by_name = {name: Node(world, name, seed) for name in names}

    def __getitem__(self, name: str) -> Node:
        return self.by_name[name]

    def url(self, name: str) -> str:
        """Where a node is, for `post`."""
        return f"http://{name}"

    def heal(self) -> None:
        """End every trouble, lie and lag. What was late arrives."""
        self.trouble = 0.0
        for node in self.by_name.values():
            node.repair()
            node.lite = False
        self.deliver_late(everything=True)

    def drop(self, id: str) -> None:
        """Let every waiting list forget a transaction."""
        self.world.drop(id)

    def transport(self, sleep: Sleep) -> Callable[[str, Mapping[str, str], bytes, float], Any]:
        """`bursar.http.Pool.post`, by a caller's own way to wait."""

        async def post(url: str, _headers: Mapping[str, str], body: bytes, timeout_s: float) -> tuple[int, bytes]:
            parts = urlsplit(url)
            node = self.by_name[str(parts.hostname)]
            try:
                status, _, answer = await self.call(sleep, node, lambda: node.serve(parts.path, body), timeout_s)
            except HttpStatus as refused:
                return refused.status, b""
            return status, answer

        return post


# --- JSON ------------------------------------------------------------------------------------------------------------


def info_json(block: Block, one: Included) -> dict[str, Any]:
    """What became of a transaction, as `gettransactioninfobyid` has it."""
    found: dict[str, Any] = {"id": one.tx.id} | ({"fee": one.fee} if one.fee else {})
    found |= {"blockNumber": block.number, "blockTimeStamp": block.timestamp, "contractResult": [one.returned.hex()]}
    receipt: dict[str, Any] = {"energy_usage": one.energy_usage, "energy_fee": one.energy_fee}
    receipt |= {"energy_usage_total": one.energy, "net_usage": one.net_usage, "net_fee": one.net_fee}
    receipt = {name: value for name, value in receipt.items() if value}
    contract = one.tx.contracts[0].field(2)
    if one.tx.contracts[0].name == "TriggerSmartContract":
        found["contract_address"] = contract.hex()
        receipt["result"] = one.result
    if one.penalty:
        receipt["energy_penalty_total"] = one.penalty
    found["receipt"] = receipt
    if one.result != "SUCCESS":
        found |= {"result": "FAILED", "resMessage": _MESSAGES[one.result].encode().hex()}
    logs = [log_json(event) for event in one.events if event.contract]
    return found | ({"log": logs} if logs else {})


def log_json(event: Movement) -> dict[str, Any]:
    """A Transfer event. Its address has no prefix."""
    topics = [TRANSFER_TOPIC, *(bytes_of(one)[1:].hex().rjust(64, "0") for one in (event.sender, event.to))]
    return {"address": bytes_of(event.contract)[1:].hex(), "topics": topics, "data": f"{event.amount:064x}"}


def block_json(block: Block, *, visible: bool = False) -> dict[str, Any]:
    """A block with its transactions."""
    witness = PREFIX + sha256(str(block.number % 27).encode()).digest()[:20]
    raw: dict[str, Any] = {"number": block.number} if block.number else {}
    raw["txTrieRoot"] = sha256("".join(one.tx.id for one in block.included).encode()).hexdigest()
    raw |= {"witness_address": text_of(witness) if visible else witness.hex(), "parentHash": block.parent}
    raw |= {"version": 32, "timestamp": block.timestamp} if block.number else {}
    header: dict[str, Any] = {"raw_data": raw}
    if block.number:
        header["witness_signature"] = (block.id * 3)[:130]
    found: dict[str, Any] = {"blockID": block.id, "block_header": header}
    transactions = [transaction_json(one.tx, one.result, visible=visible) for one in block.included]
    return found | ({"transactions": transactions} if transactions else {})


def _raw_text(tx: Tx) -> dict[str, Any]:
    """raw_data as the text in an answer of broadcasthex has it: the values of contracts are bytes."""
    found = raw_data_json(tx, visible=False)
    names = ("ref_block_bytes", "ref_block_hash", "expiration", "data", "contract", "timestamp", "fee_limit")
    contracts = [
        {"type": one.name, "parameter": {"type_url": one.type_url, "value": one.value.hex()}} for one in tx.contracts
    ]
    found |= {"contract": contracts} if contracts else {}
    return {name: found[name] for name in names if found.get(name)}


# --- parameters ------------------------------------------------------------------------------------------------------


def _params(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        raise Error("class com.alibaba.fastjson.JSONException : syntax error") from None
    if found is None:
        raise Error(_NULL)
    if not isinstance(found, dict):
        raise Error("class com.alibaba.fastjson.JSONException : can not cast to JSONObject.")
    return found


def _visible(params: dict[str, Any]) -> bool:
    return params.get("visible") in (True, "true")


def _int(params: dict[str, Any], name: str, place: int) -> int:
    value = params.get(name)
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int):
        text = f'""{value}""' if isinstance(value, str) else f'"{value}"'
        raise Error(f"{_PARSE} : 1:{place + 2}: Couldn't parse integer: For input string: {text}")
    if value >= 2**63:
        where = f"1:{place + 1}: Couldn't parse integer: Number out of range for 64-bit signed integer"
        raise Error(f"{_PARSE} : {where}: {value}")
    return value


def _hex(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise Error(f"{_PARSE} : 1:11: Expected string.")
    try:
        return bytes.fromhex(value.removeprefix("0x")).hex()
    except ValueError:
        raise Error(f"{_PARSE} : 1:11: INVALID hex String") from None


def _address(params: dict[str, Any], name: str, *, visible: bool) -> str:
    """An address as text; "" if there is none, or one of another form, which a node does not know."""
    value = params.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise Error(f"{_PARSE} : 1:13: Expected string.")
    if not visible:
        try:
            found = bytes.fromhex(value.removeprefix("0x"))
        except ValueError:
            raise Error(f"{_PARSE} : 1:13: INVALID hex String") from None
        return text_of(found) if len(found) == 21 and found[:1] == PREFIX else ""
    if bad := next(((char, at) for at, char in enumerate(value) if char in "0OIl"), None):
        raise Error(f"{_PARSE} : 1:13: INVALID base58 String, Illegal character {bad[0]} at {bad[1]}")
    try:
        bytes_of(value)
    except ValueError:
        raise Error(_NULL) from None
    return value


def _selected(params: dict[str, Any]) -> bytes:
    selector = params.get("function_selector", "")
    start = bytes(keccak(selector.encode())[:4]) if selector else b""
    return start + bytes.fromhex(params.get("parameter", ""))


def _validated(value: Any) -> dict[str, Any]:
    """`validateaddress`: base58check or 42 hexadecimal digits."""
    if not isinstance(value, str):
        return {"result": False}
    if len(value) == 42 and value.lower().startswith("41"):
        return {"result": True, "message": "Hex string format"}
    if len(value) == 42:
        return {"result": False, "message": "Invalid address"}
    if len(value) != TEXT_LENGTH:
        return {"result": False, "message": "Length error"}
    if bad := next(((char, at) for at, char in enumerate(value) if char in "0OIl"), None):
        return {"result": False, "message": f"Illegal character {bad[0]} at {bad[1]}"}
    try:
        bytes_of(value)
    except ValueError:
        return {"result": False, "message": "Invalid address"}
    return {"result": True, "message": "Base58check format"}


def _page(status: int, why: str, path: str) -> bytes:
    return (
        '<html>\n<head>\n<meta http-equiv="Content-Type" content="text/html;charset=ISO-8859-1"/>\n'
        f"<title>Error {status} {why}</title>\n</head>\n<body><h2>HTTP ERROR {status} {why}</h2>\n<table>\n"
        f"<tr><th>URI:</th><td>{path}</td></tr>\n<tr><th>STATUS:</th><td>{status}</td></tr>\n"
        f"<tr><th>MESSAGE:</th><td>{why}</td></tr>\n"
        "<tr><th>SERVLET:</th><td>org.eclipse.jetty.servlet.ServletHandler$Default404Servlet-994544</td></tr>\n"
        '</table>\n<hr/><a href="https://eclipse.org/jetty">Powered by Jetty:// 9.4.53.v20231009</a><hr/>\n\n'
        "</body>\n</html>\n"
    ).encode()
