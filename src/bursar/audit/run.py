"""Running an audit: which checks, over one snapshot.

A snapshot lasts as long as the audit. On SQLite other readers of the same store wait for it, so a program that
serves others opens a second store for its audits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bursar.audit.checks import Check, Conservation, Content, Liveness, Scene, Spending
from bursar.audit.finding import INVARIANTS, Finding, Progress
from bursar.audit.flows import Effects, Transit
from bursar.audit.walk import UNREADABLE, said
from bursar.store import Store

CHECKS: dict[str, type[Check]] = {c.invariant: c for c in (Conservation, Spending, Liveness, Transit, Effects, Content)}


async def audit(
    store: Store, *, only: Sequence[str] = (), progress: Progress | None = None, more: Sequence[type[Check]] = ()
) -> list[Finding]:
    """Check the invariants named in `only` (none: all), over one consistent moment.

    `more` are checks that flows bring: what one of these invariants means for their records and rows, or an invariant
    of their own.
    """
    known = sorted({*INVARIANTS, *(check.invariant for check in more)})
    for name in only:
        if name not in known:
            raise ValueError(f"{name!r} is not an invariant; there are {', '.join(known)}")
    names = [name for name in known if not only or name in only]
    clock = store.ports.monotonic
    async with store.snapshot(unhurried=True) as tables:
        scene = Scene(tables, progress or (lambda *_: None))
        await scene.read()
        checks = [CHECKS[name](scene) for name in names if name in CHECKS]
        checks += [check(scene) for check in more if check.invariant in names]
        spent = await _walk(scene, [check for check in checks if check.walks], clock)
        for check in checks:
            scene.progress(check.invariant, 0, 0)
            start = clock()
            try:
                await check.finish()
            except UNREADABLE as error:  # damage, too: the others are still judged
                check.evidence.add(f"not judged to the end: {said(error)}")
            spent[check.invariant] = spent.get(check.invariant, 0.0) + clock() - start
    return [_finding([c for c in checks if c.invariant == name], spent.get(name, 0.0)) for name in names]


async def _walk(scene: Scene, checks: list[Check], clock: Callable[[], float]) -> dict[str, float]:
    """Take the checks that want to see every envelope past all of them. Returns the seconds each took."""
    spent = {check.invariant: 0.0 for check in checks}
    if not checks:
        return spent
    seen, total, start = 0, scene.counts["envelopes"], clock()
    async for page in scene.walk.pages():
        read = (clock() - start) / len(checks)  # read once, for all of them
        for check in checks:
            start = clock()
            try:
                await check.page(page)
            except UNREADABLE as error:
                first, last = page.envelopes[0].seq, page.envelopes[-1].seq
                check.evidence.add(f"envelopes {first} to {last} can't be judged: {said(error)}")
            spent[check.invariant] += clock() - start + read
        seen += len(page.envelopes)
        scene.progress("envelopes", seen, total)
        start = clock()
    return spent


def _finding(checks: list[Check], seconds: float) -> Finding:
    """What all checks of one invariant have found."""
    return Finding(
        invariant=checks[0].invariant,
        ok=all(check.evidence.count == 0 for check in checks),
        checked=sum(check.checked for check in checks),
        broken=[text for check in checks for text in check.evidence.found],
        seconds=seconds,
        note="; ".join(dict.fromkeys(check.evidence.note for check in checks if check.evidence.note)),
    )
