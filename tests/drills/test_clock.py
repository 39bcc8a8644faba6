"""Somebody sets the clock during a run, by a day and more: the run goes on, and a hang is still found and explained.

libfaketime moves the clock of the run's processes, never the machine's own. Their monotonic clock goes on, as it does
when a real clock is set.
"""

from __future__ import annotations

import re
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fullshard.drills.drill import Drills
from fullshard.drills.kinds import DRILLS
from tests.drills.broken_runs import prepared

DAY_S = 86_400
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # starts ranks three times, and waits for a timeout


def clock_of_a_run(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """A file with the offset of the clock, for all processes that are started from here on."""
    import libfaketime

    [library] = Path(libfaketime.__file__).parent.rglob("libfaketime.so.1")
    offset = folder / "offset"
    offset.write_text("+0s")
    for name, value in {
        "LD_PRELOAD": str(library),
        "FAKETIME_TIMESTAMP_FILE": str(offset),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }.items():
        monkeypatch.setenv(name, value)
    return offset


def days(run: Path) -> set[str]:
    """The days of the lines in the log."""
    log = run / "log.txt"
    return set(re.findall(r"^\d{4}-\d\d-\d\d", log.read_text() if log.exists() else "", re.MULTILINE))


def move(offset: Path, run: Path, ended: threading.Event) -> None:
    """A day ahead as soon as the run logs something; two days back once it has logged that day and a rank hangs."""
    while not ended.is_set() and not days(run):
        time.sleep(0.05)
    offset.write_text(f"+{DAY_S}s")
    while not ended.is_set() and not (len(days(run)) >= 2 and list(run.glob("fault-*"))):
        time.sleep(0.05)
    time.sleep(2)  # the others come to wait
    offset.write_text(f"-{DAY_S}s")


def test_a_clock_that_is_set_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: Drills = prepared(tmp_path)
    [stopped] = [drill for drill in DRILLS if drill.name == "stopped-forward"]
    drill = replace(stopped, name="clock")
    run, ended = runs.folder / drill.name, threading.Event()
    offset = clock_of_a_run(monkeypatch, tmp_path)
    mover = threading.Thread(target=move, args=(offset, run, ended))
    mover.start()
    try:
        outcome = runs.run(drill)
    finally:
        ended.set()
        mover.join()
    said = runs.output(drill.name)
    assert outcome.problem is None, said
    assert said.count("Restart 1 of 2") == 1
    assert "Restart 2" not in said
    assert re.search(r"Rank 0 has waited in .* for (\d+ s|\d min)", said), "seconds, not a day"
    assert len(days(run)) >= 3, "before, a day ahead and a day behind"
