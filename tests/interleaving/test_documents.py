"""Documents on PostgreSQL: every order of the steps of two or three people who change one at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from tests.interleaving.stage import Actor
from tests.interleaving.world import World, every_order

from bursar.documents import Document, DocumentKind, Documents, Proposal

Act = Callable[[Actor], Coroutine[Any, Any, Any]]
# The lock comes first in every transaction: what is read before it could be overtaken.
GATES = frozenset({"lock_documents", "document_head", "insert_document", "put_proposal", "drop_proposal"})


class Limit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    most: int


NOTES = DocumentKind(name="notes", body=Limit, two_people=False)
LIMITS = DocumentKind(name="limits", body=Limit, two_people=True)
Body = DocumentKind[Limit]


def documents(actor: Actor) -> Documents:
    return Documents(actor.ledger.store, [NOTES, LIMITS])


def putting(kind: Body, name: str, most: int, base: int, author: str) -> Act:
    def put(actor: Actor) -> Coroutine[Any, Any, Any]:
        return documents(actor).put(kind, name, Limit(most), base=base, author=author, reason="r")

    return put


def approving(name: str, made: Proposal, actor_name: str) -> Act:
    def approve(actor: Actor) -> Coroutine[Any, Any, Any]:
        return documents(actor).approve(LIMITS, name, made.hash, actor=actor_name, reason="seen")

    return approve


def kinds(outcomes: list[Any]) -> list[str]:
    return sorted(type(outcome).__name__ for outcome in outcomes)


async def proposed(world: World, name: str, most: int, base: int = 0) -> Proposal:
    made = await Documents(world.ledger.store, [NOTES, LIMITS]).put(
        LIMITS, name, Limit(most), base=base, author="ann", reason="r"
    )
    assert isinstance(made, Proposal)
    return made


async def versions(world: World, kind: Body, name: str) -> list[Document]:
    return await Documents(world.ledger.store, [NOTES, LIMITS]).history(kind, name)


def test_put_against_put(empty_postgres: str) -> None:
    """Two changes of one version: one is written, the other is refused because the version has moved."""

    async def prepare(world: World) -> list[Act]:
        name = f"d{world.stage.scenes}"
        return [putting(NOTES, name, 1, 0, "ann"), putting(NOTES, name, 2, 0, "bob")]

    async def check(world: World, outcomes: list[Any]) -> None:
        assert kinds(outcomes) == ["Document", "DocumentMoved"]
        [only] = await versions(world, NOTES, f"d{world.stage.scenes}")
        assert only in outcomes

    asyncio.run(every_order(empty_postgres, prepare, check, gates=GATES, at_least=4))


def test_puts_of_different_documents_have_different_numbers(empty_postgres: str) -> None:
    """Caches compare one number: it has no gaps, and no two versions share one."""

    async def prepare(world: World) -> list[Act]:
        n = world.stage.scenes
        return [putting(NOTES, f"x{n}", 1, 0, "ann"), putting(NOTES, f"y{n}", 1, 0, "bob")]

    async def check(world: World, outcomes: list[Any]) -> None:
        assert kinds(outcomes) == ["Document", "Document"]
        count, highest = await world.ledger.store.read.documents.count()
        assert count == highest == await world.ledger.store.read.documents.number()

    asyncio.run(every_order(empty_postgres, prepare, check, gates=GATES, at_least=4))


def test_approval_against_approval(empty_postgres: str) -> None:
    """Of two approvers one is written down, and one version is made."""

    async def prepare(world: World) -> list[Act]:
        name = f"d{world.stage.scenes}"
        made = await proposed(world, name, 1)
        return [approving(name, made, "bob"), approving(name, made, "carol")]

    async def check(world: World, outcomes: list[Any]) -> None:
        assert kinds(outcomes) == ["Document", "DocumentMoved"]
        [only] = await versions(world, LIMITS, f"d{world.stage.scenes}")
        assert only in outcomes

    asyncio.run(every_order(empty_postgres, prepare, check, gates=GATES, at_least=4))


def test_approval_against_withdrawal_and_another_proposal(empty_postgres: str) -> None:
    """What is approved is exactly what was proposed, or nothing: never what its author put in its place."""

    async def prepare(world: World) -> list[Act]:
        name = f"d{world.stage.scenes}"
        made = await proposed(world, name, 1)

        def withdrawing(actor: Actor) -> Coroutine[Any, Any, Any]:
            return documents(actor).withdraw(LIMITS, name, made.hash, actor="dave", reason="no")

        return [approving(name, made, "bob"), withdrawing, putting(LIMITS, name, 9, 0, "ann")]

    async def check(world: World, outcomes: list[Any]) -> None:
        approved, withdrawn, _ = outcomes
        found = await versions(world, LIMITS, f"d{world.stage.scenes}")
        assert [LIMITS.read(one).most for one in found] in ([], [1])
        assert isinstance(approved, Document) == bool(found)
        assert not (found and withdrawn is True)

    asyncio.run(every_order(empty_postgres, prepare, check, actors=3, gates=frozenset({"lock_documents"}), at_least=6))
