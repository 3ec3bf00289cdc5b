"""Names of workers: kept across restarts, and never two processes' at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from bursar.config import ConfigRefused
from bursar.ports import SystemPorts
from bursar.worker_names import held_name

PORTS = SystemPorts()


def test_two_processes_on_one_folder_have_two_names_which_they_get_again(tmp_path: Path) -> None:
    """A record's lease names its worker: under one name two would take each other's records, under a new one each would
    wait for its own lease."""
    folder = str(tmp_path / "data")
    with held_name(PORTS, folder, "worker") as first, held_name(PORTS, folder, "worker") as second:
        assert first != second
    with held_name(PORTS, folder, "worker") as again, held_name(PORTS, folder, "serve") as other:
        assert again == first
        assert other not in (first, second)


def test_another_folder_on_the_same_host_has_another_name(tmp_path: Path) -> None:
    here, there = (str(tmp_path / name) for name in ("here", "there"))
    with held_name(PORTS, here, "worker") as one, held_name(PORTS, there, "worker") as two:
        assert one != two


def test_a_name_of_the_settings_is_one_processs_alone(tmp_path: Path) -> None:
    folder = str(tmp_path)
    with held_name(PORTS, folder, "worker", "night shift") as name:
        assert name == "night shift"
        with pytest.raises(ConfigRefused, match="night shift"), held_name(PORTS, folder, "serve", "night shift"):
            pass
    with held_name(PORTS, folder, "serve", "night shift") as again:
        assert again == "night shift"
