"""The application: all routes, behind one gate.

    app, health = applications(runtime, Keys.of(config))  # ASGI applications, for a server (cli/http_server)
    description()                                       # OpenAPI, as docs/reference/openapi.json has it

Litestar and uvicorn open their own sockets; nothing else here does.

Requests are read exactly as described, or refused with 400, 413 or 415 before a route sees them. The framework would
take the text `"1001"` for the number 1001, the last of two fields with one name, and a filter whose name is misspelt
for no filter. Where money is moved each of these is a caller's mistake that costs money: a number is a JSON number, a
field is given once, and an unknown name is refused.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.metadata import version
from typing import Any

import msgspec
from litestar import Litestar, Request
from litestar.datastructures import State
from litestar.exceptions import HTTPException
from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import Components, License, SecurityScheme
from litestar.routes import HTTPRoute

from bursar.api import (
    addresses,
    approvals,
    chain_deposits,
    chains,
    deposit_rules,
    health,
    money,
    payouts,
    transfers,
    withdrawal_rules,
    withdrawals,
)
from bursar.api.answers import answer
from bursar.api.gate import ALWAYS_OPEN, TAKES_BODY, Bound, Gate, check_role
from bursar.api.metrics import Metrics
from bursar.api.problems import UNSUPPORTED_MEDIA_TYPE, OutageLog, Problem
from bursar.api.tokens import Keys
from bursar.flows.transfers import Code
from bursar.runtime import Runtime

ROUTES = (
    transfers.create_transfer,
    transfers.show_transfer,
    transfers.list_transfers,
    transfers.create_transfer_1,
    transfers.show_transfer_1,
    money.list_assets,
    money.show_balances,
    money.create_deposit,
    money.confirm_deposit,
    money.reject_deposit,
    money.list_deposits,
    payouts.create_payout,
    payouts.list_payouts,
    payouts.quote_payout,
    payouts.show_payout,
    payouts.bump_payout,
    payouts.cancel_payout,
    payouts.hold_payout,
    payouts.release_payout,
    payouts.resolve_payout,
    payouts.approve_payout,
    withdrawals.quote_withdrawal,
    withdrawals.create_withdrawal,
    withdrawals.list_withdrawals,
    approvals.list_waiting,
    withdrawals.show_withdrawal,
    withdrawals.cancel_withdrawal,
    approvals.show_payment,
    approvals.approve_withdrawal,
    approvals.reject_withdrawal,
    approvals.list_switches,
    approvals.pause_withdrawals,
    approvals.resume_withdrawals,
    addresses.list_addresses,
    addresses.add_address,
    addresses.remove_address,
    withdrawal_rules.list_policies,
    withdrawal_rules.show_policy,
    withdrawal_rules.put_policy,
    withdrawal_rules.approve_policy,
    withdrawal_rules.list_address_lists,
    withdrawal_rules.show_address_list,
    withdrawal_rules.put_address_list,
    withdrawal_rules.approve_address_list,
    withdrawal_rules.list_approvers,
    withdrawal_rules.show_approver,
    withdrawal_rules.put_approver,
    withdrawal_rules.approve_approver,
    chain_deposits.create_deposit_address,
    chain_deposits.list_deposit_addresses,
    chain_deposits.list_chain_deposits,
    chain_deposits.show_chain_deposit,
    chain_deposits.confirm_chain_deposit,
    chain_deposits.reject_chain_deposit,
    deposit_rules.list_deposit_rules,
    deposit_rules.show_deposit_rules,
    deposit_rules.put_deposit_rules,
    deposit_rules.approve_deposit_rules,
    deposit_rules.list_deposit_scans,
    deposit_rules.rescan_chain,
    deposit_rules.list_sweeps,
    deposit_rules.show_sweep,
    chains.list_wallets,
    chains.list_chains,
    chains.show_chain,
    chains.put_chain,
    chains.approve_chain,
    chains.show_asset,
    chains.put_asset,
    chains.approve_asset,
    chains.show_wallet,
    chains.put_wallet,
    chains.approve_wallet,
    health.healthz,
    health.readyz,
    health.metrics,
)
QueryNames = dict[tuple[str, str], frozenset[str]]  # method, route → parameters
NOTHING = (b"", b"{}")  # what a route may be sent that asks for no body
ABOUT = """Money between funding and trading accounts, never lost and never duplicated.

