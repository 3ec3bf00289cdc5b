"""Wallets of users' deposits: what a sweep and its gas get, and what an attacker with a worker's rights does not.

All of it with the real codecs, on an EVM chain and on TRON, and with keys derived from words.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from tests.signing import approved, public_half

from bursar.flows.payouts import payout as payouts
from bursar.model.authorizations import Authorization, Payment
from bursar.ports import SystemPorts
from bursar.rails.chain import Chain, Codec, Dead, Fee, Network, Order, Question, Shape, Slot
from bursar.rails.derivation import USER_MAX, ExtendedKey, deposit_address
from bursar.signer import keys as keys_module
from bursar.signer import rules
from bursar.signer.codecs import codec_of
from bursar.signer.curve import evm_address, public_key, tron_address
from bursar.signer.errors import KeystoreRefused, KeyUnavailable, PolicyRefused
from bursar.signer.keys import KeystoreKeys
from bursar.signer.keystore import Keystore, derive, extended_key
from bursar.signer.policy import Policy, parse
from bursar.signer.protocol import Never, Preview, Signature, SignerRefused, SignRequest
from bursar.signer.service import Service
from bursar.signer.wallets import Wallet
from bursar.signer.witness import Witness

WORDS = b"abandon " * 11 + b"about"
TRON_ID = 728_126_428
EVM_PATH, TRON_PATH = "m/44'/60'/1'", "m/44'/195'/1'"
EVM_KEY: ExtendedKey = extended_key(bytearray(WORDS), EVM_PATH)
TRON_KEY: ExtendedKey = extended_key(bytearray(WORDS), TRON_PATH)
HOT = evm_address(public_key(derive(bytearray(WORDS), "m/44'/60'/0'/0/0")))
COLD = evm_address(public_key(derive(bytearray(WORDS), "m/44'/60'/0'/0/1")))
HOT_TRON = tron_address(public_key(derive(bytearray(WORDS), "m/44'/195'/0'/0/0")))
THIEF = "0x5151515151515151515151515151515151515151"
THIEF_TRON = tron_address(b"\x51" * 64)
USDT = "0x55d398326f99059fF775485246999027B3197955"
USDT_TRON = "TR7NHqjeKQxGTCi8q8ZY4pL8otSzgjLj6t"
USERS = (1, 1001, 2**31, USER_MAX)

SECTIONS = f"""
[deposits.dep-bsc]
chain = "bsc"
key = "main"
path = "{EVM_PATH}"

[deposits.dep-eth]
chain = "eth"
key = "main"
path = "{EVM_PATH}"

[deposits.dep-tron]
chain = "tron"
key = "main"
path = "{TRON_PATH}"
"""


def asset(chain: str, code: str, contract: str) -> str:
    return f"""
[assets.{chain}.{code}]
contract = "{contract}"
decimals = 18
payment_max = 1_000
dual_above = 1_000
hourly_max = 1_500
daily_max = 2_000
"""


def mandate(name: str, chain: str, code: str, more: str) -> str:
    return f"""
