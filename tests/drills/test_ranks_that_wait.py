"""Every drill in which ranks wait until a timeout: each explained, recovered, and equal to the run without faults."""

from __future__ import annotations

import pytest

from fullshard.drills.drill import Drills
from fullshard.drills.kinds import DRILLS, Drill
from tests.drills.broken_runs import prepared

pytestmark = pytest.mark.slow  # each drill starts ranks twice


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Drills:
    return prepared(tmp_path_factory.mktemp("waiting"))


@pytest.mark.parametrize("drill", [drill for drill in DRILLS if drill.waits], ids=lambda drill: drill.name)
def test_a_run_recovers(drill: Drill, runs: Drills) -> None:
    outcome = runs.run(drill)
    assert outcome.problem is None, runs.output(drill.name)
