"""Sizes of micro-batches as numbers: which are possible, what is tried in which order, what a checkpoint remembers."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fullshard.contracts.objective import Objective
from fullshard.contracts.progress import Progress
from fullshard.errors import RecipeError
from fullshard.families.reasoning.objectives.reasoning import Reasoning
from fullshard.faults import micro_batch
from fullshard.faults.fit import bisect, first_guess, longest
from fullshard.faults.out_of_memory import Split, TooLarge
from fullshard.recipes.read import read


def test_only_what_divides_the_share_is_possible() -> None:
    assert micro_batch.sizes(12) == [1, 2, 3, 4, 6, 12]
    assert micro_batch.sizes(12, 8) == [1, 2, 3, 4, 6]
    assert [micro_batch.at_most(12, limit) for limit in (100, 12, 11, 5, 1, 0)] == [12, 12, 6, 4, 1, 1]
    assert [micro_batch.usual("auto", share) for share in (64, 12, 7, 1)] == [8, 6, 7, 1]
    assert micro_batch.usual(5, 12) == 5


@pytest.mark.parametrize("share", [1, 2, 7, 12, 64])
def test_the_bisection_finds_the_largest_that_fits(share: int) -> None:
    sizes = micro_batch.sizes(share)
    for limit in sizes:
        for first in range(len(sizes)):
            tried: list[int] = []

            def fits(size: int, tried: list[int] = tried, limit: int = limit) -> bool:
                tried.append(size)
                return size <= limit

            assert bisect(sizes, fits, first=first) == limit
            assert len(tried) == len(set(tried))
    assert 0 <= first_guess(sizes, on_gpu=True) < len(sizes)


def test_the_longest_rows_are_tried() -> None:
    lengths = np.array([3, 9, 9, 1])
    assert longest(lengths, 2).tolist() == [1, 2]
    assert longest(lengths, 6).tolist() == [1, 2, 0, 3, -1, -1]


def test_a_checkpoint_remembers_until_the_recipe_changes() -> None:
    guard: dict[str, Any] = {}
    assert micro_batch.remembered(guard, asked=8, share=16) is None
    micro_batch.remember(guard, 4, asked=8)
    assert micro_batch.remembered(guard, asked=8, share=16) == 4
    assert micro_batch.remembered(guard, asked=8, share=6) == 3
    assert micro_batch.remembered(guard, asked=2, share=16) is None
    assert micro_batch.remembered(guard, asked="auto", share=16) is None


class Counted:
    """A loader whose windows are (step, size)."""

    def __init__(self, size: int) -> None:
        self.size = size

    def windows(self, start: int, left_out: Any) -> Iterator[tuple[int, int]]:
        while True:
            yield start, self.size
            start += 1


def test_a_split_stays_also_after_a_rollback() -> None:
    said: list[Any] = []
    progress = Progress()
    together: Any = SimpleNamespace()
    split = Split(
        together=together, progress=progress, asked=8, share=16, warn=said.append, event=lambda *a, **k: said.append(k)
    )
    windows = split.windows(lambda size: (Counted(size), None), 8)(0, ())
    trained = []

    def step() -> None:
        at, size = next(windows)
        if at == 1 and size > 2:
            raise TooLarge(3)
        trained.append((at, size))

    for _ in range(3):
        split.step(step)
    assert trained == [(0, 8), (1, 2), (2, 2)]
    assert [each for each in said if isinstance(each, dict)] == [
        {"rank": 3, "per_device": 4, "before": 8},
        {"rank": 3, "per_device": 2, "before": 4},
    ]
    progress.guard = {}  # what an earlier checkpoint has
    assert next(split._windows(0, ())) == (0, 2)
    assert micro_batch.remembered(progress.guard, asked=8, share=16) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["batch.per_device=auto", "batch.global=null"], "batch.per_device = auto needs batch.global"),
        (["batch.on_oom=split", "sharding.sync_batchnorm=true"], "batch.on_oom: split cannot be used with sharding"),
        (
            ["batch.per_device=auto", "batch.global=8", "sharding.sync_batchnorm=true"],
            "batch.per_device: auto cannot be used with sharding.sync_batchnorm = true",
        ),
    ],
)
def test_what_is_refused(changes: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message.replace(".", r"\.")):
        micro_batch.refuse(read("quickstart", *changes).recipe)


def test_passes_that_depend_on_each_other_are_refused() -> None:
    assert Reasoning.backward is not Objective.backward
    for changes in (["batch.on_oom=split"], ["batch.per_device=auto", "batch.global=8", "batch.accumulate=null"]):
        with pytest.raises(RecipeError, match="whose passes depend on each other"):
            micro_batch.refuse(read("embedding", *changes).recipe)
    micro_batch.refuse(read("quickstart", "batch.on_oom=split").recipe)
