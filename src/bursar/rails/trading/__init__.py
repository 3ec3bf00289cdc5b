"""The trading core: balances in memory, made durable by a log, in a process of its own; and the client that calls it.

`TradingClient` is what flows use; `Core` and `Server` are the process (`bursar core`). Specifications 000 and 001, and
decisions T6 to T9, T26, T29 to T35.
"""

from bursar.rails.trading.client import Operation, TradingClient
from bursar.rails.trading.connection import CoreLink, CoreRefused, FixedLink, Known, NoConnection
from bursar.rails.trading.core import Core, Loading, Recovery
from bursar.rails.trading.errors import CoreDamaged, CoreInUse, CoreStopped, WrongCore
from bursar.rails.trading.events import Event
from bursar.rails.trading.replies import (
    Balance,
    BalancesReply,
    DescribeReply,
    Floors,
    LookupReply,
    OperationRow,
    OperationsReply,
    QueryReply,
    Reply,
    TotalsReply,
)
from bursar.rails.trading.rules import REFUSALS, Code, Op, Status, operation_id
from bursar.rails.trading.server import Server, ServerLimits
from bursar.rails.trading.subscription import EventsGone

__all__ = [
    "REFUSALS",
    "Balance",
    "BalancesReply",
    "Code",
    "Core",
    "CoreDamaged",
    "CoreInUse",
    "CoreLink",
    "CoreRefused",
    "CoreStopped",
    "DescribeReply",
    "Event",
    "EventsGone",
    "FixedLink",
    "Floors",
    "Known",
    "Loading",
    "LookupReply",
    "NoConnection",
    "Op",
    "Operation",
    "OperationRow",
    "OperationsReply",
    "QueryReply",
    "Recovery",
    "Reply",
    "Server",
    "ServerLimits",
    "Status",
    "TotalsReply",
    "TradingClient",
    "WrongCore",
    "operation_id",
]
