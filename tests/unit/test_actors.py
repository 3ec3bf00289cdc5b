"""Names of operators: one way to write each, and no person passes for two by a look-alike letter."""

from __future__ import annotations

import pytest

from bursar.model.actors import ACTOR_LENGTH_MAX, REASON_LENGTH_MAX, RESERVED, check_actor, check_reason, same_person
from bursar.model.errors import InvalidName

REFUSED = {
    "empty": "",
    "blank": " ",
    "trailing blank": "ann ",
    "leading blank": " ann",
    "inner blank": "an n",
    "tab": "ann\t",
    "newline": "ann\n",
    "trailing dot": "ann.",
    "leading dash": "-ann",
    "cyrillic a": "\u0430nn",
    "greek omicron": "b\u03bfb",
    "full-width": "\uff41nn",
    "zero-width space": "ann\u200b",
    "zero-width joiner": "a\u200dnn",
    "byte order mark": "\ufeffann",
    "right-to-left mark": "ann\u200f",
    "combining accent": "a\u0301nn",
    "soft hyphen": "an\u00adn",
    "no-break space": "ann\u00a0",
    "dotless i": "b\u0131ll",
    "kelvin sign": "\u212aate",
    "long s": "\u017fam",
    "superscript": "ann\u00b9",
    "arabic digit": "ann\u0661",
    "surrogate": "ann\ud800",
    "NUL": "ann\x00",
    "too long": "a" * (ACTOR_LENGTH_MAX + 1),
    "no text": 7,
}


@pytest.mark.parametrize("name", REFUSED.values(), ids=REFUSED.keys())
def test_a_name_that_could_look_like_another_is_refused(name: object) -> None:
    with pytest.raises(InvalidName) as refusal:
        check_actor(name)
    assert str(refusal.value).isascii()  # a message that shows letters that look alike


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_a_person_cannot_take_the_name_of_a_program(name: str) -> None:
    with pytest.raises(InvalidName):
        check_actor(name.upper())


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("ann", "ann"),
        ("Ann", "ann"),
        ("a", "a"),
        ("Ann.B-2@example.com", "ann.b-2@example.com"),
        ("auth0|5f7c8ec7", "auth0|5f7c8ec7"),
        ("x" * ACTOR_LENGTH_MAX, "x" * ACTOR_LENGTH_MAX),
    ],
)
def test_a_plain_name_is_kept_in_lower_case(name: str, kept: str) -> None:
    assert check_actor(name) == kept


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("ann", "Ann"),
        ("ann", "ann "),
        ("bill", "biIl"),
        ("bill", "bi11"),
        ("bob", "b0b"),
        ("ann-b", "ann_b"),
        ("ann.b", "annb"),
        ("tom", "torn"),
        ("wim", "vvim"),
        ("ann@example.com", "ann+ops@example.com"),
    ],
)
def test_names_that_look_alike_are_one_person(one: str, other: str) -> None:
    assert same_person(one, other)


@pytest.mark.parametrize(("one", "other"), [("ann", "anna"), ("ann", "bob"), ("op-2", "op-3"), ("a@x.com", "a@y.com")])
def test_different_names_are_two_people(one: str, other: str) -> None:
    assert not same_person(one, other)


@pytest.mark.parametrize("reason", ["x", "the bank said so", "weil März", "x" * REASON_LENGTH_MAX, "two\nlines"])
def test_a_reason_is_kept_as_it_is(reason: str) -> None:
    assert check_reason(reason) == reason


@pytest.mark.parametrize(
    "reason", ["", " ", "\n\t", "x" * (REASON_LENGTH_MAX + 1), "a\x00b", "a\x1fb", "a\ud800b"], ids=ascii
)
def test_a_reason_that_says_nothing_or_that_no_database_can_store_is_refused(reason: str) -> None:
    with pytest.raises(InvalidName, match=f"say why, in 1 to {REASON_LENGTH_MAX} characters"):
        check_reason(reason)


def test_the_refusal_of_a_name_shows_it_in_letters_that_can_be_told_apart() -> None:
    with pytest.raises(InvalidName) as refusal:
        check_actor("\u0430nn")
    assert refusal.value.value == "\\u0430nn"
    with pytest.raises(InvalidName) as refusal:
        check_actor(7)
    assert refusal.value.value == "int"
