"""Guards: who may call a route, by the token that came with the request."""

from __future__ import annotations

from typing import Any

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler
from litestar.types import Guard

from bursar.api.gate import AUTHENTICATED, UNIDENTIFIED
from bursar.api.problems import Problem
from bursar.api.tokens import Identity, Role
from bursar.flows.transfers import Code


def allow(*roles: Role) -> Guard:
    """A guard that lets these in, and says who it is. Runs before anything of the body is read."""

    async def guard(connection: ASGIConnection[Any, Any, Any, Any], _handler: BaseRouteHandler) -> None:
        # async, though it waits for nothing: Litestar would run any other in a thread, for each request
        state = connection.scope["state"]
        if UNIDENTIFIED in state:  # the gate has looked already: signatures are dear
            raise state[UNIDENTIFIED]
        identity: Identity = state[AUTHENTICATED]
        if not identity.has(*roles):
            raise Problem(Code.FORBIDDEN, f"this needs the role {' or '.join(roles)}")
        connection.scope["user"] = identity

    return guard
