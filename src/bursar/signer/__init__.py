"""The signer: its own process, which holds keys, decodes what it is asked to sign, and signs only what is authorized.

It never broadcasts. What it has signed it remembers for ever, bytes and all, in a log that is on disk before a
signature leaves. Asked again for the same attempt of the same payout, it answers with the same bytes.

`protocol` is what callers (flows/payouts) know of it. Not here: records, retries, nodes, broadcasting.
"""

# Of the secret that a caller shares with it. Here because every command reads the settings, and few load a signer.
SECRET_BYTES_MIN = 32
