"""Every drill in which a rank ends, or the launcher: each explained, recovered, and equal to the run without faults.

Faults that cost only a restart share a run, which saves half of the starts.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fullshard.drills.drill import Drills
from fullshard.drills.kinds import DRILLS, Drill, in_one_run
from tests.drills.broken_runs import prepared

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # starts ranks many times
STEPS = 18
TOGETHER = {
    kind: [
        drill for drill in DRILLS if drill.name.startswith(names) and drill.recovery == "restart" and not drill.waits
    ]
    for kind, names in {"killed": ("killed-",), "raised": ("exception-", "exits-", "out-of-memory-")}.items()
}
ALONE = [drill for drill in DRILLS if not drill.waits and all(drill not in each for each in TOGETHER.values())]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Drills:
    return prepared(tmp_path_factory.mktemp("ended"), steps=STEPS)


@pytest.mark.parametrize("kind", ["killed", "raised"])
def test_a_run_recovers_from_one_fault_after_another(kind: str, runs: Drills) -> None:
    outcome = runs.run(in_one_run(kind, TOGETHER[kind]))
    assert outcome.problem is None, runs.output(kind)
    assert outcome.happened == len(TOGETHER[kind]) >= 6


@pytest.mark.parametrize("drill", ALONE, ids=lambda drill: drill.name)
def test_a_run_recovers(drill: Drill, runs: Drills) -> None:
    outcome = runs.run(drill)
    assert outcome.problem is None, runs.output(drill.name)


def test_a_run_without_faults_has_the_words_of_none(runs: Drills) -> None:
    """Otherwise the patterns would find an explanation in any output."""
    for drill in DRILLS:
        said = runs.output("straight").replace("straight", drill.name)
        assert not [each for each in drill.says if re.search(each.format(last=runs.world - 1), said)], drill.name


@pytest.mark.faults
def test_a_drill_whose_run_differs_is_a_failure(runs: Drills, tmp_path: Path) -> None:
    """The judge itself: a run with another seed recovers, and is not equal."""
    other = runs.recipe.model_copy(update={"seed": runs.recipe.seed + 1})
    (tmp_path / "straight").symlink_to(runs.folder / "straight")
    outcome = Drills(other, tmp_path, runs.world).run(DRILLS[0])
    assert outcome.problem is not None
    assert "step 1" in outcome.problem
