"""Payouts and withdrawals from a configuration: the chains whose nodes are configured, the signer, the flows on top.

A chain is built from its document. A document that is added or changed while this runs is followed within seconds, so
that a further chain needs its documents and the URLs of its nodes, and a changed ceiling of fees needs no restart.
Nothing here listens; who asks is `runtime`.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from bursar.config import SCREENING_SECRET_BYTES_MIN, SIGNER_SECRET_BYTES_MIN, Config, ConfigRefused, secret
from bursar.documents import DOCUMENTS_S, Documents
from bursar.engine import Engine
from bursar.engine.background import AWAY
from bursar.flows.deposits import ChainDeposits
from bursar.flows.payouts import Payouts
from bursar.flows.payouts.documents import CHAIN, WALLET
from bursar.flows.payouts.link import SignerStoreLink
from bursar.flows.withdrawals import Withdrawals
from bursar.flows.withdrawals.screening import ANSWER_BYTES_MAX as SCREENED_BYTES_MAX
from bursar.flows.withdrawals.screening import Screener
from bursar.ledger import Ledger
from bursar.ports import Ports
from bursar.rails.behind import RAILS, chain_behind
from bursar.rails.chain import Chain, Network
from bursar.rails.nodes import ANSWER_BYTES_MAX, Post
from bursar.signer.client import SignerClient, SignerLink

log = logging.getLogger("bursar.payouts")


class ConfiguredChains(Mapping[str, Chain]):
    """The chains that have both a document and nodes in the configuration, by name."""

    def __init__(self, config: Config, documents: Documents, ports: Ports, post: Post) -> None:
        self._config = config
        self._documents = documents
        self._ports = ports
        self._post = post
        self._chains: dict[str, Chain] = {}
        self._wallets: frozenset[str] = frozenset()
        self._told: set[str] = set()  # what was logged already
        self.refused: list[str] = []  # chains that can't be used as they are configured, with the reason

    def __getitem__(self, name: str) -> Chain:
        return self._chains[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._chains)

    def __len__(self) -> int:
        return len(self._chains)

    async def refresh(self) -> bool:
        """Follow the documents; whether there is a new chain or wallet. A chain that is retired stays: what was sent
        there is still confirmed."""
        found = await self._documents.all(CHAIN)
        names = frozenset(self._chains)
        for name, urls in self._config.chain_nodes.items():
            current = found.get(name)
            if current is None:
                self._log(f"{name}: nodes are configured, and there is no document of this chain yet")
            elif current.body.kind not in RAILS:
                self._log(f"{name}: there is no rail of the kind {current.body.kind}")
            else:
                self._use(current.body.network(name), urls)
        for name in found.keys() - self._config.chain_nodes.keys():
            self._log(f"{name}: no nodes are configured here (chain_nodes), so nothing is paid out there")
        wallets = frozenset(await self._documents.all(WALLET))
        is_new = names != frozenset(self._chains) or not wallets <= self._wallets
        self._wallets = wallets
        return is_new

    def _use(self, network: Network, urls: tuple[str, ...]) -> None:
        known = self._chains.get(network.name)
        if known is None or known.network != network:
            try:
                self._chains[network.name] = chain_behind(
                    network, urls, self._post, self._ports, self._config.chain_timeout_ms / 1000
                )
            except ModuleNotFoundError as error:
                self._refuse(f"{network.name}: {error.name} is missing: pip install 'bursar[{network.kind}]'")
                return
            except ValueError as error:  # what is wrong with a URL, without that URL
                self._refuse(f"{network.name}: {error}")
                return
            log.info("chain %s is used with %s nodes", network.name, len(urls))

    def _refuse(self, why: str) -> None:
        if why not in self.refused:
            self.refused.append(why)
        self._log(why)

    def _log(self, words: str) -> None:
        if words not in self._told:
            self._told.add(words)
            log.warning("%s", words)


@dataclass(frozen=True)
class PayingOut:
    """Payouts as a process drives them."""

    payouts: Payouts
    chains: ConfiguredChains
    withdrawals: Withdrawals
    deposits: ChainDeposits

    async def follow_documents(self) -> None:
        """Until cancelled: use chains and wallets that are added, and documents that are changed."""
        ports = self.payouts.engine.ports
        while True:
            await ports.sleep(DOCUMENTS_S)
            try:
                if await self.chains.refresh():
                    await self.payouts.prepare()
                await self.deposits.prepare()
            except AWAY as error:
                log.error("the documents of chains and wallets can't be read now: %s", error)


@asynccontextmanager
async def asked_chains(config: Config, ports: Ports, documents: Documents) -> AsyncIterator[ConfiguredChains]:
    """The configured chains alone, without a signer: for what only looks. No node has to answer now."""
    try:
        from bursar.http import Pool  # noqa: PLC0415 (an extra, as above)
    except ModuleNotFoundError as error:
        why = f"{error.name} is missing: pip install 'bursar[evm]' or 'bursar[tron]'"
        raise ConfigRefused(f"chain_nodes: {why}") from None
    pool = Pool(ANSWER_BYTES_MAX)
    try:
        chains = ConfiguredChains(config, documents, ports, pool.post)
        await chains.refresh()
        if chains.refused:  # now, and not at the first payout
            raise ConfigRefused(f"chain_nodes: {'; '.join(chains.refused)}")
        yield chains
    finally:
        await pool.close()


@asynccontextmanager
async def paying_out(
    config: Config, ports: Ports, ledger: Ledger, documents: Documents, engine: Engine
) -> AsyncIterator[PayingOut]:
    """Payouts on the engine of a process. Neither the signer nor any node has to answer now."""
    link = SignerStoreLink(ledger.store, config.signer_name)
    async with asked_chains(config, ports, documents) as chains, signer_client(config, ports, link) as signer:
        payouts = Payouts(ledger, documents, chains, signer, engine=engine, names=config.chain_nodes)
        await payouts.prepare()
        deposits = ChainDeposits(payouts, engine=engine)
        await deposits.prepare()
        async with screening(config, ports) as screener:
            withdrawals = Withdrawals(ledger, documents, payouts, engine=engine, screener=screener)
            yield PayingOut(payouts, chains, withdrawals, deposits)


@asynccontextmanager
async def screening(config: Config, ports: Ports) -> AsyncIterator[Screener | None]:
    """The hook that is asked about withdrawals; None: none is configured. It does not have to answer now."""
    if not config.screening_url:
        yield None
        return
    from bursar.http import Pool  # noqa: PLC0415 (an extra, as above)

    key = secret(config.screening_secret_file, "screening_secret_file", SCREENING_SECRET_BYTES_MIN)
    pool = Pool(SCREENED_BYTES_MAX)
    try:
        yield Screener(
            url=config.screening_url,
            secret=key,
            post=pool.post,
            now_us=ports.now_us,
            token=ports.token,
            timeout_s=config.screening_timeout_ms / 1000,
        )
    finally:
        await pool.close()


def signer_client(config: Config, ports: Ports, link: SignerLink | None = None) -> SignerClient:
    """A client of the configured signer, not started yet."""
    key = secret(config.signer_secret_file, "signer_secret_file", SIGNER_SECRET_BYTES_MIN)
    return SignerClient(
        ports,
        config.signer,
        name=config.signer_name,
        caller=config.signer_caller,
        secret=key,
        link=link,
        timeout_s=config.signer_timeout_ms / 1000,
    )