[mandates.{name}]
chain = "{chain}"
asset = "{code}"
payment_max = 1_000
hourly_max = 2_000
daily_max = 2_500
{more}
"""


POLICY = f"""
name = "hot"
[unhalt]
people = ["ann", "ben"]
[chains.bsc]
kind = "evm"
chain_id = 56
fee_max = 1_000_000
cancel_fee_max = 1_000_000
[chains.eth]
kind = "evm"
chain_id = 1
fee_max = 1_000_000
cancel_fee_max = 1_000_000
[chains.tron]
kind = "tron"
chain_id = {TRON_ID}
fee_max = 100_000_000
cancel_fee_max = 0
[wallets.hot-bsc]
chain = "bsc"
address = "{HOT}"
key = "main"
path = "m/44'/60'/0'/0/0"
[wallets.cold-eth]
chain = "eth"
address = "{COLD}"
key = "main"
path = "m/44'/60'/0'/0/1"
[wallets.hot-tron]
chain = "tron"
address = "{HOT_TRON}"
key = "main"
path = "m/44'/195'/0'/0/0"
{SECTIONS}
[approvers.ann]
public_key = "{public_half("ann")}"
[approvers.ben]
public_key = "{public_half("ben")}"
{asset("bsc", "USDT", USDT)}
{asset("bsc", "BNB", "")}
{asset("tron", "USDT", USDT_TRON)}
{asset("tron", "TRX", "")}
{mandate("sweep", "bsc", "USDT", "own_wallets = true")}
{mandate("sweep-tron", "tron", "USDT", "own_wallets = true")}
{mandate("any", "bsc", "USDT", "")}
{mandate("listed", "bsc", "USDT", f'allow = ["{THIEF}"]')}
{mandate("gas", "bsc", "BNB", "own_deposits = true")}
{mandate("gas-tron", "tron", "TRX", "own_deposits = true")}
{mandate("both", "bsc", "BNB", f'own_deposits = true{chr(10)}own_wallets = true{chr(10)}allow = ["{COLD}"]')}
[callers.payouts]
secret_file = "payouts.secret"
rights = ["preview", "sign", "cancel", "log", "status"]
"""
NETWORKS = {
    "bsc": Network(name="bsc", kind="evm", chain_id=56),
    "eth": Network(name="eth", kind="evm", chain_id=1),
    "tron": Network(name="tron", kind="tron", chain_id=TRON_ID),
}
CONTRACTS = {("bsc", "USDT"): USDT, ("tron", "USDT"): USDT_TRON, ("bsc", "BNB"): "", ("tron", "TRX"): ""}
Story = Callable[[Service], Awaitable[None]]


def policy(text: str = POLICY) -> Policy:
    return parse("policy.toml", text.encode(), codec_of)


def keystore_keys() -> KeystoreKeys:
    store = Keystore("keys", {}, {})
    store.add("main", bytearray(WORDS), ())
    store.add("again", bytearray(WORDS), ())
    store.add("raw", bytearray(b"11" * 32), ())
    return KeystoreKeys(store)


def play(folder: Path, *stories: Story, text: str = POLICY, keys: Any = None, witness: Witness | None = None) -> None:
    """Tell a signer stories, each to a process of its own that reads the log of those before."""

    async def run(story: Story, *, new: bool) -> None:
        given = keys or keystore_keys()
        service = await Service.open(
            SystemPorts(), str(folder), policy(text), given, codec_of, new=new, witness=witness
        )
        running = asyncio.create_task(service.run())
        try:
            await story(service)
        finally:
            service.stop()
            await running
            service.close()

    for number, story in enumerate(stories):
        asyncio.run(run(story, new=number == 0))


def own(chain: str, user: int) -> str:
    """As the server derives it, with the extended public key alone."""
    return deposit_address("tron", TRON_KEY, user) if chain == "tron" else deposit_address("evm", EVM_KEY, user)


def slot(chain: str, number: int) -> Slot:
    if chain == "tron":
        return Slot(expires=1_794_967_848_168, reference=f"00862dc3400f9103d403/{1 + number}")
    return Slot(nonce=number)


def asked(
    payout: str,
    wallet: str,
    sender: str,
    to: str,
    by: Authorization,
    *,
    chain: str = "bsc",
    code: str = "USDT",
    amount: int = 500,
    number: int = 0,
    attempt: int = 1,
    shape: Shape = Shape.PAY,
    account: str = "suspense:deposits",
    owner: str = "",
) -> SignRequest:
    contract, network = CONTRACTS[chain, code], NETWORKS[chain]
    order = Order(payout=payout, to=to, contract=contract, amount=amount)
    fee = Fee(gas_limit=100_000, price=1)
    payment = Payment(
        payout=payout,
        account=account,
        asset=code,
        amount=str(amount),
        chain=chain,
        chain_id=network.chain_id,
        contract=contract,
        decimals=18,
        amount_raw=str(amount),
        to=to,
    )
    return SignRequest(
        payout=payout,
        attempt=attempt,
        shape=shape,
        chain=chain,
        wallet=wallet,
        sender=sender,
        unsigned=codec_of(network.kind).build(network, owner or sender, order, shape, slot(chain, number), fee),
        payment=payment,
        authorization=by,
    )


def sweep(user: int = 1001, to: str = "", *, chain: str = "bsc", payout: str = "p1", **other: Any) -> SignRequest:
    """What arrived at a user's address goes to the wallet that the policy names."""
    by = other.pop("by", Authorization(mandate="sweep-tron" if chain == "tron" else "sweep"))
    to = to or (HOT_TRON if chain == "tron" else HOT)
    return asked(payout, f"dep-{chain}-{user}", own(chain, user), to, by, chain=chain, **other)


