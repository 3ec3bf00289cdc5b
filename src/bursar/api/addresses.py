"""The address book over HTTP: where a user's withdrawals may go.

A user sees and changes the user's own book. Staff sees any; an operator may change one for a user, which is written
down under the operator's name.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from litestar import delete, get, post
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter
from msgspec import Meta

from bursar.api.answers import BODY, problems
from bursar.api.gate import allow
from bursar.api.tokens import ALL_ROLES
from bursar.api.transfers import Asked, In, Out, check_user
from bursar.api.withdrawals import WRITERS, User, count, user_and_actor, withdrawals_of
from bursar.flows.transfers.checks import USER_MAX
from bursar.flows.withdrawals.addresses import MACHINE, AddressView
from bursar.model.errors import UnknownRecord
from bursar.model.views import moment

TAGS = ["withdrawals"]
Whose = Annotated[
    int | None, QueryParameter(ge=1, le=USER_MAX, description="Whose; staff only. A user's own without it.")
]


class AddAddress(In, frozen=True):
    """An address that is to be in the book."""

    chain: Annotated[str, Meta(description="The name of its document.")]
    address: str
    label: Annotated[str, Meta(max_length=100, description="What its user calls it.")] = ""
    user_id: User | None = None


class AddressAnswer(Out, frozen=True):
    """An entry of an address book."""

    id: str
    user_id: int
    chain: str
    address: Annotated[str, Meta(description="As the chain writes it.")]
    label: str
    state: Annotated[str, Meta(description="`active`, or `removed`.")]
    added_at: Annotated[datetime, Meta(description="From when its cooling period counts.")]


@get(
    "/api/v1/withdrawal_addresses",
    opt=allow(*ALL_ROLES),
    summary="A user's address book",
    responses=problems(422),
    tags=TAGS,
)
async def list_addresses(
    request: Asked, chain: FromQuery[str | None] = None, user_id: Whose = None
) -> list[AddressAnswer]:
    """Newest first."""
    user = user_id if user_id is not None and request.user.is_staff else check_user(request, user_id)
    found = await withdrawals_of(request).addresses.list(str(user), chain or "")
    return [_answer(view) for view in found]


@post(
    "/api/v1/withdrawal_addresses",
    status_code=200,
    opt=allow(*WRITERS),
    summary="Put an address into the book",
    responses=problems(*BODY, 409, 422),
    tags=TAGS,
)
async def add_address(request: Asked, data: JSONBody[AddAddress]) -> AddressAnswer:
    """The same again is answered with the entry that is there. Its cooling period begins now."""
    book, (user, actor) = withdrawals_of(request).addresses, user_and_actor(request, data.user_id)
    count(request)
    added = await book.add(str(user), data.chain, data.address, data.label, actor=actor or str(user))
    return _answer(added)


@delete(
    "/api/v1/withdrawal_addresses/{address_id:str}",
    status_code=200,
    opt=allow(*WRITERS),
    summary="Take an address out of the book",
    responses=problems(404, 422),
    tags=TAGS,
)
async def remove_address(request: Asked, address_id: FromPath[str], user_id: Whose = None) -> AddressAnswer:
    """Added again later, it is new, and its cooling period begins again."""
    book, (user, actor) = withdrawals_of(request).addresses, user_and_actor(request, user_id)
    count(request)
    if not (address_id.isascii() and address_id.isprintable()):
        raise UnknownRecord(MACHINE.name, ascii(address_id)[1:-1][:40])
    return _answer(await book.remove(str(user), address_id, actor=actor or str(user)))


def _answer(view: AddressView) -> AddressAnswer:
    return AddressAnswer(
        id=view.id,
        user_id=int(view.user),
        chain=view.chain,
        address=view.address,
        label=view.label,
        state=view.state,
        added_at=moment(view.added_us),
    )
