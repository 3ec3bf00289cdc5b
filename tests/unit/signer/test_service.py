"""A signer at work: halts, releases, witnesses, another policy, and keys that can't be used."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests import signing
from tests.signing import FakeKeys, approval, codecs, payment, request

from bursar.model.authorizations import DeadAttempt, Release, Unhalt
from bursar.model.errors import InvalidName
from bursar.ports import SystemPorts
from bursar.rails.chain import Fee, Order, Shape, Try
from bursar.signer.errors import KeyUnavailable, PolicyRefused
from bursar.signer.policy import Policy, Wallet
from bursar.signer.protocol import Never, Signature, SignerRefused, SignerUnavailable
from bursar.signer.service import Service, Witness

Story = Callable[[Service], Awaitable[None]]
BY_APPROVALS = signing.POLICY.replace('people = ["ann", "ben", "carol"]', "approvals = true")


def play(folder: Path, story: Story, *, new: bool = True, policy: Policy | None = None, **options: Any) -> None:
    """Run a story on a signer in a folder."""

    async def run() -> None:
        keys = options.pop("keys", None) or FakeKeys()
        chosen = policy or signing.policy()
        service = await Service.open(SystemPorts(), str(folder), chosen, keys, codecs, new=new, **options)
        running = asyncio.create_task(service.run())
        try:
            await story(service)
        finally:
            service.stop()
            await running
            service.close()

    asyncio.run(run())


async def refused(asked: Awaitable[object], reason: str) -> SignerRefused:
    with pytest.raises(SignerRefused) as no:
        await asked
    assert no.value.reason == reason
    return no.value


def test_sign_cancel_and_ask_again(tmp_path: Path) -> None:
    async def story(service: Service) -> None:
        first = await service.sign("payouts", request("p1"))
        assert isinstance(first, Signature)
        assert await service.sign("payouts", request("p1")) == first
        assert await service.cancel("payouts", "p1", 0) == first
        never = await service.cancel("payouts", "p1", 1)
        assert never == Never(sequence=2)
        assert await service.sign("payouts", request("p1", 1)) == never
        floor = await service.preview(payment("p2"), request("p2").authorization, "hot")
        assert (floor.nonce_floor, floor.sequence) == (1, 2)

    play(tmp_path, story)


def test_concurrent_requests_for_one_attempt_are_one_signature(tmp_path: Path) -> None:
    """Given twenty requests at once for one attempt, with other fees each, then one is signed, others are refused."""

    async def story(service: Service) -> None:
        asked = [request(data=signing.unsigned(fee=Fee(gas_limit=21_000, price=10 + n % 4))) for n in range(20)]
        found = await asyncio.gather(*(service.sign("payouts", each) for each in asked), return_exceptions=True)
        raws = {answer.raw for answer in found if isinstance(answer, Signature)}
        assert len(raws) == 1
        assert sum(isinstance(answer, SignerRefused) for answer in found) == 15
        assert service.state.sequence == 1

    play(tmp_path, story)


def test_a_halt_survives_a_restart_and_two_people_lift_it(tmp_path: Path) -> None:
    """Halted: nothing is signed, also after a restart; tombstones, log and status are answered (W21)."""

    async def halts(service: Service) -> None:
        await service.sign("payouts", request("p1"))
        await service.halt("payouts", "a key may be stolen")

    async def is_halted(service: Service) -> None:
        await refused(service.sign("payouts", request("p2", nonce=1)), "HALTED")
        assert (await service.status()).halted == "a key may be stolen"
        assert isinstance(await service.cancel("payouts", "p9", 0), Never)
        assert isinstance(await service.sign("payouts", request("p1")), Signature)
        assert len(await service.log(0, 10)) == 2
        for people in ([], ["ann"], ["ann", "ann"], ["ann", "eve"], ["ann", "a.nn"]):
            await refused(service.unhalt(people, []), "NOT_RELEASED")
        await service.unhalt(["ann", "carol"], [])
        assert isinstance(await service.sign("payouts", request("p2", nonce=1)), Signature)

    play(tmp_path, halts)
    play(tmp_path, is_halted, new=False)


def test_a_halt_lifted_by_signatures_of_this_halt(tmp_path: Path) -> None:
    """Where the policy asks for approvals: two approvers sign the end of this very halt, and of no other."""

    async def story(service: Service) -> None:
        await service.halt("payouts", "one")
        first = Unhalt(signer=service.state.identity, halted_at=service.state.halted_at)
        one, other = approval(first, "ann"), approval(first, "ben")
        await refused(service.unhalt(["ann", "ben"], [one]), "NOT_RELEASED")
        await refused(service.unhalt([], [one, one]), "NOT_RELEASED")
        elsewhere = Unhalt(signer="0" * 32, halted_at=first.halted_at)
        await refused(service.unhalt([], [one, approval(elsewhere, "ben")]), "NOT_RELEASED")
        await service.unhalt([], [one, other])
        await service.halt("payouts", "two")
        await refused(service.unhalt([], [one, other]), "NOT_RELEASED")

    play(tmp_path, story, policy=signing.policy(BY_APPROVALS))


def test_a_halt_needs_a_reason(tmp_path: Path) -> None:
    async def story(service: Service) -> None:
        with pytest.raises(InvalidName):
            await service.halt("payouts", " ")

    play(tmp_path, story)


def release_of(service: Service, payout: str, *attempts: int) -> Release:
    signed = service.state.payouts[payout].attempts
    return Release(payout=payout, dead=tuple(DeadAttempt(attempt=n, hash=signed[n].hash) for n in attempts))


def test_two_approvers_release_a_payout(tmp_path: Path) -> None:
    """Given a live attempt, then another slot is refused until two approvers have signed that it is dead (W31)."""

    async def story(service: Service) -> None:
        await service.sign("payouts", request("p1", 0))
        await service.sign("payouts", request("p2", 0, nonce=1))
        second = request("p1", 1, nonce=7)
        await refused(service.sign("payouts", second), "SECOND_SLOT")
        release = release_of(service, "p1", 0)
        await refused(service.release("payouts", release, [approval(release, "ann")] * 2), "NOT_RELEASED")
        other = release_of(service, "p2", 0)
        wrong = [approval(other, "ann"), approval(other, "ben")]
        await refused(service.release("payouts", release, wrong), "NOT_RELEASED")
        await service.release("payouts", release, [approval(release, "ann"), approval(release, "ben")])
        assert isinstance(await service.sign("payouts", second), Signature)

    play(tmp_path, story)


class FakeWitness:
    """The signer's own nodes, as a test wants them."""

    def __init__(self, says: bool) -> None:
        self.says = says
        self.asked: list[tuple[str, str, tuple[Try, ...], Order]] = []

    async def dead(self, chain: str, sender: str, tries: tuple[Try, ...], order: Order) -> bool:
        self.asked.append((chain, sender, tries, order))
        return self.says


