"""What keeps a core from starting or from going on, each with what a person can do about it.

None of these is an answer to a caller: a core that meets one answers no more requests, and ends.
"""

from __future__ import annotations

from bursar.model.errors import StoreError


class CoreInUse(StoreError):
    """Another core works in this folder."""

    folder: str
    code = "CORE_IN_USE"
    text = "another core works in {folder}; stop it first, or give this one a folder of its own"


class CoreDamaged(StoreError):
    """The log or the snapshots are not what a core leaves behind, crash or not. Nothing was changed."""

    file: str
    where: int
    why: str
    advice: str
    code = "CORE_DAMAGED"
    text = "{file} is damaged at byte {where}: {why}. Nothing was changed. {advice}"


class WrongCore(StoreError):
    """The folder belongs to a core of another name."""

    folder: str
    name: str
    found: str
    code = "WRONG_CORE"
    text = "{folder} belongs to the core {found!r}, not to {name!r}; check --data and --name"


class CoreStopped(StoreError):
    """The disk failed while writing. What was asked and not answered may have happened or not."""

    why: str
    code = "CORE_STOPPED"
    text = (
        "the disk failed ({why}) and the core has ended without answering; mend the disk or make room, then start it "
        "again: callers without an answer ask again"
    )
