"""Which rank is slow, and by which phase: pure numbers."""

from __future__ import annotations

import pytest
import torch

from fullshard.faults.stragglers import STEPS, WARM_UP, Stragglers, slower


def ranks(*changes: dict[str, float]) -> list[dict[str, float]]:
    return [{"data": 0.1, "host": 1.0, "idle": 0.0, "update": 2.0} | change for change in changes]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, {}),
        ({"data": 4.1}, {3: ("data", 4 / 6)}),
        ({"host": 3.5}, {3: ("host", 2.5 / 7.5)}),
        ({"update": 2.8}, {3: ("update", 0.4)}),
        ({"update": 2.4}, {}),
        ({"data": 1.1}, {}),  # a tenth of the time
        ({"data": 4.1, "idle": 5.0}, {}),  # the GPU had work all the time
    ],
)
def test_a_rank_is_compared_with_the_median(change: dict[str, float], found: dict[int, tuple[str, float]]) -> None:
    seen = slower(ranks({}, {}, {}, change), seconds=10.0)
    assert {rank: phase for rank, (phase, _) in seen.items()} == {rank: phase for rank, (phase, _) in found.items()}
    assert [share for _, share in seen.values()] == pytest.approx([share for _, share in found.values()])


def test_one_of_two_ranks_and_a_single_one() -> None:
    [(rank, (phase, share))] = slower(ranks({"data": 4.1}, {}), seconds=10.0).items()
    assert (rank, phase, round(share, 6)) == (0, "data", round(4 / 6, 6))
    assert slower(ranks({"data": 9.0}), seconds=10.0) == {}
    assert slower(ranks({"data": 5.0}, {"data": 5.0}), seconds=10.0) == {}, "both wait: nobody is slower"


def test_a_spell_is_reported_once_and_again_after_it_has_ended() -> None:
    lines: list[str] = []
    events: list[int] = []
    totals = dict.fromkeys(("data", "compute", "log", "evaluate", "save"), 0.0)
    watched = Stragglers(
        ["Rank 0 (host a, GPU 0)", "Rank 1 (host b, GPU 0)", "Rank 2 (host b, GPU 1)"],
        rank=0,
        device=torch.device("cpu"),
        totals=lambda: totals,
        warn=lines.append,
        event=lambda name, step, **facts: events.append(facts["rank"]),
    )
    times = iter(range(10**6))
    watched._clock = lambda: float(next(times))

    def compared(late: float, steps: int = STEPS) -> None:
        for _ in range(steps):
            with watched.step():
                pass
        rows = watched.beside(torch.ones(1, 2, dtype=torch.float64))
        assert rows.shape == (7, 2)
        gathered = [[1.0, 1.0], [0.0, 9.0], [0.0, 1.0], [0.0, 9.0], [0.0, 1.0], [late, 9.0], [0.0, 1.0]]
        assert watched.compare(gathered, step=7) == [[1.0, 1.0]]

    compared(1e6, STEPS + WARM_UP - 1)
    assert lines == [], "not enough steps yet"
    compared(80.0, 1)
    compared(80.0)
    [line] = lines
    assert line.startswith("Rank 2 (host b, GPU 1) has been ")
    assert line.endswith("% slower than the median over the last 50 steps: it waits for data.")
    compared(0.0)
    compared(80.0)
    assert len(lines) == 2
    assert events == [2, 2]
