"""The signer's own look at the chain: what has become of attempts that may still pay? (W31)

The signer believes no caller who says that a nonce is dead. It may have chains of its own, behind nodes of its own
(`rails.chain.Chain`; the process that runs it builds them), and asks them for the fate of everything that it has signed
in that nonce. One answer counts: a final transaction of this signer's own log has used the nonce up without paying. If
an unknown transaction has, then the log has lost signatures or the key is stolen: that is no death. The rail believes
two nodes that agree, and no single one (W35).

Nodes may be slow or silent, so a request waits a bounded time, and the look goes on without it: the next request finds
what it has shown. There is one look per payout at a time, and a bounded number in all; no lock is held meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from bursar.model.errors import BursarError
from bursar.rails.chain import Chain, Confirmed, Dead, Fate, Mismatch, Pending, Question, Unknown

ANSWER_S: Final = 3.0  # a request waits so long for a look; callers wait 5 s unless they are configured otherwise
LOOK_S: Final = 60.0  # a look that takes longer is given up
LOOKS_MAX: Final = 64  # at once: far fewer than the requests of one connection, so that others are heard meanwhile

Proof = dict[str, Any]
Declare = Callable[[tuple[Proof, ...]], Awaitable[None]]


def proof_of_death(question: Question, fate: Fate) -> Proof | str:
    """The proof that none of these transactions can pay any more; else why there is none. Pure."""
    match fate:
        case Dead():
            # On account chains something has used the nonce. What this signer has not signed could be this payment,
            # made by a signature that its log has lost.
            if question.tries[0].slot.nonce is not None and fate.hash not in {one.hash for one in question.tries}:
                return "its nonce was used by a transaction that is not in this signer's log"
            return fate.proof
        case Confirmed() | Mismatch():
            return f"{fate.hash} is final and successful: it is not dead"
        case Pending():
            return "no final block has a transaction with its nonce: it may still be mined"
        case Unknown():
            return fate.why


class Witness:
    """Looks at chains, by name, through the signer's own nodes."""

    def __init__(self, chains: Mapping[str, Chain]) -> None:
        self._chains = chains
        self._looks: dict[str, asyncio.Task[str]] = {}

    def use(self, chains: Mapping[str, Chain]) -> None:
        """Look through these from now on."""
        self._chains = chains

    async def look(self, payout: str, questions: Sequence[tuple[str, Question]], declare: Declare) -> str:
        """Why some of these are not seen dead; "" once all are, and `declare` has been told the proofs.

        `questions`: each with its chain.
        """
        look = self._looks.get(payout)
        if look is None:
            if missing := sorted({chain for chain, _ in questions} - self._chains.keys()):
                return f"this signer has no nodes of its own for {', '.join(missing)}"
            if len(self._looks) >= LOOKS_MAX:
                return f"its nodes are being asked about {LOOKS_MAX} other payouts"
            look = asyncio.create_task(self._look(payout, questions, declare), name="signer-look")
            self._looks[payout] = look
        done, _ = await asyncio.wait([look], timeout=ANSWER_S)
        return look.result() if done else f"its nodes have not answered within {ANSWER_S:g} s; they are still asked"

    async def _look(self, payout: str, questions: Sequence[tuple[str, Question]], declare: Declare) -> str:
        try:
            async with asyncio.timeout(LOOK_S):
                proofs = []
                for chain, question in questions:
                    found = proof_of_death(question, await self._chains[chain].fate(question))
                    if isinstance(found, str):
                        return f"{chain}: {found}"
                    proofs.append(found)
            await declare(tuple(proofs))
            return ""
        except TimeoutError:
            return f"its nodes have not answered within {LOOK_S:g} s"
        except BursarError as error:
            return str(error)
        except Exception as error:  # of one payout: it must not end the connection that all others come by
            return f"CRITICAL: the look failed ({type(error).__name__})"
        finally:
            del self._looks[payout]

    def close(self) -> None:
        """Give up what is under way."""
        for look in list(self._looks.values()):
            look.cancel()
