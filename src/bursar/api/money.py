"""What users have, which assets there are, and deposits from outside over HTTP."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Annotated

from litestar import Response, get, post
from litestar.params import FromPath, JSONBody, QueryParameter
from msgspec import Meta

from bursar.api.answers import BODY, also, problems
from bursar.api.gate import allow
from bursar.api.tokens import ALL_ROLES, STAFF, Role
from bursar.api.transfers import AmountText, Asked, In, Out, answered, check_user, runtime_of
from bursar.flows.transfers import MACHINE, AccountType
from bursar.flows.transfers.checks import USER_MAX
from bursar.flows.transfers.rails import STATUSES
from bursar.flows.transfers.request import funding_account
from bursar.model.errors import UnknownAccount
from bursar.model.money import Asset, format_minor
from bursar.model.outcome import Outcome
from bursar.rails.trading import TradingClient
from bursar.runtime import Runtime

IN_FLIGHT_MAX = 1_000  # transfers of one user on their way that are looked at
Sums = dict[str, int]  # asset → smallest units
UserNumber = Annotated[int, Meta(ge=1, le=USER_MAX, description="A user's number.")]


class AssetAnswer(Out, frozen=True):
    """An asset, and what bounds its transfers."""

    asset: str
    precision: int
    status: str
    internal_transfer_enabled: bool
    min_transfer: str
    max_transfer: str


class AssetBalance(Out, frozen=True):
    """One asset in one account."""

    asset: str
    available: str
    frozen: Annotated[str, Meta(description="Held for withdrawals or orders.")]
    in_flight: Annotated[str, Meta(description="Has left this account by a transfer that has not ended yet.")]


class AccountBalances(Out, frozen=True):
    """One account."""

    account: str
    status: Annotated[str, Meta(description="ACTIVE, FROZEN or DISABLED; UNAVAILABLE if it can't be asked just now.")]
    balances: list[AssetBalance]


class BalancesAnswer(Out, frozen=True):
    """All that a user has."""

    user_id: int
    accounts: list[AccountBalances]


class ConfirmDeposit(In, frozen=True):
    """What is to be booked, said again by the second person."""

    user_id: UserNumber
    asset: str
    amount: AmountText


class CreateDeposit(ConfirmDeposit, frozen=True):
    """Money that has arrived from outside."""

    reference: Annotated[
        str, Meta(description="What its sender calls it: unique, letters, digits and `._:-`, at most 100.")
    ]


class DepositAnswer(Out, frozen=True):
    """How a deposit stands."""

    reference: str
    user_id: int
    asset: str
    amount: str
    state: Annotated[str, Meta(description="BOOKED; ASKED while it waits for a second person; REJECTED.")]
    asked_by: Annotated[str, Meta(description="Who asked for it first.")]
    account: Annotated[
        str,
        Meta(
            description="Where it is booked: `suspense:deposits` if the user's account is closed. Empty if it is not."
        ),
    ]


@get(
    "/api/v1/assets",
    opt=allow(*ALL_ROLES),
    summary="All assets, with what bounds their transfers",
    responses=problems(),
    tags=["money"],
)
async def list_assets(request: Asked) -> list[AssetAnswer]:
    """In alphabetical order."""
    assets = await runtime_of(request).bursar.ledger.assets()
    return [
        AssetAnswer(
            asset=code,
            precision=asset.precision,
            status=asset.status.name,
            internal_transfer_enabled=asset.internal_transfer_enabled,
            min_transfer=format_minor(asset.min_transfer, asset.precision),
            max_transfer=format_minor(asset.max_transfer, asset.precision),
        )
        for code, asset in sorted(assets.items())
    ]


@get(
    "/api/v1/balances",
    opt=allow(*ALL_ROLES),
    summary="What a user has, per account",
    responses=problems(),
    tags=["money"],
)
async def show_balances(
    request: Asked,
    user_id: Annotated[int | None, QueryParameter(ge=1, le=USER_MAX, description="Whose; staff only.")] = None,
) -> BalancesAnswer:
    """Available, frozen (held, or locked by orders), and on the way out. Accounts never used are left out."""
    user = user_id if user_id is not None and request.user.is_staff else check_user(request, user_id)
    runtime = runtime_of(request)
    assets = await runtime.bursar.ledger.assets()
    flying = await _in_flight(runtime, user)
    found = await asyncio.gather(
        _funding(runtime, user, assets, flying[AccountType.FUNDING]),
        *[_core(kind, client, user, assets, flying[kind]) for kind, client in runtime.cores.items()],
    )
    return BalancesAnswer(user_id=user, accounts=[account for account in found if account is not None])


@post(
    "/api/v1/deposits",
    status_code=200,
    opt=allow(Role.OPERATOR, Role.ADMIN),
    summary="Book money that has arrived from outside",
    responses=also(202, DepositAnswer, "Large: it waits for a second person.") | problems(*BODY, 409, 422),
    tags=["deposits"],
)
async def create_deposit(request: Asked, data: JSONBody[CreateDeposit]) -> Response[DepositAnswer]:
    """Once per reference. The first deposit of a user makes the funding account."""
    deposits, actor = runtime_of(request).deposits, request.user.subject
    view = await deposits.ask(data.user_id, data.asset, data.amount, reference=data.reference, actor=actor)
    return Response(answered(view, DepositAnswer), status_code=202 if view.state == "ASKED" else 200)


@post(
    "/api/v1/deposits/{reference:str}/confirm",
    status_code=200,
    opt=allow(Role.APPROVER, Role.ADMIN),
    summary="Confirm a deposit that another person has asked for",
    responses=problems(*BODY, 404, 409, 422),
    tags=["deposits"],
)
async def confirm_deposit(request: Asked, reference: FromPath[str], data: JSONBody[ConfirmDeposit]) -> DepositAnswer:
    """Says again what is to be booked, so that no approver confirms it unseen."""
    deposits, actor = runtime_of(request).deposits, request.user.subject
    view = await deposits.confirm(data.user_id, data.asset, data.amount, reference=reference, actor=actor)
    return answered(view, DepositAnswer)


@post(
    "/api/v1/deposits/{reference:str}/reject",
    status_code=200,
    opt=allow(Role.APPROVER, Role.ADMIN),
    summary="Reject a deposit that waits",
    responses=problems(*BODY, 404, 409),
    tags=["deposits"],
)
async def reject_deposit(request: Asked, reference: FromPath[str]) -> DepositAnswer:
    """It is not booked."""
    view = await runtime_of(request).deposits.reject(reference, actor=request.user.subject)
    return answered(view, DepositAnswer)


@get(
    "/api/v1/deposits",
    opt=allow(*STAFF),
    summary="Deposits that wait for a second person",
    responses=problems(),
    tags=["deposits"],
)
async def list_deposits(request: Asked) -> list[DepositAnswer]:
    """Newest first."""
    return [answered(view, DepositAnswer) for view in await runtime_of(request).deposits.waiting()]


async def _in_flight(runtime: Runtime, user: int) -> dict[AccountType, Sums]:
    """What has left each account and has not ended, by the states of the user's transfers."""
    found: dict[AccountType, Sums] = defaultdict(lambda: defaultdict(int))
    transfers = runtime.transfers
    flying = tuple(state.name for state in MACHINE.states if state.in_flight)
    records = runtime.bursar.store.read.records
    for record in await records.list(transfers.flow.name, owner=str(user), states=flying, limit=IN_FLIGHT_MAX):
        body = transfers.flow.item(record).body
        found[body.source][body.asset] += body.minor
    return found


