"""What befalls the payouts scenario beside crashes and a lossy network: a node that lies, a chain that takes back what
was final, a token that takes a fee, a signer on an old disk. A seed says which of them (`Plan`).

- A lying node (`Liar`) tells something else every few blocks: transactions that are not there or are hidden, another
  nonce, balance or final block, blocks with less in them. With two nodes it stops when everything heals; with three it
  never does, for two are enough.
- A deep reorganisation replaces final blocks once, those of payouts that have ended among them.
- A signer is put back on an old copy of its log. Once it has noticed that and refuses every caller, operators either
  find the newest log and put it back, or start a new log, in whose place the database is bound to it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from bursar.sim import evm_nodes, evm_world, expiry_world
from bursar.sim.chain_faults import Lie
from bursar.sim.chain_state import Behaviour, Reverted
from bursar.sim.evm_tx import Tx
from bursar.sim.expiry_chain import Found
from bursar.sim.payout_chains import hashes_in

if TYPE_CHECKING:
    from bursar.sim.payout_town import Town

# To one seed in so many; numbers without a common factor, so that everything meets everything.
RESTORED_EVERY: Final = 5  # the database goes back to a backup
EXPIRES_EVERY: Final = 3  # it pays on a chain on which transactions expire
MEDDLED_EVERY: Final = 2  # operators come
LIED_EVERY: Final = 7  # a node lies
BEHIND_EVERY: Final = 11  # the signer is put back on an old copy of its log
DEEP_EVERY: Final = 13  # final blocks are reorganised
FORCED_EVERY: Final = 17  # operators decide what became of payouts, right or wrong
NODES: Final = ("one", "two")
LIES_SHARE: Final = 0.4  # of the blocks, with which a liar changes what it says
TAKEN_MAX: Final = 3  # blocks with transactions that are taken away
FEES_SHARE: Final = 0.5  # of the changes that a token makes: it takes a fee


@dataclass(frozen=True, slots=True)
class Plan:
    """What happens to one seed."""

    seed: int
    small: bool  # one payout, and nothing breaks but what the caller has planned

    def _every(self, number: int, place: int) -> bool:
        return not self.small and self.seed % number == place

    @property
    def expires(self) -> bool:
        """It pays on a chain on which transactions expire."""
        return self.seed % EXPIRES_EVERY == EXPIRES_EVERY - 1

    @property
    def kind(self) -> str:
        """Of its chain."""
        return "expiry" if self.expires else "evm"

    @property
    def restored(self) -> bool:
        """The database goes back to a backup."""
        return self._every(RESTORED_EVERY, RESTORED_EVERY - 1)

    @property
    def meddled(self) -> bool:
        """Operators bump, cancel, hold, pause and halt."""
        return self._every(MEDDLED_EVERY, 0)

    @property
    def lied(self) -> bool:
        """One of the nodes lies."""
        return self._every(LIED_EVERY, 1)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes' names. With three of them, one that lies to the end stops nothing."""
        third = self.lied and not self.expires and self.seed % (2 * LIED_EVERY) == 1
        return (*NODES, "three") if third else NODES

    @property
    def behind(self) -> bool:
        """The signer is put back on an old copy of its log."""
        return self._every(BEHIND_EVERY, 6)

    @property
    def lost(self) -> bool:
        """The signer's newest log is not found again. Not where the database forgets too: then nothing would know."""
        return self.behind and not self.restored and self.seed % (2 * BEHIND_EVERY) == 6

    @property
    def watched(self) -> bool:
        """What ended is asked about again: people have decided it, or a final block is gone."""
        return self.deep or self.forced

    @property
    def deep(self) -> bool:
        """Final blocks are reorganised. Not where the database forgets as well that it has seen them, and on the chain
        with nonces alone: on the other one the watcher writes its place down too seldom to notice for sure."""
        return self._every(DEEP_EVERY, 5) and not self.restored and not self.expires

    @property
    def forced(self) -> bool:
        """Operators decide what became of payouts."""
        return self._every(FORCED_EVERY, 3)


