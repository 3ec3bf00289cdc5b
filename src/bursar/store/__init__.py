"""Rows: one protocol, two dialects of SQL, one set of tables."""

from bursar.model.errors import DatabaseUnavailable
from bursar.ports import Ports
from bursar.store.address import printable
from bursar.store.protocol import USUAL, Options, Store


def connect(url: str, ports: Ports, *, options: Options = USUAL) -> Store:
    """The store behind an address: `sqlite:///relative.db`, `sqlite:////absolute.db` or `postgresql://…`."""
    scheme, separator, rest = url.partition("://")
    if scheme == "sqlite" and separator:
        from bursar.store.sqlite.store import SqliteStore  # noqa: PLC0415 (a store is loaded when it is used)

        slash, path = rest[:1], rest[1:]
        if not path or slash != "/":  # with two slashes, what follows would be a host; and a typing error, a new file
            raise DatabaseUnavailable(
                f"{url!r} names no file; write sqlite:///{rest.strip('/') or 'funds.db'} (absolute: sqlite:////…)"
            )
        return SqliteStore(ports, path)
    if scheme in ("postgresql", "postgres") and separator:
        from bursar.store.postgres.store import PostgresStore  # noqa: PLC0415

        return PostgresStore(ports, url, options)
    raise DatabaseUnavailable(f"{printable(url)!r} is no address; write sqlite:///funds.db or postgresql://host/name")


__all__ = ["Options", "Store", "connect"]
