"""Documents: the bytes that are hashed, what a body may contain, and how a kind is declared."""

from __future__ import annotations

from datetime import datetime
from enum import Enum
from typing import Any

import msgspec
import pytest

from bursar.model.document_kinds import DocumentKind, KindRefused
from bursar.model.documents import (
    BODY_BYTES_MAX,
    DEPTH_MAX,
    INTEGER_MAX,
    NO_LINK,
    Document,
    InvalidDocument,
    Proposal,
    UnknownDocument,
    UnreadableDocument,
    canonical_bytes,
    canonical_json,
    check_kind,
    check_name,
    check_plain,
    draft,
    flaws,
    hash_of,
    repeats,
)
from bursar.model.errors import InvalidName, Refusal


class Inner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    asset: str
    minor: int = 0


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    limit: int
    note: str = ""
    inner: tuple[Inner, ...] = ()


POLICY = DocumentKind(name="policy", body=Policy, two_people=lambda old, new: old is None or new.limit > old.limit)


def stored(made: Proposal, **changes: Any) -> Document:
    """The version that a proposal becomes."""
    row: dict[str, Any] = {name: getattr(made, name) for name in made.__struct_fields__ if name != "base"}
    row |= {"number": made.version, "version": made.version, "approved_by": "bob", "approved_reason": "seen"}
    return Document(**row | {"at_us": 1_700_000_000_000_001} | changes)


def made(head: Document | None = None, body: str = '{"limit":7}', **changes: Any) -> Proposal:
    given: dict[str, Any] = {"kind": "policy", "name": "daily", "retired": False, "author": "ann", "reason": "ticket 1"}
    return draft(head, body=body, **given | changes)


# --- the bytes -------------------------------------------------------------------------------------------------------


def test_golden_vectors_of_bytes_hash_and_link() -> None:
    """Given these versions, then these bytes and hashes, for ever: stored hashes and citations rest on them."""
    first = made()
    assert canonical_bytes(first) == b'bursar document 1\n["policy","daily",1,"",false]\n{"limit":7}'
    assert first.hash.hex() == "2df0859ef3d50cdda1cfbd087ab11a5912b1431572823560cd604abf52c439b2"
    version = stored(first)
    assert version.link.hex() == "296b648740337b3b278e11421decdd013a85b5867fd8d021acc875cce117e284"
    second = made(version, body='{"limit":7,"note":"é \\" \\n \U0001f600"}', retired=True)
    assert canonical_bytes(second) == (
        b'bursar document 1\n["policy","daily",2,'
        b'"296b648740337b3b278e11421decdd013a85b5867fd8d021acc875cce117e284",true]\n'
        b'{"limit":7,"note":"\xc3\xa9 \\" \\n \xf0\x9f\x98\x80"}'
    )
    assert second.hash.hex() == "3c6a92ab179cefc106fb2cbdee4b9838f7df78f2883496117f799f27ce3e2c88"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"b": 1, "a": [True, None, "x"]}, '{"a":[true,null,"x"],"b":1}'),
        ({"é": 1, "z": 2, "\U0001f600": 3, "\uffee": 4}, '{"z":2,"é":1,"\uffee":4,"\U0001f600":3}'),
        ('\x00\x1f\t\n\x7f/\\"\u2028', '"\\u0000\\u001f\\t\\n\x7f/\\\\\\"\u2028"'),
        (-INTEGER_MAX, "-9007199254740991"),
        ({}, "{}"),
    ],
)
def test_golden_vectors_of_canonical_json(value: object, text: str) -> None:
    check_plain(value)
    assert canonical_json(value) == text


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "chain"},
        {"name": "weekly"},
        {"retired": True},
        {"body": '{"limit":8}'},
        {"base": 1},
        {"previous": b"x"},
    ],
)
def test_the_hash_covers_everything_that_a_version_says(change: dict[str, Any]) -> None:
    assert hash_of(msgspec.structs.replace(made(), **change)) != made().hash


@pytest.mark.parametrize("change", [{"author": "eve"}, {"reason": "other"}])
def test_who_proposes_and_why_is_not_in_its_own_hash_but_in_the_next_one(change: dict[str, Any]) -> None:
    first, other = made(), msgspec.structs.replace(made(), **change)
    assert hash_of(first) == hash_of(other)
    assert made(stored(first)).hash != made(stored(other)).hash


@pytest.mark.parametrize(
    "change", [{"hash": bytes(32)}, {"approved_by": "eve"}, {"approved_reason": "other"}, {"at_us": 5}]
)
def test_the_next_hash_covers_the_whole_version_before(change: dict[str, Any]) -> None:
    assert made(stored(made(), **change)).hash != made(stored(made())).hash


def test_a_draft_follows_the_current_version() -> None:
    first = stored(made())
    after = made(first)
    assert (made().base, made().version, made().previous) == (0, 1, NO_LINK)
    assert (after.base, after.version, after.previous) == (1, 2, first.link)
    assert first.citation.hash == first.hash
    assert (first.citation.kind, first.citation.name, first.citation.version) == ("policy", "daily", 1)