# --- nodes that lie --------------------------------------------------------------------------------------------------


class Liar:
    """The node that lies. It says one untruth at a time, and another one a few blocks later."""

    def __init__(self, town: Town) -> None:
        self.town = town
        self.dice = random.Random(f"{town.kernel.seed} liar")
        self.name = self.dice.choice(town.plan.nodes)
        self.told = 0  # answers that were not the truth
        self.shortened = 0  # pages of the last, constant lie
        self.constant = False

    def turn(self) -> None:
        """Perhaps change what it says."""
        if self.constant or self.dice.random() >= LIES_SHARE:
            return
        lies = (_evm_lies if self.town.kind.name == "evm" else _expiry_lies)(self.town, self.dice)
        self.town.nodes[self.name].lies = [self._counted(lies)] if lies is not None else []

    def for_good(self) -> None:
        """From now on it leaves out of blocks what is in them, as often as it is asked."""
        self.constant = True

        def lie(method: str, params: Sequence[Any], truth: Any) -> Any:
            told = _shortened(method, params, truth)
            self.shortened += told != truth
            return told

        self.town.nodes[self.name].lies = [lie]

    def _counted(self, lie: Lie) -> Lie:
        def counted(method: str, params: Sequence[Any], truth: Any) -> Any:
            told = lie(method, params, truth)
            self.told += told != truth
            return told

        return counted


def _evm_lies(town: Town, dice: random.Random) -> Lie | None:
    world, node = town.world, town.nodes[town.liar.name]
    assert isinstance(world, evm_world.World) and isinstance(node, evm_nodes.Node)
    seen = list(world.seen.values())
    waiting = [tx for tx in seen if world.find(tx.hash) is None]
    mined = [tx for tx in seen if world.find(tx.hash) is not None]
    what = dice.choice(("nothing", "invents", "hides", "nonce", "balance", "final", "shortens", "fails"))
    match what:
        case "invents" if waiting:
            return _invented(world, dice.choice(waiting))
        case "hides" if mined:
            return evm_nodes.hidden(dice.choice(mined).hash)
        case "fails" if mined:
            return evm_nodes.receipt_says(dice.choice(mined).hash, status=0)
        case "nonce":
            more = dice.choice((-1, 1, 5))
            return _number("eth_getTransactionCount", lambda count: max(0, count + more))
        case "balance":
            times = dice.choice((0, 1_000))
            return _number("eth_getBalance", lambda balance: balance * times)
        case "final":
            return evm_nodes.all_final(node)
        case "shortens":
            return _shortened
    return None


def _invented(world: evm_world.World, tx: Tx) -> Lie | None:
    try:
        return evm_nodes.invented(world, tx.raw, max(1, world.finalized))
    except Reverted:
        return None


def _number(wanted: str, change: Callable[[int], int]) -> Lie:
    def lie(method: str, _params: Sequence[Any], truth: Any) -> Any:
        return hex(change(int(truth, 16))) if method == wanted else truth

    return lie


def _shortened(method: str, params: Sequence[Any], truth: Any) -> Any:
    """Blocks without the last of their transactions."""
    if method == "eth_getBlockByNumber" and truth is not None and params[1:] == [True] and truth["transactions"]:
        return truth | {"transactions": truth["transactions"][:-1]}
    return truth


def _expiry_lies(town: Town, dice: random.Random) -> Lie | None:
    world = town.world
    assert isinstance(world, expiry_world.World)
    what = dice.choice(("nothing", "invents", "hides", "balance", "final", "shortens"))

    def lie(method: str, params: Sequence[Any], truth: Any) -> Any:
        match what, method:
            case "invents", "find" if not isinstance(truth, Found):
                block = world.blocks[world.finalized]
                return Found(block.number, block.hash, True, 300, 30_000, ())
            case "hides", "find":
                return False
            case "balance", "balances" if truth is not None:
                return tuple(one * 1_000 for one in truth)
            case "final", "final":
                return world.head.number, world.head.hash
            case "shortens", "blocks" if truth is not None:
                return [one._replace(transactions=one.transactions[:-1]) for one in truth]
        return truth

    return None if what == "nothing" else lie


