"""Every drill in which ranks wait until a timeout, in one run, which equals the run without faults in the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from fullshard.drills.kinds import DRILLS, in_one_run
from tests.drills.broken_runs import prepared


@pytest.mark.slow  # starts ranks eleven times, and waits for nine timeouts
@pytest.mark.timeout(3600)
def test_a_run_recovers_from_one_hang_after_another(tmp_path: Path) -> None:
    drills = [drill for drill in DRILLS if drill.waits]
    runs = prepared(tmp_path, steps=22)
    outcome = runs.run(in_one_run("waiting", drills))
    assert outcome.problem is None, runs.output("waiting")
    assert outcome.happened == len(drills) == 9
