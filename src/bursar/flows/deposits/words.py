"""What users are told about an arrival, and about an address. Pure.

An operator's reason, who has confirmed it, and why it is held are not among it.
"""

from __future__ import annotations

from typing import Final

from bursar.flows.deposits.arrivals import ARRIVED, HELD, OWN, REJECTED, STATUS, SUSPENSE
from bursar.flows.payouts.documents import ChainDocument

NOT_SEEN: Final = (
    "Only the assets that are listed arrive here. Not seen are other tokens, and coin that a contract passes on "
    "(an internal transfer)."
)
STATUSES: Final = tuple(status for status in dict.fromkeys(STATUS.values()) if status != STATUS[OWN])  # a user's

_WORDS: Final = {
    ARRIVED: "it is being checked, which takes seconds as a rule",
    HELD: "it is being reviewed by people, which may take some hours; you have to do nothing",
    REJECTED: "it was not credited; ask support",
}


def states_of(status: str, *, is_staff: bool) -> tuple[str, ...] | None:
    """The states that a status stands for; for staff also an exact state. None: there is none. Pure.

    Users are not shown what a payout of ours has brought to their address: it is no money of theirs.
    """
    shown = [state for state in STATUS if is_staff or state != OWN]
    if not status:
        return () if is_staff else tuple(shown)
    found = tuple(state for state in shown if STATUS[state] == status)
    return found or ((status,) if is_staff and status in STATUS else None)


def words_for_user(state: str, why: str) -> str:
    """Why it is not credited, or not yet, in words; "" if it is. `why` is what it was judged with. Pure."""
    if state == SUSPENSE:
        return f"it has arrived and can't be credited as it is: {why}; ask support"
    return _WORDS.get(state, "")


def final_after(chain: ChainDocument) -> str:
    """What a transfer has to wait for before it is looked at. Pure."""
    on_top = "one block is" if chain.depth == 1 else f"{chain.depth} blocks are"
    if not chain.finalized_tag:
        return f"when {on_top} on top of its block"
    also = f", and {on_top} on top of it" if chain.depth > 1 else ""
    return f"when the chain itself calls its block final{also}"
