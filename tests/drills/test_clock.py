"""The system's clock jumps while a run trains, by libfaketime: the run ends as if it had not."""

from __future__ import annotations

from pathlib import Path

import pytest

from fullshard.drills.kinds import Drill, Happens
from tests.drills.broken_runs import prepared

LIBRARIES = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))


@pytest.mark.slow  # starts ranks twice
@pytest.mark.skipif(not LIBRARIES, reason="libfaketime is not installed: make faketime")
@pytest.mark.parametrize("jump", ["-30d", pytest.param("+30d", marks=pytest.mark.faults)])
def test_a_clock_that_jumps_changes_nothing(jump: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, clock = prepared(tmp_path), tmp_path / "clock"
    clock.write_text("+0")
    for name, value in {
        "LD_PRELOAD": LIBRARIES[0],
        "FAKETIME_TIMESTAMP_FILE": clock,
        "FULLSHARD_DRILL_CLOCK": jump,
        "FAKETIME_NO_CACHE": 1,
        "DONT_FAKE_MONOTONIC": 1,
    }.items():
        monkeypatch.setenv(name, str(value))
    drill = Drill("clock", "the clock jumps", (Happens("clock_jumps", "data"),), recovery="none")
    assert runs.run(drill).problem is None, runs.output("clock")
