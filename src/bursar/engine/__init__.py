"""Durable state machines: any flow, driven, recovered, watched."""

from bursar.engine import holds
from bursar.engine.alerts import AlertDispatcher, Notice, Sink, to_log
from bursar.engine.clock import DatabaseClock, Snowflakes
from bursar.engine.engine import Engine, Started
from bursar.engine.flow import (
    SUCCESS,
    Answer,
    Booking,
    Dispute,
    Flow,
    FlowRecord,
    FlowRefused,
    InlineCall,
    NewRecord,
    RecordSignal,
)
from bursar.engine.forced import keep_asking
from bursar.engine.operators import FORCED_BY, Operators
from bursar.engine.pauses import Lift, lift_pause, set_pause, watch_pauses
from bursar.engine.sinks import DeliveryFailed, Program, Webhook
from bursar.engine.worker import Worker

__all__ = [
    "FORCED_BY",
    "SUCCESS",
    "AlertDispatcher",
    "Answer",
    "Booking",
    "DatabaseClock",
    "DeliveryFailed",
    "Dispute",
    "Engine",
    "Flow",
    "FlowRecord",
    "FlowRefused",
    "InlineCall",
    "Lift",
    "NewRecord",
    "Notice",
    "Operators",
    "Program",
    "RecordSignal",
    "Sink",
    "Snowflakes",
    "Started",
    "Webhook",
    "Worker",
    "holds",
    "keep_asking",
    "lift_pause",
    "set_pause",
    "to_log",
    "watch_pauses",
]
