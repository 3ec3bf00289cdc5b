"""Who calls: a signed token (JWT) that names a subject, its roles and when it ends.

The algorithm is the configured one and nothing else, whatever a token's header says, so neither `none` nor a public key
used as a secret is accepted. A user's number is the token's subject; a body can't claim another (T17). PyJWT checks
the signature and the times, by its own clock, when a token comes for the first time. A token that was valid is
remembered until it ends: the check is a tenth of the CPU of a transfer, and clients send a token with many requests.

    {"sub": "1001", "roles": ["user"], "exp": …}           a user
    {"sub": "anna", "roles": ["operator"], "exp": …}       a person behind the counter
"""

from __future__ import annotations

from enum import StrEnum
from hashlib import sha256
from typing import Any

import jwt
import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key

from bursar.api.problems import Problem
from bursar.config import HS256_KEY_BYTES_MIN, Config, ConfigRefused, secret
from bursar.flows.transfers import Code
from bursar.flows.transfers.checks import USER_MAX

TOKEN_LENGTH_MAX = 4_096
SUBJECT_LENGTH_MAX = 64
REMEMBERED_MAX = 10_000  # valid tokens


class Role(StrEnum):
    """What a caller may do."""

    USER = "user"  # move own money, see own things
    VIEWER = "viewer"  # see what all users have
    OPERATOR = "operator"  # and bring deposits in
    APPROVER = "approver"  # and confirm what another has asked for
    ADMIN = "admin"  # all that operators and approvers may


STAFF = (Role.VIEWER, Role.OPERATOR, Role.APPROVER, Role.ADMIN)
ALL_ROLES = (Role.USER, *STAFF)
ROLES = frozenset(role.value for role in Role)


class Identity(msgspec.Struct, frozen=True):
    """Who calls."""

    subject: str
    roles: frozenset[Role]

    def has(self, *roles: Role) -> bool:
        """Whether it is one of these."""
        return not self.roles.isdisjoint(roles)

    @property
    def is_staff(self) -> bool:
        """Whether it may see what is not its own."""
        return self.has(*STAFF)

    @property
    def user(self) -> int:
        """The user's number."""
        if not self.has(Role.USER):
            raise Problem(Code.FORBIDDEN, "this is for users; the token has no role `user`")
        return int(self.subject)


class ValidToken(msgspec.Struct, frozen=True):
    """A token whose signature was checked, and between which moments it is valid."""

    identity: Identity
    from_us: int
    until_us: int


class Keys:
    """Checks tokens."""

    def __init__(self, algorithm: str, key: Any, *, issuer: str = "", audience: str = "", leeway_s: int = 0) -> None:
        self.algorithm = algorithm
        self._key = key
        self._issuer = issuer or None
        self._audience = audience or None
        self._leeway_s = leeway_s
        self._valid: dict[bytes, ValidToken] = {}  # by digest: no token stays in memory. The oldest first

    @classmethod
    def of(cls, config: Config) -> Keys:
        """As configured; ConfigRefused if the key is none."""
        key: Any
        if config.jwt_algorithm == "HS256":
            key = secret(config.key_file, "jwt_key_file", HS256_KEY_BYTES_MIN)
            if key.lstrip().startswith((b"-----BEGIN", b"ssh-")):
                raise ConfigRefused("jwt_key_file: a PEM or SSH key is no secret for HS256; is EdDSA meant?")
        else:
            key = _public_key(config.key_file)
        return cls(
            config.jwt_algorithm,
            key,
            issuer=config.jwt_issuer,
            audience=config.jwt_audience,
            leeway_s=config.jwt_leeway_s,
        )

    def identify(self, header: str | None, now_us: int) -> Identity:
        """Whom an `Authorization` header names; a Problem if its token is not valid."""
        kind, _, token = (header or "").partition(" ")
        if kind.lower() != "bearer" or not token:
            raise Problem(Code.UNAUTHORIZED, "a token is needed: `Authorization: Bearer …`")
        if len(token) > TOKEN_LENGTH_MAX:
            raise Problem(Code.UNAUTHORIZED, "the token is too long")
        digest = sha256(token.encode()).digest()
        valid = self._valid.get(digest)
        if valid is None or not valid.from_us <= now_us < valid.until_us:
            valid = self._valid[digest] = self._check(token)
            if len(self._valid) > REMEMBERED_MAX:
                del self._valid[next(iter(self._valid))]
        return valid.identity

    def _check(self, token: str) -> ValidToken:
        try:
            claims = jwt.decode(
                token.strip(),
                self._key,
                algorithms=[self.algorithm],
                issuer=self._issuer,
                audience=self._audience,
                leeway=self._leeway_s,
                options={"require": ["exp", "sub"], "verify_aud": self._audience is not None},
            )
            begins_s = max(int(claims.get("iat", 0)), int(claims.get("nbf", 0))) - self._leeway_s
            ends_s = int(claims["exp"]) + self._leeway_s
        except jwt.ExpiredSignatureError:
            raise Problem(Code.UNAUTHORIZED, "the token has expired; get a new one") from None
        except (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError):
            # Which of the many ways it is wrong in helps only those who try.
            raise Problem(Code.UNAUTHORIZED, "the token is not valid") from None
        return ValidToken(_identity(claims), begins_s * 1_000_000, ends_s * 1_000_000)


def make_token(
    config: Config, subject: str, roles: list[str], *, now_s: int, seconds: int, private_key: bytes | None = None
) -> str:
    """A token for trying out. EdDSA needs the private key, which a server never has."""
    key: Any
    if config.jwt_algorithm == "HS256":
        key = secret(config.key_file, "jwt_key_file", HS256_KEY_BYTES_MIN)
    else:
        if private_key is None:
            raise ConfigRefused("with EdDSA tokens are made with the private key: --private-key FILE")
        key = load_pem_private_key(private_key, None)
        if not isinstance(key, Ed25519PrivateKey):
            raise ConfigRefused("--private-key: not an Ed25519 key")
    claims: dict[str, Any] = {"sub": subject, "roles": roles, "iat": now_s, "exp": now_s + seconds}
    claims |= {"iss": config.jwt_issuer} if config.jwt_issuer else {}
    claims |= {"aud": config.jwt_audience} if config.jwt_audience else {}
    _identity(claims)
    return jwt.encode(claims, key, algorithm=config.jwt_algorithm)


def _identity(claims: dict[str, Any]) -> Identity:
    subject, names = claims.get("sub"), claims.get("roles")
    if not isinstance(subject, str) or not 0 < len(subject) <= SUBJECT_LENGTH_MAX or not subject.isprintable():
        raise Problem(Code.UNAUTHORIZED, "the token's subject is not valid")
    if not isinstance(names, list) or not names or not all(isinstance(n, str) and n in ROLES for n in names):
        raise Problem(Code.UNAUTHORIZED, f"the token's roles are not of {', '.join(Role)}")
    found = Identity(subject, frozenset(Role(name) for name in names))
    if Role.USER in found.roles:
        plain = subject.isascii() and subject.isdigit() and subject == str(int(subject))
        if not plain or not 0 < int(subject) <= USER_MAX:
            raise Problem(Code.UNAUTHORIZED, "the token of a user must have the user's number as its subject")
    return found


def _public_key(file: str) -> Ed25519PublicKey:
    try:
        key = load_pem_public_key(secret(file, "jwt_key_file", 1, is_public=True))
    except ValueError:
        raise ConfigRefused(f"jwt_key_file: {file} is not a public key in PEM") from None
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigRefused(f"jwt_key_file: {file} is not an Ed25519 key")
    return key
