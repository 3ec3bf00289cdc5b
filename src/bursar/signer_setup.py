"""What a signer is assembled from: its policy, the secrets of its callers, and nodes of its own.

The package `signer` decides, and reaches nothing outside but its disk and its callers. Here its files are read, and the
chains are built through which it may see for itself that a payment is dead (W31).

The nodes are in a file that the policy names. Their URLs often contain keys: the file is not for other users to read,
and no message, log or status has a URL. It decides whether a payment may be made again, so it is no more for others to
change than the policy is. Two nodes must agree (W35): one alone would never be believed, so it is refused.
"""

from __future__ import annotations

import asyncio
import re
import tomllib
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bursar import config_readers
from bursar.config import ConfigRefused, secret
from bursar.model.errors import BursarError
from bursar.ports import Ports
from bursar.rails.behind import RAILS, chain_behind
from bursar.rails.chain import Chain, Network, NodeStatus
from bursar.signer import SECRET_BYTES_MIN
from bursar.signer.codecs import codec_of
from bursar.signer.errors import PolicyRefused
from bursar.signer.policy import ChainPolicy, Policy, parse
from bursar.signer.witness import Witness
from bursar.supervise import supervise

if TYPE_CHECKING:
    from bursar.http import Pool

OTHERS_WRITE: Final = 0o022
NODES_MIN: Final = 2
NODE_S: Final = 5.0  # for a node to answer
ANSWER_BYTES_MAX: Final = 8 << 20  # of a node: receipts of a hundred payments are a small part of it
CHECK_S: Final = 300.0  # between two times that own nodes are asked how they are

Urls = Mapping[str, tuple[str, ...]]  # of the nodes of each chain


def read_policy(file: str) -> tuple[Policy, dict[str, bytes], Urls]:
    """The policy, the secrets of its callers, and its nodes. Names of files are relative to the policy's folder."""
    contents = _read(file)
    found = parse(file, contents, codec_of)
    secrets, problems = {}, []
    for name, caller in found.callers.items():
        path = Path(file).parent / caller.secret_file
        try:
            secrets[name] = secret(str(path), f"callers.{name}.secret_file", SECRET_BYTES_MIN)
        except ConfigRefused as error:
            problems.append(error.problems)
    if problems:
        raise PolicyRefused(file, "; ".join(problems))
    return found, secrets, _nodes(found, Path(file).parent / found.nodes_file) if found.nodes_file else {}


def _read(file: str) -> bytes:
    try:
        contents, mode = Path(file).read_bytes(), Path(file).stat().st_mode
    except OSError as error:
        raise PolicyRefused(file, f"it can't be read: {error.strerror}") from None
    if mode & OTHERS_WRITE:
        raise PolicyRefused(file, f"other users may change it: chmod go-w {file}")
    return contents


def _nodes(policy: Policy, file: Path) -> Urls:
    """The nodes in a file. No message repeats what is in it."""
    _read(str(file))
    try:
        found = tomllib.loads(secret(str(file), "nodes_file", 1).decode())
        if list(found) != ["chain_nodes"]:
            raise ValueError("it has one table, [chain_nodes]")
        urls = config_readers.nodes(found["chain_nodes"])
    except ConfigRefused as error:
        raise PolicyRefused(str(file), error.problems) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        place = re.search(r"line \d+, column \d+", str(error))
        raise PolicyRefused(str(file), f"it is not TOML{f' ({place[0]})' if place else ''}") from None
    except ValueError as error:
        raise PolicyRefused(str(file), str(error)) from None
    try:  # now, and not on the day on which the nodes are needed
        import_module("bursar.http")
    except ModuleNotFoundError as error:
        why = f"{error.name} is missing: pip install 'bursar[evm]' or 'bursar[tron]'"
        raise PolicyRefused(str(file), why) from None
    problems = [why for name, listed in urls.items() for why in _unusable(name, policy.chains.get(name), listed)]
    if problems:
        raise PolicyRefused(str(file), "; ".join(problems))
    return urls


def _unusable(name: str, chain: ChainPolicy | None, urls: tuple[str, ...]) -> list[str]:
    if chain is None:
        return [f"{name}: the policy has no such chain"]
    found = []
    if chain.kind not in RAILS:
        found.append(f"{name}: there is no rail of the kind {chain.kind}")
    if len(urls) < NODES_MIN:
        found.append(f"{name}: {NODES_MIN} nodes at least, of different operators: one alone is never believed (W35)")
    if chain.kind == "evm" and not chain.depth:  # other chains say themselves what is final
        found.append(f"{name}: the policy has to say when a block is final: chains.{name}.depth")
    return found


def network_of(chain: ChainPolicy) -> Network:
    """The chain as its nodes are asked about it: nothing is sent, so it has no fees."""
    return Network(
        name=chain.name,
        kind=chain.kind,
        chain_id=chain.chain_id,
        genesis=chain.genesis,
        depth=chain.depth,
        finalized_tag=chain.finalized_tag,
    )


class OwnNodes:
    """The chains behind a signer's own nodes, the look through them, and word of how they are."""

    def __init__(self, ports: Ports, log: Callable[[str], object]) -> None:
        self.witness = Witness({})
        self._ports = ports
        self._log = log
        self._pool: Pool | None = None
        self._chains: dict[str, Chain] = {}
        self._told: dict[str, str] = {}
        self._checking: asyncio.Task[None] | None = None

    def use(self, policy: Policy, urls: Urls) -> None:
        """Look through these nodes from now on. None of them has to answer now."""
        self._chains = {name: self._chain(policy.chains[name], listed) for name, listed in urls.items()}
        self._told = {}
        self.witness.use(self._chains)
        self._stop_checking()
        if self._chains:
            checking = supervise("signer-nodes", self._check, self._ports)
            self._checking = asyncio.create_task(checking, name="signer-nodes")

    def _chain(self, chain: ChainPolicy, urls: tuple[str, ...]) -> Chain:
        # An extra: a signer without nodes of its own needs neither the rail nor HTTP.
        from bursar.http import Pool  # noqa: PLC0415

        self._pool = self._pool or Pool(ANSWER_BYTES_MAX)
        return chain_behind(network_of(chain), urls, self._pool.post, self._ports, NODE_S)

    async def _check(self) -> None:
        """Say how the nodes are: a look is rare, and the day on which one is needed is late to learn it."""
        while True:
            for name, chain in self._chains.items():
                try:
                    told = _told(name, await chain.nodes())
                except BursarError as error:
                    told = str(error)
                if self._told.get(name) != told:
                    self._told[name] = told
                    self._log(f"own nodes of {told}")
            await self._ports.sleep(CHECK_S)

    def _stop_checking(self) -> None:
        if self._checking is not None:
            self._checking.cancel()
            self._checking = None

    async def close(self) -> None:
        """Let go of all connections."""
        self._stop_checking()
        if self._pool is not None:
            await self._pool.close()


def _told(name: str, nodes: tuple[NodeStatus, ...]) -> str:
    words = ", ".join(f"{node.name}: {node.trouble or 'it answers'}" for node in nodes)
    if sum(node.usable for node in nodes) < NODES_MIN:
        words += f". Until {NODES_MIN} agree, they show no death, and two approvers release what must be paid again"
    return f"{name}: {words}"