def gas(to: str, account: str, *, chain: str = "bsc", payout: str = "g1", name: str = "", **other: Any) -> SignRequest:
    """A little of the chain's coin, for what a sweep costs."""
    if chain == "tron":
        by = Authorization(mandate=name or "gas-tron")
        return asked(payout, "hot-tron", HOT_TRON, to, by, chain=chain, code="TRX", account=account, **other)
    by = Authorization(mandate=name or "gas")
    return asked(payout, "hot-bsc", HOT, to, by, chain=chain, code="BNB", account=account, **other)


async def refuses(service: Service, request: SignRequest, reason: str, *, denied: bool | None = None) -> None:
    """Asked to sign, and asked whether it would; and it remembers nothing of it."""
    before = msgspec.json.encode((service.state.slots, service.state.nonces, list(service.state.usage)))
    asks = [service.sign("payouts", request)]
    if request.shape is Shape.PAY:
        asks.append(service.preview(request.payment, request.authorization, request.wallet))  # type: ignore[arg-type]
    for ask in asks:
        with pytest.raises(SignerRefused) as no:
            await ask
        assert no.value.reason == reason, no.value.why
        assert denied is None or no.value.denied is denied
    assert msgspec.json.encode((service.state.slots, service.state.nonces, list(service.state.usage))) == before


async def signs(service: Service, request: SignRequest) -> Signature:
    assert isinstance(await service.preview(request.payment, request.authorization, request.wallet), Preview)
    answer = await service.sign("payouts", request)
    assert isinstance(answer, Signature)
    return answer


# --- sweeps


@pytest.mark.parametrize("chain", ["bsc", "tron"])
def test_a_sweep_is_signed_by_the_key_of_the_address_that_the_server_has_derived(tmp_path: Path, chain: str) -> None:
    codec: Codec = codec_of(NETWORKS[chain].kind)

    async def story(service: Service) -> None:
        for user in USERS:
            made = await signs(service, sweep(user, chain=chain, payout=f"p{user}"))
            decoded, sender, _ = codec.read(made.raw)
            assert sender == own(chain, user)
            assert decoded.to == (HOT_TRON if chain == "tron" else HOT)

    play(tmp_path, story, text=POLICY.replace("_max = 2_", "_max = 9_"))


@pytest.mark.parametrize(
    ("to", "by"),
    [
        (THIEF, Authorization(mandate="sweep")),
        (THIEF, Authorization(mandate="any")),
        (THIEF, Authorization(mandate="listed")),
        (THIEF, "ann"),
        (THIEF, "ann ben"),
        (own("bsc", 1001), Authorization(mandate="any")),  # to itself
        (own("bsc", 1002), Authorization(mandate="any")),  # to another user
        (COLD, Authorization(mandate="any")),  # a wallet of another chain
        (own("bsc", 1002), "ann ben"),
    ],
)
def test_what_users_have_deposited_goes_nowhere_but_to_named_wallets(
    tmp_path: Path, to: str, by: Authorization | str
) -> None:
    """Given a caller with every right, and even two approvers, then a sweep to another address is denied."""

    async def story(service: Service) -> None:
        request = sweep(to=to, by=by if isinstance(by, Authorization) else Authorization())
        if isinstance(by, str):
            request = msgspec.structs.replace(request, authorization=approved(request.payment, *by.split()))
        await refuses(service, request, "DESTINATION", denied=True)

    play(tmp_path, story)


def test_the_same_on_tron(tmp_path: Path) -> None:
    async def story(service: Service) -> None:
        request = sweep(to=THIEF_TRON, chain="tron")
        await refuses(service, request, "DESTINATION", denied=True)
        request = msgspec.structs.replace(request, authorization=approved(request.payment, "ann", "ben"))
        await refuses(service, request, "DESTINATION", denied=True)

    play(tmp_path, story)