# --- the chain -------------------------------------------------------------------------------------------------------


class Depths:
    """One reorganisation of what was final, and what was in the blocks that it took away.

    It takes away only final transactions that the watcher has read. One that has confirmed a payout, and that the
    watcher has not come to, could go unnoticed: it would find another block there, and never know of the first one.
    """

    def __init__(self, town: Town) -> None:
        self.town = town
        self.read_up_to: Callable[[], int] = lambda: -1  # how far the watcher has come, by what it has written down
        self.dice = random.Random(f"{town.kernel.seed} depths")
        self.happened = 0
        self.undone: set[str] = set()  # hashes of transactions

    def turn(self) -> None:
        """Now, if there is a transaction that was final for a while, and the watcher has read all that were final."""
        world = self.town.world
        if self.happened:
            return
        used = [block.number for block in world.blocks[1 : world.finalized + 1] if hashes_in(block)]
        if not used or self.read_up_to() < max(used):
            return
        depth = world.head.number - self.dice.choice(used[-TAKEN_MAX:]) + 1
        gone = [tx for block in world.blocks[-depth:] for tx in hashes_in(block)]
        comes_back = self.dice.random() < 0.5
        world.reorg(depth, returns=lambda _: comes_back, deep=True)
        for hash_ in () if comes_back else gone:  # no node has it any more
            if world.find(hash_) is None:
                self.town.nodes.drop(hash_)
        self.happened += 1
        self.undone.update(gone)


def change_token(town: Town, dice: random.Random) -> None:
    """The token begins to take a fee of what is transferred, or ends it: what is ordered is not what moves (W36)."""
    if dice.random() < 0.3:
        takes = dice.random() < FEES_SHARE
        for token in town.world.tokens.values():
            token.behaviour = Behaviour.TAKES_FEE if takes else Behaviour.HONEST


def forget_history(town: Town, dice: random.Random) -> None:
    """A node forgets old blocks, or has them again: where it can't say what was in them, people must."""
    if dice.random() < 0.2:
        town.nodes[dice.choice(town.plan.nodes)].keeps = dice.choice((None, 4, 8))


# --- the signer ------------------------------------------------------------------------------------------------------


class OldDisk:
    """The signer's log as it was, in the place of the log as it is."""

    def __init__(self, town: Town) -> None:
        self.town = town
        self.dice = random.Random(f"{town.kernel.seed} old disk")
        self.newest = b""  # not empty while an old copy is in its place
        self.copied = b""
        self.happened = 0
        self.noticed = 0
        self.forked = False  # it has signed on the old copy what the newest log does not have
        self._sequence = 0

    def begin(self) -> None:
        """Copy it soon, and put the copy back later."""
        self._later(0.5 + self.dice.random() * 2, self._copy)

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        self.town.kernel.loop.call_later(seconds, what, context=Context())

    def _copy(self) -> None:
        self.copied, self._sequence = self.town.signer_log(), self.town.signer_sequence()
        self._later(1.0, self._put_back)

    def _put_back(self) -> None:
        if self.town.calm or self.town.forgetful:
            return  # the database went back: what an old log has forgotten too would be known nowhere
        if self.town.signer_sequence() <= max(0, self._sequence):
            self._later(0.5, self._put_back)  # not before the copy is an old one
            return
        self.town.stop_signer()
        self.newest = self.town.signer_log()
        self.town.write_signer_log(self.copied)
        self.happened += 1
        self._later(3.0, self._look)

    def _look(self) -> None:
        """Operators look: a signer that has noticed is started on the newest log, or anew."""
        if not self.town.is_behind():
            self._later(1.0, self._look)
            return
        self.noticed += 1
        self.forked = self.town.signer_sequence() != self._sequence
        self.town.stop_signer()
        self.town.write_signer_log(b"" if self.town.plan.lost else self.newest)
        self.newest = b""
