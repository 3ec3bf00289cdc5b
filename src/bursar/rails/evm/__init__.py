"""EVM chains: Ethereum, BSC and every other chain of that family, each told apart by its `Network` alone.

`codec` is the pure half (`EvmCodec`); the signer imports nothing else of this package. `chain` is the half that talks
to nodes (`EvmChain`, `Endpoint`). This file imports neither, so that a process which holds keys loads no code that
reads what nodes answer. Both need the extra `[evm]`. Rules W11 to W13, W35 and W36.
"""
