"""The HTTP API: routes, who may call them, what is refused and how it is told. Needs the extra `bursar[api]`."""

from bursar.api.app import application, description
from bursar.api.auth import Identity, Keys, Role

__all__ = ["Identity", "Keys", "Role", "application", "description"]