async def _funding(runtime: Runtime, user: int, assets: dict[str, Asset], flying: Sums) -> AccountBalances | None:
    ledger, path = runtime.bursar.ledger, funding_account(user)
    try:
        account = await ledger.account(path)
        available = {code: money.minor for code, money in (await ledger.balances(path)).items()}
        frozen: Sums = defaultdict(int)
        for hold in await ledger.holds(path):
            frozen[hold.remaining.asset] += hold.remaining.minor
    except UnknownAccount:
        return None
    lines = _lines(assets, available, frozen, flying)
    return AccountBalances(account=AccountType.FUNDING.value, status=STATUSES[account.status].name, balances=lines)


async def _core(
    kind: AccountType, client: TradingClient, user: int, assets: dict[str, Asset], flying: Sums
) -> AccountBalances | None:
    reply = await client.balances(user)
    if reply.outcome is not Outcome.SUCCESS:
        return AccountBalances(account=kind.value, status="UNAVAILABLE", balances=[])
    if not reply.balances and not flying:
        return None
    available = {code: balance.available for code, balance in reply.balances.items()}
    frozen = {code: balance.frozen for code, balance in reply.balances.items()}
    lines = _lines(assets, available, frozen, flying)
    return AccountBalances(account=kind.value, status=reply.status.name, balances=lines)


def _lines(assets: dict[str, Asset], available: Sums, frozen: Sums, flying: Sums) -> list[AssetBalance]:
    codes = sorted({*available, *frozen, *flying} & assets.keys())
    return [
        AssetBalance(
            asset=code,
            available=str(assets[code].of_minor(available.get(code, 0))),
            frozen=str(assets[code].of_minor(frozen.get(code, 0))),
            in_flight=str(assets[code].of_minor(flying.get(code, 0))),
        )
        for code in codes
    ]
