"""What the payouts scenario pays on: a simulated chain with its nodes, a signer in a process of its own, and documents.

The chain is an account chain behind JSON-RPC nodes and the real EVM rail, or one without nonces on which transactions
expire. The signer is the real one: its log on a simulated disk, its protocol on a simulated network, its rules, and keys
that are not secret. On the expiring chain the signer has nodes of its own, which show it that an attempt is dead (W31).
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from bursar.documents import Documents
from bursar.flows.payouts import KINDS, Payouts
from bursar.flows.payouts.documents import (
    ASSET,
    CHAIN,
    WALLET,
    AssetDocument,
    ChainDocument,
    Ranked,
    WalletDocument,
    asset_name,
)
from bursar.flows.payouts.outside import SIGNER_PEER
from bursar.flows.payouts.payout import wallet_account
from bursar.ledger import Ledger
from bursar.model.documents import Proposal
from bursar.model.entries import deposit
from bursar.model.money import format_minor
from bursar.rails.chain import Chain, Codec, Dead, Order, Question, Try
from bursar.rails.evm.chain import EvmChain
from bursar.rails.evm.codec import EvmCodec
from bursar.rails.evm.rpc import Endpoint
from bursar.sim import evm_nodes, expiry_chain
from bursar.sim.chain_state import Token
from bursar.sim.evm_world import Terms, World
from bursar.sim.expiry_codec import ExpiryCodec
from bursar.sim.expiry_world import ExpiryTerms, ExpiryWorld
from bursar.sim.process import Process
from bursar.signer.client import Known, SignerClient
from bursar.signer.curve import evm_address, public_key, sign_digest
from bursar.signer.policy import Policy, Wallet, parse
from bursar.store import Store