def test_the_bytes_must_be_those_of_the_payment(tmp_path: Path) -> None:
    """A payment to a wallet of ours, with bytes to another address."""

    async def story(service: Service) -> None:
        honest, stolen = sweep(), sweep(to=THIEF)
        mixed = msgspec.structs.replace(honest, unsigned=stolen.unsigned)
        with pytest.raises(SignerRefused, match="another recipient"):
            await service.sign("payouts", mixed)
        assert not service.state.slots

    play(tmp_path, story)


@pytest.mark.parametrize("sender", [HOT, own("bsc", 1002), THIEF, ""])
def test_the_sender_is_the_address_of_the_users_own_key(tmp_path: Path, sender: str) -> None:
    async def story(service: Service) -> None:
        with pytest.raises(SignerRefused, match="has the address"):
            await service.sign("payouts", msgspec.structs.replace(sweep(), sender=sender))

    play(tmp_path, story)


def test_on_tron_the_bytes_name_their_owner(tmp_path: Path) -> None:
    """One user's key never signs what spends another's money."""

    async def story(service: Service) -> None:
        with pytest.raises(SignerRefused) as no:
            await service.sign("payouts", sweep(chain="tron", owner=own("tron", 1002)))
        assert no.value.reason == "UNDECODABLE"
        assert not service.state.slots

    play(tmp_path, story)


@pytest.mark.parametrize(
    "name",
    [
        "dep-bsc-01001",
        "dep-bsc-+1001",
        "dep-bsc-1001x",
        "dep-bsc-1001 ",
        "dep-bsc-1001\n",
        "dep-bsc- 1001",
        "dep-bsc-1_001",
        "dep-bsc-\u0661\u0660\u0660\u0661",  # digits, in Arabic
        "dep-bsc-1\u0660\u0660\u0661",
        "dep-bsc-0",
        "dep-bsc--1001",
        "dep-bsc-",
        "dep-bsc",
        "dep-bsc-1001-1001",
        "DEP-BSC-1001",
        "dep-1001",
        "-1001",
        f"dep-bsc-{USER_MAX + 1}",
        "dep-bsc-" + "9" * 5_000,
        "dep-eth-1001",  # of another chain, though its address is the same
        "dep-tron-1001",
    ],
)
def test_a_wallet_has_one_name(tmp_path: Path, name: str) -> None:
    async def story(service: Service) -> None:
        await refuses(service, msgspec.structs.replace(sweep(), wallet=name), "UNKNOWN_WALLET")
        await refuses(service, gas(own("bsc", 1001), f"external:wallet:bsc:{name}"), "DESTINATION", denied=True)

    play(tmp_path, story)


def test_a_sweep_that_hangs_is_cancelled_in_its_nonce(tmp_path: Path) -> None:
    """A cancellation goes from the wallet to itself, and moves nothing: it is no payment."""

    async def story(service: Service) -> None:
        await signs(service, sweep(number=4))
        cancel = sweep(number=4, attempt=2, shape=Shape.CANCEL)
        assert isinstance(await service.sign("payouts", cancel), Signature)
        another = sweep(number=5, attempt=3, shape=Shape.CANCEL, payout="unknown")
        await refuses(service, another, "NOTHING_TO_CANCEL")

    play(tmp_path, story)


def test_caps_hold_for_each_wallet_and_a_mandates_for_all(tmp_path: Path) -> None:
    """Given 1500 an hour of a wallet and 2000 of the mandate, then neither is passed by taking more users."""

    async def story(service: Service) -> None:
        await signs(service, sweep(1, payout="p1", amount=1_000))
        await refuses(service, sweep(1, payout="p2", amount=501, number=1), "OVER_LIMIT", denied=False)
        await signs(service, sweep(2, payout="p3", amount=1_000))
        await refuses(service, sweep(3, payout="p4", amount=1), "OVER_LIMIT", denied=False)
        again = await service.sign("payouts", sweep(1, payout="p1", amount=1_000))  # as before
        assert isinstance(again, Signature)

    play(tmp_path, story)


# --- gas


def account(user: int, chain: str = "bsc") -> str:
    return f"external:wallet:{chain}:dep-{chain}-{user}"


@pytest.mark.parametrize("chain", ["bsc", "tron"])
def test_gas_goes_to_the_address_that_the_signer_has_derived_itself(tmp_path: Path, chain: str) -> None:
    async def story(service: Service) -> None:
        for number, user in enumerate((1, 1001)):
            request = gas(own(chain, user), account(user, chain), chain=chain, payout=f"g{user}", number=number)
            await signs(service, request)

    play(tmp_path, story)


