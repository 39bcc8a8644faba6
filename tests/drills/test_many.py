"""The page of recoveries, and the judge of how much a fault may cost; nothing is started."""

from __future__ import annotations

import pytest

from fullshard.drills.drill import oldest
from fullshard.drills.fault import Where
from fullshard.drills.kinds import DRILLS, Happens
from tests.drills.many import page


def test_the_page_of_recoveries_counts_every_fault() -> None:
    text = page({DRILLS[0].title: 2, DRILLS[-1].title: 98}, runs=40, seconds=5160)
    assert "86 minutes:\n**100 recoveries in 40 runs; no run failed.**" in text
    rows = [line for line in text.splitlines() if line.startswith("| a") or line.startswith("| the")]
    assert len(rows) == len(DRILLS)
    assert rows[0] == f"| {DRILLS[0].title} | 2 |"
    assert rows[1] == f"| {DRILLS[1].title} | 0 |"


@pytest.mark.parametrize(
    ("where", "after", "least"),
    [
        ("data", 3, 2),
        ("update", 4, 4),
        ("backward", 5, 4),
        ("save", 4, 2),
        ("save", 5, 4),
        ("evaluate", 4, 2),
        ("evaluate", 5, 4),
    ],
)
def test_a_fault_costs_no_more_than_the_steps_since_the_last_checkpoint(where: Where, after: int, least: int) -> None:
    assert oldest(Happens("killed", where, after=after), background=False) == least


def test_a_save_in_the_background_may_not_be_done() -> None:
    assert oldest(Happens("killed", "data", after=5), background=True) == 2
