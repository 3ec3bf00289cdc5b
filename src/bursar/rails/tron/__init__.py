"""TRON: TRX and TRC-20 tokens, on the public network and on every other network of that kind.

`codec` is the pure half (`TronCodec`), on `addresses` and `protobuf`; the signer imports nothing else of this package.
`chain` is the half that talks to nodes (`TronChain`): `http` asks one node, `reading` reads what it says, `nodes` knows
which of them to believe, `fates` collects what they know of a transaction, and `verdict` decides what that proves. This
file imports none of them, so that a process which holds keys loads no code that reads what nodes answer. All need the
extra `[tron]`. Rules W27 to W31, W35 and W36.
"""