def test_a_version_repeats_what_its_author_puts_again_and_nothing_else() -> None:
    document = stored(made())
    assert repeats(document, body='{"limit":7}', retired=False, author="ann")
    assert not repeats(document, body='{"limit":8}', retired=False, author="ann")
    assert not repeats(document, body='{"limit":7}', retired=True, author="ann")
    assert not repeats(document, body='{"limit":7}', retired=False, author="bob")


def test_a_sound_history_has_no_flaws() -> None:
    first = stored(made())
    assert flaws(first, None) == []
    assert flaws(stored(made(first)), first) == []
    assert flaws(stored(made(first), approved_by="", approved_reason=""), first) == []


@pytest.mark.parametrize(
    ("document", "before", "says"),
    [
        (stored(made(), body="{}"), None, ["hashes to"]),
        (stored(made(), hash=bytes(32)), None, ["hashes to"]),
        (stored(made(), approved_by="a.nn"), None, ["approved by its author"]),
        (stored(made(stored(made()))), None, ["follows version 0: versions between are missing"]),
        (stored(made()), stored(made()), ["versions between are missing"]),
        (stored(made(stored(made()))), stored(made(), author="eve"), ["does not follow"]),
        (stored(made(), previous=b"x"), None, ["does not follow", "hashes to"]),
    ],
)
def test_flaws_are_found_and_named(document: Document, before: Document | None, says: list[str]) -> None:
    found = flaws(document, before)
    assert len(found) == len(says)
    assert all(word in flaw for word, flaw in zip(says, found, strict=True)), found


# --- names and bodies ------------------------------------------------------------------------------------------------


def test_names() -> None:
    for name in ("a", "0x1", "eth:mainnet", "hot-1.main_2", "a" * 128):
        assert check_name(name) == name
    for wrong in ("", "A", "-a", "a-", "a b", "a/b", "ä", "a" * 129, "a\n", 7, None):
        with pytest.raises(InvalidName):
            check_name(wrong)
    assert check_kind("risk_policy2") == "risk_policy2"
    for wrong in ("", "Risk", "2x", "a-b", "a" * 33):
        with pytest.raises(InvalidName):
            check_kind(wrong)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def nested_keys(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"a": 1.0}, "body.a is a float"),
        ({"a": [0, float("nan")]}, r"body.a\[1\] is a float"),
        ({"a": INTEGER_MAX + 1}, "beyond 2"),
        ({"a": -INTEGER_MAX - 1}, "beyond 2"),
        ({"a": "e\u0301"}, "NFC"),
        ({"e\u0301": 1}, "a key of body is not in"),
        ({"a": "\ud800"}, "surrogate"),
        ({"a": "\udfff"}, "surrogate"),
        ({1: 1}, "key that is not text"),
        ({"a": b"x"}, "is bytes"),
        ({"a": datetime(2020, 1, 1)}, "is datetime"),  # noqa: DTZ001 (any will do)
        (nested(DEPTH_MAX + 1), "nested deeper"),
        (nested_keys(DEPTH_MAX + 1), "nested deeper"),
    ],
)
def test_what_can_not_be_represented_exactly_is_refused(value: object, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_plain(value)
    check_plain(nested(DEPTH_MAX))
    check_plain(nested_keys(DEPTH_MAX))


def test_a_malformed_name_is_quoted_as_it_can_be_printed() -> None:
    for check in (check_kind, check_name):
        with pytest.raises(InvalidName) as caught:
            check("B\u00e4")
        assert caught.value.value == "B\\xe4"


def test_a_body_is_stored_with_its_defaults_and_read_again() -> None:
    body, text = POLICY.write("daily", {"limit": 7, "inner": [{"asset": "USDT"}]})
    assert body == Policy(limit=7, inner=(Inner("USDT"),))
    assert text == '{"inner":[{"asset":"USDT","minor":0}],"limit":7,"note":""}'
    assert POLICY.write("daily", body) == (body, text)
    assert POLICY.read(made(body=text)) == body


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"limit": 7, "more": 1}, "unknown field `more`"),
        ({"limit": 7, "inner": [{"asset": "USDT", "more": 1}]}, "unknown field `more`"),
        ({}, "missing required field `limit`"),
        ({"limit": "7"}, "Expected `int`"),
        ({"limit": 7.0}, "float"),
        ({"limit": True}, "Expected `int`"),
        ([], "Expected `object`"),
        (Policy(limit="7"), "Expected `int`"),  # type: ignore[arg-type]
        (Policy(limit=2**60), "beyond 2"),
        ({"limit": 1, "note": "x" * BODY_BYTES_MAX}, "larger than"),
    ],
)
def test_a_body_that_does_not_fit_its_kind_is_refused(body: Any, why: str) -> None:
    with pytest.raises(InvalidDocument, match=why) as caught:
        POLICY.write("daily", body)
    assert (caught.value.kind, caught.value.name) == ("policy", "daily")


