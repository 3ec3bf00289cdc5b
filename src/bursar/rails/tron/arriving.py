"""Final transfers to addresses of ours, read from a whole block and what became of everything in it. Pure.

TRX arrives by a `TransferContract` of the block, tokens by a Transfer event of their contract. A block's own list of
transactions and the list of outcomes must be complete and agree with each other: a node that has forgotten outcomes
would otherwise look like a block in which nothing was paid. One that says otherwise is `Malformed`, so that the cursor
stays where it is.

No node of TRON says what a balance was at a block, so that tokens are believed by their events alone.

Not here: TRX that a contract passes on (an internal transaction). No list of a block shows it for sure.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import msgspec

from bursar.rails.chain import Arrival
from bursar.rails.nodes import Malformed
from bursar.rails.tron.addresses import text_of
from bursar.rails.tron.http import amount, hexadecimal, items, record, text
from bursar.rails.tron.reading import Header, Info, block, info

COIN_PART = "coin"  # of a transaction: there is one transfer of TRX in it at most


class ArrivalBlock(msgspec.Struct, frozen=True):
    """A block with the hashes of all its transactions, and what they have moved to addresses of ours."""

    header: Header
    hashes: tuple[str, ...]
    found: tuple[Arrival, ...]


def arrivals(
    value: Any, outcomes: Any, number: int, addresses: Container[str], contracts: frozenset[bytes]
) -> ArrivalBlock:
    """What arrived in one block. `outcomes` is the answer of `gettransactioninfobyblocknum`."""
    whole = block(value, number)
    infos = _infos(outcomes, whole.header, whole.hashes)
    found: list[Arrival] = []
    for transaction, hash_ in zip(items(value.get("transactions")), whole.hashes, strict=True):
        became = infos[hash_]
        if not _succeeded(transaction, became):
            continue

        def arrive(part: str, sender: bytes, to: bytes, contract: str, moved: int, hash_: str = hash_) -> None:
            if moved and sender != to and (receiver := text_of(to)) in addresses:
                found.append(
                    Arrival(
                        hash=hash_,
                        part=part,
                        sender=text_of(sender),
                        to=receiver,
                        contract=contract,
                        amount=moved,
                        block=number,
                        block_hash=whole.header.id,
                        by_event_alone=bool(contract),
                    )
                )

        if (coin := _coin(transaction)) is not None:
            arrive(COIN_PART, coin[0], coin[1], "", coin[2])
        for one in became.transfers:
            if one.contract in contracts:
                arrive(str(one.place), one.sender, one.to, text_of(one.contract), one.amount)
    return ArrivalBlock(whole.header, whole.hashes, tuple(found))


def _infos(outcomes: Any, header: Header, hashes: tuple[str, ...]) -> dict[str, Info]:
    """What became of each transaction of the block: of every one of them, and of no other."""
    found: dict[str, Info] = {}
    for one in items(outcomes):
        hash_ = hexadecimal(record(one).get("id"), 32)
        became = info(one, hash_)
        if became is None or became.block != header.number or became.timestamp != header.timestamp:
            raise Malformed(f"the outcome of {hash_} is said to be of block {header.number}, and names another")
        if hash_ in found:
            raise Malformed(f"the outcome of {hash_} in block {header.number} is there twice")
        found[hash_] = became
    if found.keys() != set(hashes) or len(found) != len(hashes):
        why = f"block {header.number} has {len(hashes)} transactions, and there are outcomes of {len(found)}"
        raise Malformed(f"{why}, which are not the same")
    return found


def _succeeded(transaction: dict[str, Any], became: Info) -> bool:
    """Whether it moved anything. The block says so as well as its outcome; one of the two alone proves nothing."""
    said = [record(one) for one in items(transaction.get("ret"))]
    in_block = all(text(one, "contractRet") in ("", "SUCCESS") and text(one, "ret") != "FAILED" for one in said)
    succeeded = not became.failed and became.result in ("", "SUCCESS")
    if in_block is not succeeded:
        raise Malformed(f"block and outcome contradict each other about whether {became.hash} has failed")
    return succeeded


def _coin(transaction: dict[str, Any]) -> tuple[bytes, bytes, int] | None:
    """Sender, recipient and amount of a transfer of TRX; None of any other transaction.

    The fields are the node's reading: bytes that other programs have made can't all be read here. Both addresses must
    be in the bytes, which are the transaction's own by their hash.
    """
    contracts = items(record(transaction.get("raw_data")).get("contract"))
    if len(contracts) != 1 or text(contract := record(contracts[0]), "type") != "TransferContract":
        return None
    fields = record(record(contract.get("parameter")).get("value"))
    owner, to = (bytes.fromhex(hexadecimal(fields.get(name), 21)) for name in ("owner_address", "to_address"))
    raw = bytes.fromhex(hexadecimal(transaction.get("raw_data_hex")))
    if owner not in raw or to not in raw:
        raise Malformed("a transfer of TRX is between other addresses than its bytes say")
    return owner, to, amount(fields, "amount")