@pytest.mark.parametrize(
    ("to", "named"),
    [
        (THIEF, account(1001)),
        (own("bsc", 1002), account(1001)),
        (own("bsc", 1001), account(1002)),
        (own("bsc", 1001), "user:1001:funding"),
        (own("bsc", 1001), ""),
        (own("bsc", 1001), "dep-bsc-1001"),
        (own("bsc", 1001), account(1001, "eth")),  # the same address, and the name of another chain
        (own("bsc", 1001), "external:wallet:bsc:dep-eth-1001"),
        (own("bsc", 1001), "external:wallet:eth:dep-bsc-1001"),
        (own("bsc", 1001), "external:wallet:bsc:"),
        (own("bsc", 1001), " " + account(1001)),
        (own("bsc", 1001), "x" + account(1001)),
        (HOT, "external:wallet:bsc:hot-bsc"),  # a wallet of ours, and none of deposits
        (HOT, account(1001)),
        (THIEF, "external:wallet:bsc:hot-bsc"),
    ],
)
def test_gas_goes_to_no_other_address(tmp_path: Path, to: str, named: str) -> None:
    async def story(service: Service) -> None:
        await refuses(service, gas(to, named), "DESTINATION", denied=True)

    play(tmp_path, story)


def test_gas_goes_to_no_other_address_on_tron(tmp_path: Path) -> None:
    async def story(service: Service) -> None:
        await refuses(service, gas(THIEF_TRON, account(1001, "tron"), chain="tron"), "DESTINATION", denied=True)
        other = gas(own("tron", 1), account(1001, "tron"), chain="tron")
        await refuses(service, other, "DESTINATION", denied=True)

    play(tmp_path, story)


def test_a_mandates_destinations_add_up(tmp_path: Path) -> None:
    """Own wallets, users' addresses and a list: to each of them, and to no other."""

    async def story(service: Service) -> None:
        for number, (to, named) in enumerate(((HOT, "x"), (COLD, "x"), (own("bsc", 7), account(7)))):
            await signs(service, gas(to, named, name="both", payout=f"g{number}", number=number))
        await refuses(service, gas(THIEF, account(7), name="both", payout="g9", number=9), "DESTINATION", denied=True)

    text = POLICY.replace("hourly_max = 1_500", "hourly_max = 9_000")
    play(tmp_path, story, text=text)


def test_a_mandate_for_wallets_is_none_for_users_addresses(tmp_path: Path) -> None:
    async def story(service: Service) -> None:
        request = asked(
            "p1", "hot-bsc", HOT, own("bsc", 1001), Authorization(mandate="sweep"), account=account(1001), amount=5
        )
        await refuses(service, request, "DESTINATION", denied=True)

    play(tmp_path, story)


def test_gas_of_a_users_wallet_pays_for_no_other_users(tmp_path: Path) -> None:
    """A mandate for users' addresses does not open users' wallets to them."""

    async def story(service: Service) -> None:
        by = Authorization(mandate="gas")
        one, other = own("bsc", 1), own("bsc", 2)
        request = asked("g1", "dep-bsc-1", one, other, by, code="BNB", account=account(2))
        await refuses(service, request, "DESTINATION", denied=True)

    play(tmp_path, story)


def test_the_account_is_the_one_that_payouts_book() -> None:
    assert rules.wallet_account("bsc", "dep-bsc-7") == payouts.wallet_account("bsc", "dep-bsc-7") == account(7)


# --- what it remembers