def test_the_largest_body_is_accepted() -> None:
    frame = len(canonical_json({"limit": 1, "note": "", "inner": []}))
    POLICY.write("daily", {"limit": 1, "note": "x" * (BODY_BYTES_MAX - frame)})
    with pytest.raises(InvalidDocument, match="larger than"):
        POLICY.write("daily", {"limit": 1, "note": "x" * (BODY_BYTES_MAX - frame + 1)})


@pytest.mark.parametrize("body", ['{"limit":7,"gone":1}', "[]", "{"])
def test_a_stored_body_that_no_longer_fits_says_so(body: str) -> None:
    with pytest.raises(UnreadableDocument, match="policy daily version 1 does not fit this program"):
        POLICY.read(stored(made(body=body)))


def test_a_document_that_is_not_there_is_named() -> None:
    assert str(UnknownDocument("policy", "daily", 3)) == "policy daily has no version 3"
    assert str(UnknownDocument("policy", "daily", 0)) == "there is no policy daily"


# --- kinds -----------------------------------------------------------------------------------------------------------


class Loose(msgspec.Struct):
    limit: int


class Short(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    limit: int = 0


class Color(Enum):
    RED = "red"


class Tree(msgspec.Struct, forbid_unknown_fields=True):
    names: dict[str, Color]
    pair: tuple[int, str]
    branches: list[Tree] | None


def body_of(type_: Any) -> Any:
    return msgspec.defstruct("Body", [("field", type_)], forbid_unknown_fields=True)


def test_a_kind_may_have_a_body_of_exact_values() -> None:
    kind = DocumentKind(name="tree", body=Tree, two_people=False)
    body = {"names": {"a": "red"}, "pair": [1, "x"], "branches": [{"names": {}, "pair": [2, "y"], "branches": None}]}
    assert kind.read(made(body=kind.write("t", body)[1])) == kind.write("t", body)[0]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (Loose, "takes unknown fields"),
        (body_of(list[Loose]), "takes unknown fields"),
        (body_of(dict[str, Loose] | None), "takes unknown fields"),
        (body_of(tuple[int, Loose]), "takes unknown fields"),
        (Short, "leaves defaults out"),
        (body_of(float), "no exact JSON"),
        (body_of(int | float), "no exact JSON"),
        (body_of(set[int]), "no exact JSON"),
        (body_of(datetime), "no exact JSON"),
        (body_of(Any), "no exact JSON"),
        (body_of(dict[int, int]), "no exact JSON"),
        (dict, "not a msgspec.Struct"),
    ],
)
def test_a_kind_whose_bodies_are_not_exact_can_not_be_declared(body: Any, why: str) -> None:
    with pytest.raises(KindRefused, match=why):
        DocumentKind(name="policy", body=body, two_people=True)


def test_a_kind_needs_a_name() -> None:
    with pytest.raises(InvalidName):
        DocumentKind(name="Policy", body=Policy, two_people=True)


def test_whether_a_change_needs_two_people_is_the_kinds_to_say() -> None:
    head = stored(made(body=POLICY.write("daily", Policy(limit=7))[1]))
    assert POLICY.judge("daily", None, Policy(limit=7)) is True
    assert POLICY.judge("daily", head, Policy(limit=8)) is True
    assert POLICY.judge("daily", head, Policy(limit=6)) is False
    for always in (True, False):
        kind = DocumentKind(name="policy", body=Policy, two_people=always)
        assert kind.judge("daily", head, Policy(limit=6)) is always
        assert kind.retiring_needs_two is always
    assert POLICY.retiring_needs_two is True


def test_what_can_not_be_compared_with_its_old_body_needs_two_people() -> None:
    retired = stored(made(body=POLICY.write("daily", Policy(limit=7))[1], retired=True))
    unreadable = stored(made(body='{"gone":1}'))
    assert POLICY.judge("daily", retired, Policy(limit=6)) is True
    assert POLICY.judge("daily", unreadable, Policy(limit=6)) is True
    alone = DocumentKind(name="policy", body=Policy, two_people=False)
    assert alone.judge("daily", retired, Policy(limit=6)) is False
    assert alone.judge("daily", unreadable, Policy(limit=6)) is False


def test_a_check_refuses_with_its_own_words() -> None:
    def check(old: Policy | None, new: Policy) -> None:
        if new.limit < 0:
            raise ValueError("a limit is not negative")
        if old is not None and old.note != new.note:
            raise InvalidName("note", new.note, "it never changes")

    kind = DocumentKind(name="policy", body=Policy, two_people=False, check=check)
    head = stored(made(body=kind.write("daily", Policy(limit=7))[1]))
    kind.judge("daily", head, Policy(limit=8))
    with pytest.raises(InvalidDocument, match="policy daily is refused: a limit is not negative"):
        kind.judge("daily", head, Policy(limit=-1))
    with pytest.raises(Refusal, match="it never changes"):
        kind.judge("daily", head, Policy(limit=8, note="x"))
