"""Who gets in: forged and expired tokens do not, whatever algorithm they claim, and roles open only their doors."""

from __future__ import annotations

import base64
import json
import time
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from tests.api.office import ALICE, BOB, HOUR_S, KEY, TRANSFERS, bearer, config_for, office, refusal, token
from tests.builders import scenario

from bursar.api.problems import Problem
from bursar.api.tokens import Keys
from bursar.config import ConfigRefused

NOW = int(time.time())
SECOND_US = 1_000_000


def part(value: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


def after(moment_s: int) -> type[datetime]:
    """PyJWT's clock, stopped at a moment."""

    class Stopped(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Stopped:
            return cls.fromtimestamp(moment_s, tz)

    return Stopped


def unsigned(algorithm: str, signature: str = "") -> str:
    claims = {"sub": str(ALICE), "roles": ["user"], "exp": NOW + HOUR_S}
    return f"{part({'alg': algorithm, 'typ': 'JWT'})}.{part(claims)}.{signature}"


def ed25519() -> tuple[bytes, bytes]:
    private = Ed25519PrivateKey.generate()
    public = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), public


def rsa_token() -> str:
    private = rsa.generate_private_key(public_exponent=65_537, key_size=2_048)
    return token(ALICE, key=private, algorithm="RS256")


FORGED = {
    "none": unsigned("none"),
    "None": unsigned("None"),
    "none with a signature": unsigned("nOnE", "eA"),
    "no signature": unsigned("HS256"),
    "another key": token(ALICE, key=b"x" * 48),
    "another algorithm of the family": token(ALICE, algorithm="HS512"),
    "RS256": rsa_token(),
    "EdDSA": token(ALICE, key=Ed25519PrivateKey.generate(), algorithm="EdDSA"),
    "expired": token(ALICE, exp=NOW - 1),
    "no exp": token(ALICE, exp=None),
    "exp is text": token(ALICE, exp="soon"),
    "not yet": token(ALICE, nbf=NOW + HOUR_S),
    "no subject": jwt.encode({"roles": ["user"], "exp": NOW + HOUR_S}, KEY, algorithm="HS256"),
    "a name as user": token("alice"),
    "user 0": token(0),
    "user -1": token(-1),
    "user 007": token("007"),
    "user 2^63": token(2**63),
    "full-width user": token("\uff11"),
    "no roles": token(ALICE, roles=None),
    "empty roles": token(ALICE, roles=[]),
    "unknown role": token(ALICE, "user", "root"),
    "roles as text": token(ALICE, roles="user"),
    "odd roles": token(ALICE, roles=[{"a": 1}, ["user"]]),
    "changed body": ".".join([*token(BOB).split(".")[:1], part({"sub": str(ALICE)}), token(BOB).split(".")[2]]),
    "garbage": "garbage",
    "dots": "...",
    "very long": "x" * 10_000,
}


@scenario
async def test_forged_tokens_open_nothing(url: str, tmp_path: Path) -> None:
    async with office(url, tmp_path) as here:
        await here.fund(ALICE, "100")
        before = here.written()
        body = {"from": "FUNDING", "to": "SPOT", "asset": "USDT", "amount": "1"}
        let_in = []
        for name, forged in FORGED.items():
            answer = await here.send("POST", TRANSFERS, body, by=forged)
            if refusal(answer) != (401, "UNAUTHORIZED") or answer.headers["www-authenticate"] != "Bearer":
                let_in.append((name, answer.text))
        assert not let_in
        for header in ("", "Bearer", "Bearer ", "Basic YTpi", f"Token {token(ALICE)}"):
            answer = await here.send("POST", TRANSFERS, body, headers={"Authorization": header})
            assert refusal(answer) == (401, "UNAUTHORIZED"), header
        assert refusal(await here.send("POST", TRANSFERS, body)) == (401, "UNAUTHORIZED")
        assert here.written() == before
        assert (await here.send("POST", TRANSFERS, body, by=token(ALICE))).status_code == 200


@scenario
async def test_roles_open_only_their_doors(url: str, tmp_path: Path) -> None:
    async with office(url, tmp_path, deposit_confirm_above={"USDT": 1}) as here:
        wish = {"from": "FUNDING", "to": "SPOT", "asset": "USDT", "amount": "1"}
        paid = {"user_id": ALICE, "asset": "USDT", "amount": "1", "reference": "r"}
        said = {"user_id": ALICE, "asset": "USDT", "amount": "1"}
        doors: dict[str, tuple[str, str, Any, set[str]]] = {
            "transfer": ("POST", TRANSFERS, wish, {"user"}),
            "transfer of 001": ("POST", "/api/v1/transfer", wish, {"user"}),
            "deposit": ("POST", "/api/v1/deposits", paid, {"operator", "admin"}),
            "confirm": ("POST", "/api/v1/deposits/r/confirm", said, {"approver", "admin"}),
            "reject": ("POST", "/api/v1/deposits/x/reject", {}, {"approver", "admin"}),
            "waiting": ("GET", "/api/v1/deposits", None, {"viewer", "operator", "approver", "admin"}),
            "assets": ("GET", "/api/v1/assets", None, {"user", "viewer", "operator", "approver", "admin"}),
        }
        for name, (method, path, body, roles) in doors.items():
            for role in ("user", "viewer", "operator", "approver", "admin"):
                by = token(ALICE if role == "user" else f"the-{role}", role)
                answer = await here.send(method, path, body, by=by)
                is_shut = answer.status_code == 403
                assert is_shut is (role not in roles), (name, role, answer.text)
                if is_shut:
                    assert refusal(answer) == (403, "FORBIDDEN")


@scenario
async def test_reading_is_only_for_the_owner_and_for_staff(url: str, tmp_path: Path) -> None:
    async with office(url, tmp_path) as here:
        await here.fund(ALICE, "100")
        made = (await here.transfer(ALICE, "FUNDING", "SPOT", "1")).json()
        for base in (TRANSFERS, "/api/v1/transfer"):
            path = f"{base}/{made['req_id']}"
            assert (await here.get(path, by=token(ALICE))).status_code == 200
            assert (await here.get(path, by=token("vera", "viewer"))).status_code == 200
            assert refusal(await here.get(path, by=token(BOB))) == (404, "TRANSFER_NOT_FOUND")
            for odd in ("sr-1", "sr-", "1", "sr-1%00", "%2e%2e", "sr-" + "9" * 30, "sr-%EF%BC%91"):
                assert refusal(await here.get(f"{base}/{odd}", by=token(ALICE)))[0] == 404, odd
        assert (await here.get(TRANSFERS, by=token(BOB))).json()["transfers"] == []
        assert len((await here.get(TRANSFERS, by=token("vera", "viewer"))).json()["transfers"]) == 1
        for path in (f"{TRANSFERS}?user_id={ALICE}", f"/api/v1/balances?user_id={ALICE}"):
            assert refusal(await here.get(path, by=token(BOB))) == (403, "FORBIDDEN")
            assert (await here.get(path, by=token("vera", "viewer"))).status_code == 200
        assert refusal(await here.get("/api/v1/balances", by=token("vera", "viewer"))) == (403, "FORBIDDEN")


@scenario
async def test_ed25519(url: str, tmp_path: Path) -> None:
    """Public key only at the server; the public key used as an HS256 secret (algorithm confusion) opens nothing."""
    private, public = ed25519()
    (tmp_path / "public.pem").write_bytes(public)
    settings: dict[str, Any] = {"jwt_algorithm": "EdDSA", "jwt_key_file": str(tmp_path / "public.pem")}
    async with office(url, tmp_path, **settings) as here:
        good = jwt.encode({"sub": str(ALICE), "roles": ["user"], "exp": NOW + HOUR_S}, private, algorithm="EdDSA")
        assert (await here.get("/api/v1/assets", by=good)).status_code == 200
        head, body = part({"alg": "HS256", "typ": "JWT"}), good.split(".")[1]
        signed = jwt.algorithms.HMACAlgorithm(jwt.algorithms.HMACAlgorithm.SHA256).sign(
            f"{head}.{body}".encode(), public
        )
        confused = f"{head}.{body}.{base64.urlsafe_b64encode(signed).decode().rstrip('=')}"
        for forged in (confused, token(ALICE), unsigned("none")):
            assert refusal(await here.get("/api/v1/assets", by=forged)) == (401, "UNAUTHORIZED")


@pytest.mark.parametrize(
    ("content", "algorithm"),
    [
        (b"short", "HS256"),
        (b"k" * 31, "HS256"),
        (ed25519()[1], "HS256"),
        (b"k" * 48, "EdDSA"),
        (ed25519()[0], "EdDSA"),
    ],
)
def test_a_key_that_is_none_is_refused_at_start(tmp_path: Path, content: bytes, algorithm: str) -> None:
    config = config_for("sqlite:///x.db", tmp_path, jwt_algorithm=algorithm)
    Path(config.jwt_key_file).write_bytes(content)
    with pytest.raises(ConfigRefused):
        Keys.of(config)


def test_issuer_and_audience_are_held(tmp_path: Path) -> None:
    keys = Keys("HS256", KEY, issuer="us", audience="them")
    assert keys.identify(f"Bearer {token(ALICE, iss='us', aud='them')}", NOW * SECOND_US).user == ALICE
    for claims in ({}, {"iss": "us"}, {"aud": "them"}, {"iss": "them", "aud": "us"}):
        with pytest.raises(Problem):
            keys.identify(bearer(token(ALICE, **claims))["Authorization"], NOW * SECOND_US)


def test_a_token_is_refused_when_it_has_ended_though_it_was_valid_before(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, header = Keys("HS256", KEY), f"Bearer {token(ALICE, exp=NOW + HOUR_S)}"
    assert keys.identify(header, NOW * SECOND_US).user == ALICE
    monkeypatch.setattr("jwt.api_jwt.datetime", after(NOW + HOUR_S))
    assert keys.identify(header, (NOW + HOUR_S) * SECOND_US - 1).user == ALICE
    with pytest.raises(Problem, match="expired"):
        keys.identify(header, (NOW + HOUR_S) * SECOND_US)


def test_a_token_is_refused_before_it_begins_though_it_was_valid_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock was set back."""
    keys, header = Keys("HS256", KEY), f"Bearer {token(ALICE, nbf=NOW - 10)}"
    assert keys.identify(header, NOW * SECOND_US).user == ALICE
    monkeypatch.setattr("jwt.api_jwt.datetime", after(NOW - 20))
    with pytest.raises(Problem):
        keys.identify(header, (NOW - 20) * SECOND_US)


def test_a_forged_token_is_refused_after_the_genuine_one_was_accepted() -> None:
    keys, genuine = Keys("HS256", KEY), token(ALICE)
    assert keys.identify(f"Bearer {genuine}", NOW * SECOND_US).user == ALICE
    head, _, signature = genuine.split(".")
    forged = f"{head}.{part({'sub': str(BOB), 'roles': ['user'], 'exp': NOW + HOUR_S})}.{signature}"
    for _ in range(2):
        with pytest.raises(Problem):
            keys.identify(f"Bearer {forged}", NOW * SECOND_US)


def test_a_valid_token_is_checked_once_and_only_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    decode = jwt.decode

    def counting(text: str, *args: Any, **options: Any) -> Any:
        checked.append(text)
        return decode(text, *args, **options)

    monkeypatch.setattr(jwt, "decode", counting)
    monkeypatch.setattr("bursar.api.tokens.REMEMBERED_MAX", 2)
    keys, tokens = Keys("HS256", KEY), [token(user) for user in (ALICE, BOB, BOB + 1)]
    for text in (tokens[0], tokens[0], tokens[1], tokens[0], tokens[2], tokens[2]):
        keys.identify(f"Bearer {text}", NOW * SECOND_US)
    assert checked == tokens
    keys.identify(f"Bearer {tokens[0]}", NOW * SECOND_US)
    assert checked == [*tokens, tokens[0]]
