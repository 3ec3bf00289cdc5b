"""Which rail serves which kind of chain, and a chain of any kind behind the URLs of its nodes.

A rail is imported when a chain of its kind is built: a process without such a chain needs none of its libraries. A
further kind is one more line here, and one in `signer.codecs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Final, cast

from bursar.ports import Ports
from bursar.rails.chain import Chain, Network
from bursar.rails.nodes import Post

RAILS: Final = {"evm": "bursar.rails.evm.chain", "tron": "bursar.rails.tron.chain"}  # kind → where `chain_behind` is


def chain_behind(network: Network, urls: Sequence[str], post: Post, ports: Ports, timeout_s: float) -> Chain:
    """A chain of a kind in `RAILS`. ModuleNotFoundError: its extra is missing; ValueError: its nodes can't be used."""
    rail = import_module(RAILS[network.kind])
    return cast(Chain, rail.chain_behind(network, urls, post, ports, timeout_s))