def test_nonces_of_a_users_wallet_survive_a_restart(tmp_path: Path) -> None:
    """The log alone says which nonce of which address belongs to which payout, for ever."""
    first: list[Signature] = []

    async def before(service: Service) -> None:
        first.append(await signs(service, sweep(number=7)))
        await service.cancel("payouts", "p2", 1)

    async def after(service: Service) -> None:
        assert await service.sign("payouts", sweep(number=7)) == first[0]
        assert await service.cancel("payouts", "p2", 1) == Never(sequence=2)
        known = await service.attempts("p1")
        assert [(one.sender, one.raw) for one in known] == [(own("bsc", 1001), first[0].raw)]
        request = sweep(payout="p3", number=7, amount=400)
        preview = await service.preview(request.payment, request.authorization, request.wallet)
        assert preview.nonce_floor == 8
        with pytest.raises(SignerRefused) as no:
            await service.sign("payouts", request)
        assert no.value.reason == "NONCE_TAKEN"
        with pytest.raises(SignerRefused) as second:
            await service.sign("payouts", sweep(number=8, attempt=2))
        assert second.value.reason == "SECOND_SLOT"
        # Nonces are of one address, caps of one wallet: another user's are untouched, and this one's go on.
        await signs(service, sweep(1002, payout="p4", number=7))
        assert [entry.payout for entry in await service.log(0, 10)] == ["p1", "p2", "p4"]
        await refuses(service, sweep(payout="p5", amount=1_001, number=9), "OVER_LIMIT")
        assert (await service.status()).sequence == 3

    play(tmp_path, before, after)


def test_a_transaction_of_a_users_wallet_on_tron_survives_a_restart(tmp_path: Path) -> None:
    first: list[Signature] = []

    async def before(service: Service) -> None:
        first.append(await signs(service, sweep(chain="tron", number=1)))

    async def after(service: Service) -> None:
        assert await service.sign("payouts", sweep(chain="tron", number=1)) == first[0]
        with pytest.raises(SignerRefused) as taken:
            await service.sign("payouts", sweep(chain="tron", number=1, payout="p2"))
        assert taken.value.reason == "NONCE_TAKEN"
        with pytest.raises(SignerRefused) as second:
            await service.sign("payouts", sweep(chain="tron", number=2, attempt=2))
        assert second.value.reason == "SECOND_SLOT"
        await signs(service, sweep(1002, chain="tron", number=1, payout="p3"))

    play(tmp_path, before, after)


class DeadChain:
    """A chain behind the signer's own nodes, on which all that it is asked about has failed."""

    def __init__(self) -> None:
        self.asked: list[Question] = []

    async def fate(self, question: Question) -> Dead:
        self.asked.append(question)
        return Dead(proof={"how": "failed"}, hash=question.tries[0].hash)


def test_a_sweep_that_failed_moves_to_another_nonce_when_the_signers_own_nodes_have_seen_it(tmp_path: Path) -> None:
    chain = DeadChain()

    async def story(service: Service) -> None:
        await signs(service, sweep(number=0))
        await signs(service, sweep(number=1, attempt=2))
        assert {question.sender for question in chain.asked} == {own("bsc", 1001)}

    play(tmp_path, story, witness=Witness({"bsc": cast(Chain, chain)}))


def test_a_log_is_read_without_the_section_that_it_speaks_of(tmp_path: Path) -> None:
    """Given a policy from which deposits were taken out, then nothing new is signed, and what was signed is said."""
    first: list[Signature] = []

    async def before(service: Service) -> None:
        first.append(await signs(service, sweep()))
        service.use(policy(without))
        await refuses(service, sweep(payout="p2", number=1), "UNKNOWN_WALLET")

    async def after(service: Service) -> None:
        assert await service.cancel("payouts", "p1", 1) == first[0]
        service.use(policy(without))
        assert await service.sign("payouts", sweep()) == first[0]

    without = POLICY.replace(SECTIONS, "").replace("own_deposits = true", "")
    play(tmp_path, before, after)


