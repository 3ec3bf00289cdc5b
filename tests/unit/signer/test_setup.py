"""What a signer is assembled from: its policy file, and the file of its own nodes, which no message repeats."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests import signing

from bursar.ports import SystemPorts
from bursar.signer.errors import PolicyRefused
from bursar.signer_setup import OwnNodes, network_of, read_policy

KEY = "s3cret-api-key"
ONE, TWO = f"https://one.example/{KEY}", f"https://two.example/{KEY}"
GENESIS = "0x" + "0d" * 32
POLICY = signing.POLICY.replace("cancels_daily = 3", f'cancels_daily = 3\ndepth = 15\ngenesis = "{GENESIS}"').replace(
    'name = "hot"', 'name = "hot"\nnodes_file = "nodes.toml"', 1
)


def folder(path: Path, nodes: str = f'[chain_nodes]\nbsc = ["{ONE}", "{TWO}"]', policy: str = POLICY) -> Path:
    """A policy with its files, as an administrator would have them."""
    texts = {"policy.toml": policy, "nodes.toml": nodes, "payouts.secret": "p" * 40, "viewer.secret": "v" * 40}
    for name, text in texts.items():
        (path / name).write_text(text)
        (path / name).chmod(0o600)
    return path / "policy.toml"


def refused(file: Path) -> str:
    with pytest.raises(PolicyRefused) as no:
        read_policy(str(file))
    assert KEY not in str(no.value)
    assert "example" not in str(no.value)
    return str(no.value)


def test_own_nodes_are_read_with_the_policy(tmp_path: Path) -> None:
    policy, secrets, urls = read_policy(str(folder(tmp_path)))
    assert urls == {"bsc": (ONE, TWO)}
    assert set(secrets) == {"payouts", "viewer"}
    network = network_of(policy.chains["bsc"])
    assert (network.chain_id, network.depth, network.finalized_tag, network.genesis) == (56, 15, True, GENESIS)


def test_a_signer_needs_no_nodes(tmp_path: Path) -> None:
    file = folder(tmp_path, policy=signing.POLICY)
    (tmp_path / "nodes.toml").unlink()
    assert read_policy(str(file))[2] == {}


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        (f'[chain_nodes]\nbsc = ["{ONE}"]', "bsc: 2 nodes at least, of different operators"),
        (f'[chain_nodes]\nbsc = ["{ONE}", "{ONE}"]', "its own witness"),
        (f'[chain_nodes]\neth = ["{ONE}", "{TWO}"]', "eth: the policy has no such chain"),
        (f'[chain_nodes]\nbsc = ["{ONE}", "ftp://{KEY}"]', "node 2 is not http"),
        (f"[chain_nodes]\nbsc = [{ONE}]", "it is not TOML (line 2"),
        (f'bsc = ["{ONE}", "{TWO}"]', "one table, [chain_nodes]"),
    ],
)
def test_nodes_that_could_not_be_believed_are_refused(tmp_path: Path, nodes: str, said: str) -> None:
    assert said in refused(folder(tmp_path, nodes))


def test_nodes_need_to_know_when_a_block_is_final(tmp_path: Path) -> None:
    assert "chains.bsc.depth" in refused(folder(tmp_path, policy=POLICY.replace("depth = 15", "")))


@pytest.mark.parametrize(("mode", "said"), [(0o644, "chmod 600"), (0o620, "chmod go-w")])
def test_nodes_are_not_for_others_to_read_or_change(tmp_path: Path, mode: int, said: str) -> None:
    file = folder(tmp_path)
    (tmp_path / "nodes.toml").chmod(mode)
    assert said in refused(file)


def test_nodes_that_are_away_are_said_at_the_start_and_hold_nothing_up(tmp_path: Path) -> None:
    """An operator learns it before the day on which a payout needs them; the URLs are not in it."""
    urls = [f"http://127.0.0.1:1/{KEY}?{name}" for name in "ab"]
    policy, _, nodes = read_policy(str(folder(tmp_path, f"[chain_nodes]\nbsc = {urls}".replace("'", '"'))))
    said: list[str] = []

    async def story() -> None:
        own = OwnNodes(SystemPorts(), said.append)
        own.use(policy, nodes)
        async with asyncio.timeout(20):
            while not said:  # noqa: ASYNC110 (the list does not tell)
                await asyncio.sleep(0.01)
        await own.close()

    asyncio.run(story())
    (line,) = said
    assert "own nodes of bsc: bsc-1: no answer" in line
    assert "Until 2 agree" in line
    assert KEY not in line