@pytest.mark.parametrize("says", [True, False])
def test_a_witness_is_asked_about_every_attempt_of_the_slot(tmp_path: Path, says: bool) -> None:
    witness = FakeWitness(says)

    async def story(service: Service) -> None:
        await service.sign("payouts", request("p1", 0))
        await service.sign("payouts", request("p1", 1, shape=Shape.CANCEL))
        assert not witness.asked
        second = service.sign("payouts", request("p1", 2, nonce=7))
        if says:
            assert isinstance(await second, Signature)
        else:
            await refused(second, "SECOND_SLOT")
        ((chain, sender, tries, order),) = witness.asked
        assert (chain, sender) == ("bsc", signing.HOT)
        assert [each.shape.value for each in tries] == ["pay", "cancel"]
        assert order.amount == 500

    play(tmp_path, story, witness=witness)


def test_the_witness_double_has_the_interface() -> None:
    witness: Witness = FakeWitness(True)
    assert witness is not None


def test_a_policy_must_fit_the_keys_and_the_log(tmp_path: Path) -> None:
    """Read anew at SIGHUP: what does not fit is refused, and the old policy stays."""

    async def story(service: Service) -> None:
        before = service.policy
        swapped = signing.POLICY.replace('key = "main"', 'key = "cold"').replace('name = "hot"', 'name = "warm"', 1)
        with pytest.raises(PolicyRefused) as no:
            service.use(signing.policy(swapped))
        assert "its key has the address" in no.value.problems
        assert "of the signer 'hot'" in no.value.problems
        with pytest.raises(PolicyRefused, match="no key"):
            service.use(signing.policy(signing.POLICY.replace('key = "main"', 'key = "gone"')))
        assert service.policy is before
        stricter = signing.policy(signing.POLICY.replace("payment_max = 5_000\ndual", "payment_max = 499\ndual"))
        service.use(stricter)
        no_more = await refused(service.sign("payouts", request("p1")), "OVER_LIMIT")
        assert no_more.denied

    play(tmp_path, story)


class BrokenKeys(FakeKeys):
    """A hardware module that is away."""

    async def sign(self, wallet: Wallet, digest: bytes) -> bytes:
        raise KeyUnavailable(wallet.name, "the device does not answer")


def test_a_key_that_cannot_be_used_is_a_refusal_that_binds_nothing(tmp_path: Path) -> None:
    async def story(service: Service) -> None:
        await refused(service.sign("payouts", request("p1")), "KEY_UNAVAILABLE")
        assert not service.state.slots

    play(tmp_path, story, keys=BrokenKeys())


class HangingKeys(FakeKeys):
    """A hardware module that answers when a test says so."""

    def __init__(self) -> None:
        self.asked, self.goes_on = asyncio.Event(), asyncio.Event()

    async def sign(self, wallet: Wallet, digest: bytes) -> bytes:
        self.asked.set()
        await self.goes_on.wait()
        return await super().sign(wallet, digest)


def test_a_halt_does_not_wait_for_a_key_and_drops_its_signature(tmp_path: Path) -> None:
    """Given a signature under way in a slow device, when the signer is halted, then the signature never leaves."""
    keys = HangingKeys()

    async def story(service: Service) -> None:
        asked = asyncio.create_task(service.sign("payouts", request("p1")))
        await keys.asked.wait()
        await service.halt("payouts", "a key may be stolen")
        keys.goes_on.set()
        await refused(asked, "HALTED")
        assert not service.state.slots
        assert await service.cancel("payouts", "p1", 0) == Never(sequence=1)

    play(tmp_path, story, keys=keys)


def test_a_signer_that_fell_behind_answers_nothing(tmp_path: Path) -> None:
    """Not even that something was never signed; two people may say that the caller was wrong (W33)."""

    async def falls(service: Service) -> None:
        await service.sign("payouts", request("p1"))
        await service.fell_behind("payouts", 99)

    async def is_behind(service: Service) -> None:
        for ask in (
            service.cancel("payouts", "p5", 0),
            service.sign("payouts", request("p1")),
            service.log(0, 10),
            service.preview(payment(), request().authorization, "hot"),
        ):
            with pytest.raises(SignerUnavailable, match="old copy"):
                await ask
        assert "behind" in (await service.status()).halted
        await service.unhalt(["ann", "ben"], [])
        assert isinstance(await service.sign("payouts", request("p1")), Signature)

    play(tmp_path, falls)
    play(tmp_path, is_behind, new=False)
