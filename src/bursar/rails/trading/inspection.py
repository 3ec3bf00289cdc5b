"""Looking at a core's files from outside: what is in them, and are they whole? Changes nothing, needs no lock.

A torn end of the last segment is what a crash leaves behind: the core will cut it, and the file counts as whole.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from bursar.ports import Files
from bursar.rails.trading import snapshots, wal
from bursar.rails.trading.errors import CoreDamaged, WrongCore
from bursar.rails.trading.frames import BadFrame, read_segment_header
from bursar.rails.trading.journal import OperationBlocks
from bursar.rails.trading.rules import Op, code_name
from bursar.rails.trading.snapshots import BadSnapshot
from bursar.rails.trading.state import CoreState
from bursar.rails.trading.wal import Log


class FileReport(msgspec.Struct, kw_only=True):
    """One file."""

    file: str
    kind: str  # segment or snapshot
    whole: bool
    core: str = ""  # the name of the core
    identity: str = ""  # of the core
    first: int = 0
    last: int = 0
    frames: int = 0
    operations: int = 0
    bytes: int = 0
    why: str = ""  # what is wrong, or was torn


class Inspection(msgspec.Struct, kw_only=True):
    """All that was looked at."""

    path: str
    whole: bool
    files: list[FileReport] = []
    identity: str = ""  # of the core
    ledger: str = ""  # to which it is bound; "": to none
    sequence: int = 0  # where a core would go on from
    remembered: int = 0
    accounts: int = 0
    room: int = 0  # the id below which withdraws reserve no room
    forget: int = 0  # the id below which everything is forgotten
    highest: int = 0  # id of a deposit or withdraw
    totals: dict[str, int] = {}
    answers: dict[str, int] = {}  # how many operations of which kind had which answer
    why: str = ""


def inspect(files: Files, path: str, *, is_folder: bool) -> Inspection:
    """A core's folder, or one segment or snapshot of it."""
    if is_folder:
        return _folder(files, path)
    folder, _, name = path.rpartition("/")
    report = (
        _snapshot(files, path) if name.endswith(snapshots.SUFFIX) else _segments(files, folder or ".", only=path)[0]
    )
    return Inspection(
        path=path,
        whole=report.whole,
        files=[report],
        identity=report.identity,
        sequence=report.last,
        why=report.why,
    )


def _folder(files: Files, folder: str) -> Inspection:
    reports = [
        _snapshot(files, f"{folder}/{snapshots.snapshot_name(sequence)}")
        for sequence in reversed(snapshots.snapshots_in(files, folder))
    ]
    reports += _segments(files, folder)
    found = Inspection(path=folder, whole=bool(reports) and all(report.whole for report in reports), files=reports)
    if not reports:
        found.why = "there is neither a log nor a snapshot here"
        return found
    identities = {report.identity for report in reports} - {""}
    if len(identities) > 1:
        found.whole, found.why = False, f"files of several cores are mixed here: {', '.join(sorted(identities))}"
        return found
    try:
        state = _state(files, folder, reports)
    except (CoreDamaged, WrongCore, ValueError, OverflowError) as error:
        found.whole, found.why = False, str(error)
        return found
    found.identity = next((report.identity for report in reversed(reports) if report.identity), "")
    found.ledger, found.sequence, found.remembered = state.ledger, state.sequence, state.history.count
    found.accounts, found.highest = state.accounts, state.highest
    found.room, found.forget = state.floors.room, state.floors.forget
    found.totals = dict(state.totals())
    found.answers = _answers(state)
    return found


def _state(files: Files, folder: str, reports: list[FileReport]) -> CoreState:
    """What a core would start with."""
    state = CoreState()
    whole = [report for report in reports if report.kind == "snapshot" and report.whole]
    if whole:
        state = snapshots.restore(files.read(whole[-1].file)).state
    for frame in Log(files, folder, reports[-1].core or reports[0].core).read_all():
        if frame.first > state.sequence + 1:
            raise ValueError(f"sequences {state.sequence + 1} to {frame.first - 1} are missing")
        if frame.last > state.sequence:
            state.replay(frame.records)
    return state


def _answers(state: CoreState) -> dict[str, int]:
    counts = Counter(row.meta & 0xFFFF for row in state.history.rows())
    return {f"{Op(kind >> 8).name} {code_name(kind & 0xFF)}": count for kind, count in sorted(counts.items())}


def _snapshot(files: Files, path: str) -> FileReport:
    data = files.read(path)
    try:
        found = snapshots.restore(data)
    except (BadSnapshot, ValueError, OverflowError) as error:
        return FileReport(file=path, kind="snapshot", whole=False, bytes=len(data), why=str(error))
    return FileReport(
        file=path,
        kind="snapshot",
        whole=True,
        core=found.name,
        identity=found.core,
        last=found.state.sequence,
        operations=found.state.history.count,
        bytes=len(data),
    )


def _segments(files: Files, folder: str, only: str | None = None) -> list[FileReport]:
    """Each segment by itself: a damaged one does not hide what is in the others."""
    reports = []
    segments = wal.segments_in(files, folder)
    for segment in segments:
        if only in (None, segment.path):
            reports.append(_segment(files, folder, segment, last=segment is segments[-1]))
    if only is not None and not reports:
        raise BadFrame(f"{only} is neither a segment nor a snapshot of a core")
    return reports


def _segment(files: Files, folder: str, segment: wal.Segment, *, last: bool) -> FileReport:
    report = FileReport(file=segment.path, kind="segment", whole=True, first=segment.first, bytes=segment.size)
    report.last = segment.first - 1
    try:
        header = read_segment_header(files.read(segment.path))
        report.core, report.identity = header.name, header.core
        log = Log(files, folder, report.core)
        for frame in log.read_one(segment, segment.first, last=last):
            report.frames += 1
            report.last = frame.last
            report.operations += sum(
                block.count
                for record in frame.records
                if isinstance(record, OperationBlocks)
                for block in record.blocks
            )
        if log.torn is not None:
            report.why = f"torn end of {log.torn.size} bytes, which the core cuts: {log.torn.why}"
    except (CoreDamaged, WrongCore) as error:
        report.whole, report.why = False, str(error)
    except BadFrame as error:
        report.whole, report.why = False, f"at byte 0: {error}"
    return report
