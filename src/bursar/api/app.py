"""The application: all routes, behind one gate.

    app, health = applications(runtime, Keys.of(config))  # ASGI applications, for a server (cli/http_server)
    description()                                       # OpenAPI, as docs/reference/openapi.json has it

Litestar and uvicorn open their own sockets; nothing else here does.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from litestar import Litestar
from litestar.datastructures import State
from litestar.exceptions import HTTPException
from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import Components, License, SecurityScheme
from litestar.routes import HTTPRoute

from bursar.api import health, money, transfers
from bursar.api.answers import answer
from bursar.api.bound import Bound
from bursar.api.gate import ALWAYS_OPEN, Gate
from bursar.api.metrics import Metrics
from bursar.api.strict import QueryNames, StrictRequest, check_request
from bursar.api.tokens import Keys
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
    health.healthz,
    health.readyz,
    health.metrics,
)
ABOUT = """Money between funding and trading accounts, never lost and never duplicated.

Refusals are `application/problem+json` with a stable `code`. Amounts are text in units of the asset. Repeat a request
with the same `client_order_id` (or `Idempotency-Key`) and nothing happens twice."""


def applications(runtime: Runtime, keys: Keys) -> tuple[Gate, Gate]:
    """What is served to everybody, and what is served to those who watch.

    The first has health and metrics too, unless the configuration gives them an address of their own.
    """
    ports, config, metrics = runtime.ports, runtime.config, Metrics(runtime)
    state = State(
        {
            "runtime": runtime,
            "metrics": metrics,
            "ports": ports,
        }
    )
    app = _litestar(state, config.body_bytes_max)
    app.state["query_names"] = _query_names(app)
    routes = {route.path_format for route in app.routes}
    public = routes - ALWAYS_OPEN if config.health_listen else routes
    bound = Bound(app, config.answer_s)
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
