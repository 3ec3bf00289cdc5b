"""Which codec reads the transactions of which kind of chain.

The signer uses codecs alone: they are pure, so it decodes what it signs without asking anything outside itself. A
codec is imported when a policy names a chain of its kind, so that a signer of one kind needs no libraries of another.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Final, cast

from bursar.rails.chain import Codec

PLACES: Final = {  # kind → where its codec is
    "evm": "bursar.rails.evm.codec:EvmCodec",
    "tron": "bursar.rails.tron.codec:TronCodec",
}
# Transactions of these kinds do not name their chain: what was signed for one is valid on all, for the same key.
WITHOUT_CHAIN: Final = frozenset({"tron"})

Codecs = Callable[[str], Codec]  # by kind; KeyError if there is none


def codec_of(kind: str) -> Codec:
    """The codec of a kind of chain; KeyError if there is none."""
    module, _, name = PLACES[kind].partition(":")
    return cast(Codec, getattr(import_module(module), name)())
