"""Kinds of documents: what a body of that kind looks like, and whether a change of it needs two people. Pure.

A kind is declared in code. Its body is a `msgspec.Struct` that refuses unknown fields, made of values that have one
JSON each: no floats, no sets, no dates. A declaration that breaks this fails on import. Defaults are written into the
stored body, so that a default that is changed in code changes no version.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from msgspec import inspect

from bursar.model.documents import (
    BODY_BYTES_MAX,
    Document,
    InvalidDocument,
    Proposal,
    UnreadableDocument,
    canonical_json,
    check_kind,
    check_plain,
)
from bursar.model.errors import BursarError

T = TypeVar("T", bound=msgspec.Struct)

# Types that have one JSON each, whatever the value.
_PLAIN = (inspect.StrType, inspect.IntType, inspect.BoolType, inspect.NoneType, inspect.LiteralType, inspect.EnumType)


class KindRefused(BursarError):
    """The declaration of a kind of document is wrong."""

    kind: str
    why: str
    code = "KIND_REFUSED"
    text = "kind {kind} can't be declared: {why}"


class Other(NamedTuple, Generic[T]):
    """Another document of the same kind, as it is now."""

    name: str
    body: T
    retired: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class DocumentKind(Generic[T]):
    """One kind of document.

    `two_people` is True where a change could move money, or a pure function of the old body (None: there is none) and
    the new one. `check` is a pure function of the same two that raises a refusal, or a ValueError with the reason.
    `check_named` is one of the document's name and the new body. What no two documents of the kind should share is
    `likeness`, a pure function of a body; `check_alike` is one of the new body and of all others with that likeness.
    Where a document is to fit one of another kind, `beside` says from its name which one, and `check_beside` is a pure
    function of its name, the new body and the body of that one. While there is none, nothing is checked.
    """

    name: str
    body: type[T]
    two_people: bool | Callable[[T | None, T], bool]
    check: Callable[[T | None, T], None] | None = None
    check_named: Callable[[str, T], None] | None = None
    likeness: Callable[[T], Hashable] | None = None
    check_alike: Callable[[T, Iterable[Other[T]]], None] | None = None
    beside: Callable[[str], tuple[DocumentKind[Any], str]] | None = None
    check_beside: Callable[[str, T, Any], None] | None = None

    def __post_init__(self) -> None:
        check_kind(self.name)
        if not isinstance(self.body, type) or not issubclass(self.body, msgspec.Struct):
            raise KindRefused(self.name, "its body is not a msgspec.Struct")
        if why := _unfit(inspect.type_info(self.body), set()):
            raise KindRefused(self.name, why)

    def write(self, name: str, given: T | dict[str, Any]) -> tuple[T, str]:
        """A body as its type and as canonical JSON; InvalidDocument if it does not fit."""
        try:
            plain = msgspec.to_builtins(given) if isinstance(given, msgspec.Struct) else given
            check_plain(plain)  # before it is converted: a float would pass for an integer
            body = msgspec.convert(plain, self.body)
            plain = msgspec.to_builtins(body)
            check_plain(plain)
        except (ValueError, TypeError, RecursionError) as error:  # also msgspec's
            raise InvalidDocument(self.name, name, str(error)) from error
        text = canonical_json(plain)
        if len(text.encode()) > BODY_BYTES_MAX:
            raise InvalidDocument(self.name, name, f"its body is larger than {BODY_BYTES_MAX} bytes")
        return body, text

    def read(self, document: Document | Proposal) -> T:
        """The body of a version as its type; UnreadableDocument if it does not fit what is declared today."""
        try:
            return msgspec.json.decode(document.body, type=self.body)
        except (ValueError, RecursionError) as error:
            raise UnreadableDocument(document.kind, document.name, document.version, str(error)) from error

    def judge(self, name: str, head: Document | None, body: T) -> bool:
        """Whether this change needs two people; raises what `check` refuses.

        Where `two_people` is a function, two are needed too if the old body can't be read, because then it can't be
        judged, and to bring back what was retired.
        """
        readable, old = True, None
        if head is not None:
            try:
                old = self.read(head)
            except UnreadableDocument:
                readable = False
        try:
            if self.check_named is not None:
                self.check_named(name, body)
            if self.check is not None:
                self.check(old, body)
        except ValueError as error:
            raise InvalidDocument(self.name, name, str(error)) from error
        if isinstance(self.two_people, bool):
            return self.two_people
        return not readable or (head is not None and head.retired) or self.two_people(old, body)

    def judge_alike(self, name: str, body: T, others: Iterable[Other[T]]) -> None:
        """Raises what `check_alike` refuses. `others` have the likeness of the body."""
        try:
            if self.check_alike is not None:
                self.check_alike(body, others)
        except ValueError as error:
            raise InvalidDocument(self.name, name, str(error)) from error

    def judge_beside(self, name: str, body: T, other: msgspec.Struct) -> None:
        """Raises what `check_beside` refuses. `other` is the body of the document that `beside` names."""
        try:
            if self.check_beside is not None:
                self.check_beside(name, body, other)
        except ValueError as error:
            raise InvalidDocument(self.name, name, str(error)) from error

    @property
    def retiring_needs_two(self) -> bool:
        """Whether it takes two people to retire a document: wherever any change does. A limit that is gone lets money
        move as a limit that was raised does."""
        return self.two_people is not False


def _unfit(info: inspect.Type, seen: set[type]) -> str:
    """Why a type can't be that of a body, or part of it; "" if it can."""
    if isinstance(info, inspect.StructType):
        config = info.cls.__struct_config__
        if not config.forbid_unknown_fields:
            return f"{info.cls.__name__} takes unknown fields; declare it with forbid_unknown_fields=True"
        if config.omit_defaults:
            return f"{info.cls.__name__} leaves defaults out; a default that is changed would change old versions"
        if info.cls in seen:
            return ""
        inner = [field.type for field in info.fields]
        seen.add(info.cls)
    elif isinstance(info, inspect.ListType | inspect.VarTupleType):
        inner = [info.item_type]
    elif isinstance(info, inspect.TupleType):
        inner = list(info.item_types)
    elif isinstance(info, inspect.UnionType):
        inner = list(info.types)
    elif isinstance(info, inspect.DictType) and isinstance(info.key_type, inspect.StrType):
        inner = [info.value_type]
    elif isinstance(info, _PLAIN):
        return ""
    else:
        return f"{type(info).__name__.removesuffix('Type')} has no exact JSON; use text"
    return next((why for one in inner if (why := _unfit(one, seen))), "")
