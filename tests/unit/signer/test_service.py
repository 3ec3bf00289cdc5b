"""A signer at work: halts, releases, witnesses, another policy, and keys that can't be used."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from tests import signing
from tests.signing import FakeKeys, approval, codecs, payment, request

from bursar.model.authorizations import DeadAttempt, Release, Unhalt
from bursar.model.errors import InvalidName
from bursar.ports import SystemPorts
from bursar.rails.chain import Chain, Dead, Fate, Fee, Pending, Question, Shape
from bursar.signer import rules
from bursar.signer.errors import KeyUnavailable, PolicyRefused
from bursar.signer.policy import Policy
from bursar.signer.protocol import Never, Preview, Signature, SignerRefused, SignerUnavailable
from bursar.signer.rules import WITNESSED_MAX
from bursar.signer.service import Service
from bursar.signer.wallets import Wallet
from bursar.signer.witness import Witness

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


def test_readers_of_the_log_hold_up_no_signature(tmp_path: Path) -> None:
    """Given many who read the log at once on a slow disk, then a signature waits for one of them at most."""
    slow = threading.Semaphore(0)

    async def story(service: Service) -> None:
        await service.sign("payouts", request("p1"))
        read = service._log.read

        def slowly(*args: Any) -> Any:
            slow.acquire()
            return read(*args)

        service._log.read = slowly  # type: ignore[method-assign, assignment]
        readers = [asyncio.create_task(service.log(0, 10)) for _ in range(20)]
        await asyncio.sleep(0)
        signs = asyncio.create_task(service.sign("payouts", request("p2", nonce=1)))
        while service.state.number < 4:  # decided, and on its way to the disk  # noqa: ASYNC110
            await asyncio.sleep(0)
        slow.release()
        try:
            assert isinstance(await asyncio.wait_for(asyncio.shield(signs), 10), Signature)
        finally:
            slow.release(100)
            await asyncio.gather(*readers)

    play(tmp_path, story)


def test_tombstones_of_a_day_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thief who may cancel fills neither disk nor memory; what is on record is answered as before."""
    monkeypatch.setattr(rules, "TOMBSTONES_DAILY", 3)

    async def story(service: Service) -> None:
        made = [await service.cancel("payouts", f"p{number}", 0) for number in range(3)]
        await refused(service.cancel("payouts", "p4", 0), "OVER_LIMIT")
        assert await service.cancel("payouts", "p0", 0) == made[0]
        assert isinstance(await service.sign("payouts", request("p5")), Signature)

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


class FakeChain:
    """A chain behind the signer's own nodes, as a test wants it."""

    def __init__(self, says: Fate | None = None) -> None:
        self.says = says  # None: the first transaction that it is asked about was final, and failed
        self.asked: list[Question] = []
        self.hangs = asyncio.Event()
        self.hangs.set()

    async def fate(self, question: Question) -> Fate:
        self.asked.append(question)
        await self.hangs.wait()
        return self.says or Dead(proof={"how": "failed", "nodes": ["a", "b"]}, hash=question.tries[0].hash)


def looking(chain: FakeChain) -> Witness:
    return Witness({"bsc": cast(Chain, chain)})


def previewed(service: Service, payout: str) -> Awaitable[Preview]:
    return service.preview(payment(payout), request(payout).authorization, "hot")


@pytest.mark.parametrize("ask", ["sign", "preview"])
@pytest.mark.parametrize("says", [None, Pending(seen=True)])
def test_a_witness_is_asked_about_everything_that_was_signed_in_the_slot(
    tmp_path: Path, says: Fate | None, ask: str
) -> None:
    chain = FakeChain(says)

    async def story(service: Service) -> None:
        await service.sign("payouts", request("p1", 0))
        await service.sign("payouts", request("p1", 1, shape=Shape.CANCEL))
        assert not chain.asked
        if ask == "preview":
            asked: Awaitable[object] = previewed(service, "p1")
        else:
            asked = service.sign("payouts", request("p1", 2, nonce=7))
        if says is None:
            await asked
        else:
            no = await refused(asked, "SECOND_SLOT")
            assert "may still be mined" in no.why
            assert not no.denied
        (question,) = chain.asked
        assert question.sender == signing.HOT
        assert [each.shape.value for each in question.tries] == ["pay", "cancel"]
        assert question.order.amount == 500
        assert not question.consumer
        assert not question.one_node_is_enough

    play(tmp_path, story, witness=looking(chain))


def test_a_death_that_was_seen_is_in_the_log_and_survives_a_restart(tmp_path: Path) -> None:
    """Given a death seen and a crash, then the signer needs no nodes to sign again, and never again in that slot."""

    async def sees(service: Service) -> None:
        await service.sign("payouts", request("p1", 0))
        await previewed(service, "p1")

    async def knows(service: Service) -> None:
        assert service.state.payouts["p1"].witnessed == 1
        assert isinstance(await service.sign("payouts", request("p1", 1, nonce=7)), Signature)
        await refused(service.sign("payouts", request("p1", 2)), "DECLARED_DEAD")
        await refused(previewed(service, "p1"), "SECOND_SLOT")

    play(tmp_path, sees, witness=looking(FakeChain()))
    written = (tmp_path / "log").read_text()
    assert '"proofs":[{"how":"failed","nodes":["a","b"]}]' in written
    play(tmp_path, knows, new=False)


def test_silent_nodes_hold_up_no_other_payout(tmp_path: Path) -> None:
    """Given nodes that never answer and payouts that need them, then others are signed at once, and halts heard."""
    chain = FakeChain()
    chain.hangs.clear()

    async def story(service: Service) -> None:
        for number in range(3):
            await service.sign("payouts", request(f"p{number}", nonce=number))
        waiting = [asyncio.create_task(cast(Any, previewed(service, f"p{number}"))) for number in range(2)]
        waiting.append(asyncio.create_task(cast(Any, service.sign("payouts", request("p2", 1, nonce=20)))))
        while len(chain.asked) < 3:  # noqa: ASYNC110 (the double does not tell)
            await asyncio.sleep(0)
        for number in range(5, 10):
            assert isinstance(await service.sign("payouts", request(f"p{number}", nonce=number)), Signature)
        await service.halt("payouts", "a drill")
        assert not any(task.done() for task in waiting)
        chain.hangs.set()
        for task in waiting:
            await refused(task, "HALTED")

    play(tmp_path, story, witness=looking(chain))


def test_a_thief_does_not_have_a_payout_fail_again_and_again(tmp_path: Path) -> None:
    """Each death has cost a fee: after a few of one payout, people look."""

    async def story(service: Service) -> None:
        for number in range(WITNESSED_MAX + 1):
            await service.sign("payouts", request("p1", number, nonce=number))
        no = await refused(service.sign("payouts", request("p1", 9, nonce=9)), "SECOND_SLOT")
        assert f"{WITNESSED_MAX} attempts" in no.why
        release = release_of(service, "p1", WITNESSED_MAX)
        await service.release("payouts", release, [approval(release, "ann"), approval(release, "ben")])
        assert isinstance(await service.sign("payouts", request("p1", 9, nonce=9)), Signature)

    play(tmp_path, story, witness=looking(FakeChain()))


def test_a_refusal_has_the_release_that_approvers_would_sign(tmp_path: Path) -> None:
    async def story(service: Service) -> None:
        await service.sign("payouts", request("p1", 0))
        no = await refused(previewed(service, "p1"), "SECOND_SLOT")
        words, _, release = no.why.partition("release it: ")
        assert "no nodes of its own" in words
        assert msgspec.json.decode(release, type=Release) == release_of(service, "p1", 0)

    play(tmp_path, story)


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
