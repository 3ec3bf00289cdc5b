"""The tables: small, dumb sub-stores over a session, all together."""

from __future__ import annotations

from bursar.store.accounts import Accounts, Rules
from bursar.store.balances import Balances
from bursar.store.checks import Checks
from bursar.store.cores import Cores, Marks
from bursar.store.documents import Documents
from bursar.store.envelopes import Envelopes, Events
from bursar.store.flow_rows import FlowRows
from bursar.store.holds import Holds
from bursar.store.operators import Actions, Closings, ForcedCalls, Pauses
from bursar.store.postings import Postings
from bursar.store.records import Alerts, Clock, Heartbeats, Nodes, Operations, Records
from bursar.store.session import Session


class Tables:
    """All tables over one session."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.rules = Rules(session)
        self.accounts = Accounts(session)
        self.postings = Postings(session)
        self.envelopes = Envelopes(session)
        self.balances = Balances(session)
        self.events = Events(session)
        self.holds = Holds(session)
        self.checks = Checks(session)
        self.records = Records(session)
        self.flow_rows = FlowRows(session)
        self.operations = Operations(session)
        self.alerts = Alerts(session)
        self.pauses = Pauses(session)
        self.actions = Actions(session)
        self.forced_calls = ForcedCalls(session)
        self.closings = Closings(session)
        self.documents = Documents(session)
        self.nodes = Nodes(session)
        self.cores = Cores(session)
        self.marks = Marks(session)
        self.clock = Clock(session)
        self.heartbeats = Heartbeats(session)
