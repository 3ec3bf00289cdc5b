"""Pictures: an envelope as a small graph, receipts and events in words."""

from __future__ import annotations

from bursar.cli.output import Output, shown, time_text
from bursar.model.entries import EntryKind
from bursar.model.envelope import Receipt
from bursar.model.postings import PostingState
from bursar.model.records import Event, EventKind
from bursar.model.views import EnvelopeView, PostingView

POSTINGS_SHOWN = 20  # on each side of the graph
INDENT = 2

WHY = {EntryKind.ENTRY: "entry", EntryKind.RETURN: "gives back", EntryKind.COMPACT: "merges postings"}


def show_receipt(out: Output, receipt: Receipt) -> None:
    """Say what was committed, and whether it was there already."""
    out.show(receipt, lambda: _receipt(receipt))


def show_receipts(out: Output, receipts: list[Receipt]) -> None:
    """The same of several."""
    out.show(receipts, lambda: "\n".join(map(_receipt, receipts)) if receipts else "there were no entries in it")


def _receipt(receipt: Receipt) -> str:
    again = "was there already; nothing happened now" if receipt.replayed else "is committed"
    return f"envelope {receipt.envelope} {again} (key {shown(receipt.key)})\n{receipt.id}"


def event_subject(event: Event) -> str:
    """What an event is about."""
    name = event.name or f"#{event.subject}"
    match event.kind:
        case EventKind.COMMITTED:
            return f"envelope {event.subject}"
        case EventKind.ACCOUNT_CREATED | EventKind.ACCOUNT_CHANGED:
            return f"account {name} version {event.version}"
        case EventKind.ASSET_CREATED | EventKind.ASSET_CHANGED:
            return f"asset {name}"
        case EventKind.BOOK_CREATED:
            return f"book {name}"


def draw_envelope(view: EnvelopeView, width: int) -> str:
    """An envelope as text: consumed postings above, created ones below, one line between them.

    from envelope 3  user:1   100.00 USDT  #196608 ──┐
                                                 envelope 12
                     user:2    30.00 USDT  #786432 ◀─┤ live
                     user:1    70.00 USDT  #786433 ◀─┘ spent by envelope 15

    Where that is too wide, each account stands above its posting: shortened, two of them could look the same.
    """
    return "\n".join([*_heading(view), "", *_graph(view, width)])


def _heading(view: EnvelopeView) -> list[str]:
    lines = [
        f"envelope {view.envelope}: {WHY[view.kind]} in book {view.book}, {time_text(view.at)} UTC",
        f"key {shown(view.key)}" + ("" if view.scope == "user" else f" (scope {view.scope})"),
        f"id  {view.id}",
    ]
    if view.reverses is not None:
        lines.append(f"reverses envelope {view.reverses}")
    if view.reversed_by is not None:
        lines.append(f"was reversed by envelope {view.reversed_by}")
    if view.metadata:
        lines.append("meta " + ", ".join(shown(f"{name}={value}") for name, value in view.metadata.items()))
    amounts = [str(m.amount) for m in view.movements[:POSTINGS_SHOWN]]
    wide = max(map(len, amounts), default=0)
    for movement, amount in zip(view.movements, amounts, strict=False):
        lines.append(f"     {amount:>{wide}} {movement.amount.asset}  {movement.source} → {movement.target}")
    return [*lines, *_more(len(view.movements), "movements")]


def _graph(view: EnvelopeView, width: int) -> list[str]:
    consumes, creates = view.consumes[:POSTINGS_SHOWN], view.creates[:POSTINGS_SHOWN]
    both = (*consumes, *creates)
    origin = max([len(_origin(p)) for p in consumes], default=0)
    amounts = max([len(str(p.amount)) for p in both], default=0)
    assets = max([len(p.amount.asset) for p in both], default=0)
    numbers = max([len(str(p.id)) for p in both], default=0)
    fate = max([len(_fate(p)) for p in creates], default=0)
    fixed = INDENT + origin + 2 + amounts + 1 + assets + 3 + numbers + 4 + 2 + fate + 3
    paths = max([len(p.account) for p in both], default=0)
    tall = paths > width - fixed

    def body(p: PostingView, start: str) -> str:
        path = "" if tall else f"{p.account:<{paths}}  "
        amount = f"{p.amount!s:>{amounts}} {p.amount.asset:<{assets}}"
        return f"{'':{INDENT}}{start:<{origin}}  {path}{amount}  #{p.id:<{numbers}}"

    def named(p: PostingView, line: str) -> list[str]:
        return [f"{'':{INDENT}}{p.account}", line] if tall else [line]

    above = [body(p, _origin(p)) + (" ──┐" if n == 0 else " ──┤") for n, p in enumerate(consumes)]
    below = []
    for n, p in enumerate(creates):
        last = n == len(creates) - 1
        below.append(body(p, "") + (" ◀─┘ " if last else " ◀─┤ ") + _fate(p))
    spine = len((above or below)[0].rstrip()) - 1 if above else below[0].index("◀") + 2
    label = f"( {view.envelope} )"
    middle = " " * max(0, spine - len(label) // 2) + label
    bar = " " * spine + "│"
    lines = [line for p, drawn in zip(consumes, above, strict=True) for line in named(p, drawn)]
    lines += _more(len(view.consumes), "consumed")
    lines += [bar] * bool(above) + [middle] + [bar] * bool(below)
    lines += [line for p, drawn in zip(creates, below, strict=True) for line in named(p, drawn)]
    return [*lines, *_more(len(view.creates), "created")]


def _origin(p: PostingView) -> str:
    return f"from {p.created_by}"


def _fate(p: PostingView) -> str:
    return f"spent by {p.spent_by}" if p.state is PostingState.SPENT else p.state.value


def _more(count: int, what: str) -> list[str]:
    return [f"  … and {count - POSTINGS_SHOWN} more {what}"] if count > POSTINGS_SHOWN else []