Refusals are `application/problem+json` with a stable `code`. Amounts are text in units of the asset. Repeat a request
with the same `client_order_id` (or `Idempotency-Key`) and nothing happens twice."""


def applications(runtime: Runtime, keys: Keys) -> tuple[Gate, Gate]:
    """The application at the public address, and the one for health and metrics.

    The first has health and metrics too, unless the configuration gives them an address of their own.
    """
    ports, config, metrics = runtime.ports, runtime.config, Metrics(runtime)
    outages = OutageLog(ports.monotonic)
    state = State({"runtime": runtime, "metrics": metrics, "ports": ports, "outages": outages})
    app = _litestar(state, config.body_bytes_max)
    app.state["query_names"] = _query_names(app)
    routes = {route.path_format for route in app.routes}
    public = routes - ALWAYS_OPEN if config.health_listen else routes
    bound = Bound(app, config.answer_s, outages)
    traffic = metrics.traffic
    return Gate(bound, ports, traffic, config, keys, public), Gate(bound, ports, traffic, config, keys, ALWAYS_OPEN)


def description() -> dict[str, Any]:
    """The OpenAPI description."""
    return _litestar(State({}), 1).openapi_schema.to_schema()


def _query_names(app: Litestar) -> QueryNames:
    """Method and route → the parameters that it reads. (The description has them, too, but takes a while to make.)"""
    return {
        (str(method), route.path_format): frozenset(one.field_alias for one in reads.expected_query_params)
        for route in app.routes
        if isinstance(route, HTTPRoute) and route.path_format.startswith("/api/")  # for health, add what you like
        for method, (_, reads) in route.route_handler_map.items()
        if method != "OPTIONS"  # the framework's own
    }


def _litestar(state: State, body_bytes_max: int) -> Litestar:
    return Litestar(
        route_handlers=list(ROUTES),
        state=state,
        debug=False,
        logging_config=None,
        request_class=StrictRequest,
        before_request=check_request,
        exception_handlers={HTTPException: answer, Exception: answer},
        request_max_body_size=body_bytes_max,
        openapi_config=OpenAPIConfig(
            title="Bursar",
            version=version("bursar"),
            description=ABOUT,
            license=License(name="Apache-2.0", identifier="Apache-2.0"),
            path="/schema",
            render_plugins=[JsonRenderPlugin(path="/openapi.json")],
            components=Components(
                security_schemes={"token": SecurityScheme(type="http", scheme="bearer", bearer_format="JWT")}
            ),
            security=[{"token": []}],
            use_handler_docstrings=True,
        ),
    )


class StrictRequest(Request[Any, Any, Any]):
    """A request whose JSON is read once, into what its route asks for."""

    async def json(self) -> Any:
        """The body as its route's own shape; the framework passes that through as it is."""
        shape = self.route_handler.parsed_fn_signature.parameters["data"].annotation
        return read_json(await self.body(), shape)


def read_json(body: bytes, shape: Any) -> Any:
    """A body, if it is exactly such a one."""
    try:
        found = _decoder(shape).decode(body)
        _strict.decode(body.decode())
    except UnicodeError:
        raise Problem(Code.INVALID_REQUEST, "the body is not UTF-8") from None
    except (msgspec.MsgspecError, _Twice) as error:
        raise Problem(Code.INVALID_REQUEST, f"body: {error}") from None
    except RecursionError:
        raise Problem(Code.INVALID_REQUEST, "the body is nested too deeply") from None
    return found


async def check_request(request: Request[Any, Any, Any]) -> None:
    """What holds for all routes, before any of them is called."""
    check_role(request)
    fields = request.route_handler.parsed_fn_signature.parameters
    if request.scope["query_string"]:
        _check_query(request)
    if request.method not in TAKES_BODY:
        return
    _check_media_type(request)
    if "data" not in fields and (await request.body()).strip() not in NOTHING:
        raise Problem(Code.INVALID_REQUEST, "this takes no body")


def _check_query(request: Request[Any, Any, Any]) -> None:
    names: QueryNames = request.app.state["query_names"]
    known = names.get((request.method, request.scope["path_template"]))
    if known is None:  # not one of the routes that are described
        return
    seen = [name for name, _ in request.query_params.multi_items()]
    for name in seen:
        if name not in known:
            raise Problem(Code.INVALID_REQUEST, f"unknown query parameter {name[:64]!r}")
        if seen.count(name) > 1:
            raise Problem(Code.INVALID_REQUEST, f"query parameter {name} is given twice")


def _check_media_type(request: Request[Any, Any, Any]) -> None:
    """A body is JSON, or refused: no form of another site's page gets through."""
    headers = dict(request.scope["headers"])  # of those that matter here the gate lets none in twice
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    is_empty = headers.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in headers
    if kind != b"application/json" and not (is_empty and not kind):
        raise Problem(UNSUPPORTED_MEDIA_TYPE, "the body must be application/json")


class _Twice(ValueError):
    """A field was given twice."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _Twice("a field is given twice")
    return found


_strict = json.JSONDecoder(object_pairs_hook=_once)


@cache
def _decoder(shape: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(shape)