def test_users_who_have_no_sweep_take_neither_memory_nor_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thief may ask about every user there could be: what is kept is bounded by what is signed."""
    monkeypatch.setattr(keys_module, "ADDRESSES_MAX", 10)
    keys = keystore_keys()

    async def story(service: Service) -> None:
        number = service.state.number
        for user in range(1, 100):
            request = sweep(user)
            await service.preview(request.payment, request.authorization, request.wallet)
        await refuses(service, sweep(100, to=THIEF), "DESTINATION")
        state = service.state
        assert not (state.payouts or state.slots or state.nonces or state.usage)
        assert state.number == number
        await signs(service, sweep(50))
        assert (len(state.slots), len(state.nonces), state.number) == (1, 1, number + 1)

    play(tmp_path, story, keys=keys)
    assert keys._user_public.cache_info().currsize == 10
    assert len(keys._private) == 3  # of the wallets that the policy names, and of no user
    assert len(keys._extended) == 2


def test_the_private_key_of_a_user_is_wiped_after_each_signature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[bytearray] = []
    private_key = Keystore.private_key

    def kept(store: Keystore, name: str, path: str) -> bytearray:
        key = private_key(store, name, path)
        if path.startswith(EVM_PATH):
            assert any(key)
            made.append(key)
        return key

    async def story(service: Service) -> None:
        await signs(service, sweep())

    monkeypatch.setattr(Keystore, "private_key", kept)
    play(tmp_path, story)
    assert made == [bytearray(32)]


class AwayKeys(KeystoreKeys):
    """A device that answers at the start and is away later."""

    def __init__(self) -> None:
        super().__init__(keystore_keys()._keystore)
        self.away = False

    def address(self, wallet: Wallet) -> str:
        if self.away and wallet.user:
            raise KeyUnavailable(wallet.name, "the device does not answer")
        return super().address(wallet)


def test_a_key_that_does_not_answer_is_a_refusal_for_now(tmp_path: Path) -> None:
    keys = AwayKeys()

    async def story(service: Service) -> None:
        keys.away = True
        await refuses(service, sweep(), "KEY_UNAVAILABLE", denied=False)
        await refuses(service, gas(own("bsc", 7), account(7)), "KEY_UNAVAILABLE", denied=False)
        keys.away = False
        await signs(service, sweep())

    play(tmp_path, story, keys=keys)


# --- the policy


def test_a_section_stands_for_a_wallet_of_each_user() -> None:
    found = policy()
    wallet = found.wallet("dep-bsc-1001")
    assert wallet is not None
    assert (wallet.chain, wallet.key, wallet.path, wallet.user) == ("bsc", "main", f"{EVM_PATH}/0/1001", 1001)
    assert found.wallet("hot-bsc") == found.wallets["hot-bsc"]
    assert found.own_addresses("bsc") == {HOT}


def section(name: str, chain: str = "bsc", key: str = "main", path: str = "m/44'/60'/9'") -> str:
    return f'\n[deposits.{name}]\nchain = "{chain}"\nkey = "{key}"\npath = "{path}"\n'


def wallet_table(name: str, path: str = "m/44'/60'/0'/0/7") -> str:
    address = evm_address(public_key(derive(bytearray(WORDS), path)))
    return f'\n[wallets.{name}]\nchain = "bsc"\naddress = "{address}"\nkey = "main"\npath = "{path}"\n'


def tron_test_net(path: str) -> str:
    chain = '\n[chains.shasta]\nkind = "tron"\nchain_id = 2\nfee_max = 1\ncancel_fee_max = 0\n'
    return chain + section("dep-shasta", "shasta", path=path)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (wallet_table("dep-bsc-17"), "wallets.dep-bsc-17: that could be a user's wallet of deposits.dep-bsc"),
        (wallet_table("dep-bsc-017"), "wallets.dep-bsc-017: that could be"),
        (wallet_table("dep-bsc-0"), "wallets.dep-bsc-0: that could be"),
        (wallet_table("dep-bsc"), "deposits.dep-bsc: there is a wallet of that name"),
        (section("dep-bsc-1"), "deposits.dep-bsc-1: that could be a user's wallet of deposits.dep-bsc"),
        (section("dep-bsc-007"), "deposits.dep-bsc-007: that could be"),
        (section("x" * 45), "a name of at most 44 characters"),
        (section("Dep"), "a name is expected"),
        (section("other", path="m/44'/60'/1"), "must be hardened"),
        (section("other", path="m/44'/60'/9'/0"), "must be hardened"),
        (section("other", path="44'/60'"), "no derivation path"),
        (section("other", path="m/44'/2147483648'"), "no derivation path"),
        (section("other", path="m" + "/1'" * 9), "more than 8 parts"),
        (section("other", path=""), "no derivation path"),
        (section("other", chain="doge"), "there is no chain 'doge'"),
        (section("other", path=EVM_PATH), "deposits.dep-bsc and deposits.other: their keys would be the same"),
        (section("other", path="m/044'/60'/01'"), "deposits.dep-bsc and deposits.other: their keys would be the same"),
        (section("other", path=EVM_PATH + "/0'"), "their keys would be the same"),
        (section("other", path="m/44'/60'"), "their keys would be the same"),
        (section("other", path="m/44'/60'/0'"), "wallets.hot-bsc: its key is one of deposits.other"),
        (wallet_table("seven", f"{EVM_PATH}/0/7"), "wallets.seven: its key is one of deposits.dep-bsc"),
        (wallet_table("seven", "m/44'/060'/1'/0/7"), "wallets.seven: its key is one of deposits.dep-bsc"),
        (wallet_table("seven", EVM_PATH), "wallets.seven: its key is one of deposits.dep-bsc"),
        (tron_test_net(TRON_PATH), "deposits.dep-tron and deposits.dep-shasta: their keys would be the same"),
        ('\n[deposits.other]\nchain = "bsc"\nkey = "main"\n', "deposits.other.path: it is missing"),
        (section("other") + 'address = "0x1"\n', "deposits.other.address: there is no such setting"),
        (mandate("g2", "eth", "ETH", "own_deposits = true"), "there is no asset ETH on eth"),
        (mandate("g2", "bsc", "BNB", "own_deposits = 1"), "own_deposits: true or false"),
        (
            asset("bsc", "CAKE", THIEF) + f'allow = ["{HOT}"]\n' + mandate("g2", "bsc", "CAKE", "own_deposits = true"),
            "mandates.g2: own_deposits: assets.bsc.CAKE.allow lets nothing go to users' addresses",
        ),
    ],
)
def test_a_policy_that_contradicts_itself_is_refused(more: str, said: str) -> None:
    with pytest.raises(PolicyRefused) as refused:
        policy(POLICY + more)
    assert said in refused.value.problems


def test_gas_needs_deposits_on_that_chain() -> None:
    with pytest.raises(PolicyRefused, match="there are no deposits on tron"):
        policy(POLICY.replace('[deposits.dep-tron]\nchain = "tron"', '[deposits.dep-tron]\nchain = "eth"'))


@pytest.mark.parametrize(
    "more",
    [
        section("dep-bsc-x"),
        section("dep-bsc_1", path="m/44'/60'/8'"),
        section("x" * 44),
        wallet_table("dep-bsc-17x"),
        tron_test_net("m/44'/195'/2'"),
    ],
)
def test_what_contradicts_nothing_is_taken(more: str) -> None:
    assert len(policy(POLICY + more).deposits) >= 3


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (section("other", key="raw"), "deposits.other: keys: 'raw' is a key: only a mnemonic"),
        (section("other", key="gone"), "deposits.other: keys: it has no key 'gone'"),
        (
            section("other", key="again", path=EVM_PATH),
            f"deposits.other: user 1 has the address {own('bsc', 1)} in deposits.dep-bsc, too",
        ),
        (
            tron_test_net(TRON_PATH).replace('key = "main"', 'key = "again"'),
            f"deposits.dep-shasta: user 1 has the address {own('tron', 1)} in deposits.dep-tron, too",
        ),
    ],
)
def test_a_signer_does_not_start_with_keys_that_are_not_right(tmp_path: Path, more: str, said: str) -> None:
    """The same words under two names, too: then one address would have the rules of two sections."""

    async def story(service: Service) -> None:
        raise AssertionError("it has started")

    with pytest.raises(PolicyRefused) as refused:
        play(tmp_path, story, text=POLICY + more)
    assert said in refused.value.problems


def test_one_path_gives_a_user_one_address_on_all_evm_chains() -> None:
    keys, found = keystore_keys(), policy()
    wallets = [found.wallet(f"dep-{chain}-1001") for chain in ("bsc", "eth")]
    assert {keys.address(wallet) for wallet in wallets if wallet is not None} == {own("bsc", 1001)}
    assert HOT != COLD


def test_a_user_without_a_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """BIP-32 leaves one place in 2^127 without a key."""
    keys, wallet = keystore_keys(), policy().wallet("dep-bsc-1001")
    assert wallet is not None
    monkeypatch.setattr("bursar.rails.derivation.hmac.digest", lambda *_: b"\xff" * 64)
    keys._extended[wallet.key, wallet.section_path] = EVM_KEY
    with pytest.raises(KeystoreRefused, match="no key at place"):
        keys.address(wallet)
