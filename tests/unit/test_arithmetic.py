from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from fullshard.errors import RecipeError
from fullshard.recipe import Batch, Duration
from fullshard.setup.step_plan import StepPlan, plan_steps


def plan(**changes: Any) -> StepPlan:
    given: dict[str, Any] = {"num_rows": 2500, "world": 1, "epochs": 3, **changes}
    batch = {"per_device": given.pop("per_device", 8), "accumulate": given.pop("accumulate", None)}
    duration = Duration.model_validate({"epochs": given.pop("epochs"), "steps": given.pop("steps", None)})
    return plan_steps(Batch.model_validate({**batch, "global": given.pop("global_size", None)}), duration, **given)


def test_the_partial_last_window_is_a_step() -> None:
    result = plan(accumulate=8)
    assert (result.global_size, result.accumulate, result.steps_per_epoch, result.total_steps) == (64, 8, 40, 120)


@pytest.mark.parametrize("num_rows", [1, 63, 64, 65, 2500, 2560])
@pytest.mark.parametrize(("per_device", "accumulate", "world"), [(8, 8, 1), (8, 1, 8), (2, 4, 8), (64, 1, 1)])
def test_steps_equal_counting_windows_one_by_one(num_rows: int, per_device: int, accumulate: int, world: int) -> None:
    result = plan(num_rows=num_rows, per_device=per_device, accumulate=accumulate, world=world, epochs=2)
    window = per_device * accumulate * world
    windows = [range(start, min(start + window, num_rows)) for start in range(0, num_rows, window)]
    assert (result.steps_per_epoch, result.total_steps) == (len(windows), 2 * len(windows))


def test_batch_global_gives_the_accumulation_for_any_world_size() -> None:
    assert [plan(global_size=64, world=world).accumulate for world in (1, 2, 4, 8)] == [8, 4, 2, 1]
    assert {plan(global_size=64, world=world).total_steps for world in (1, 2, 4, 8)} == {120}


def test_a_global_batch_that_does_not_divide_names_the_nearest_that_do() -> None:
    with pytest.raises(RecipeError) as error:
        plan(global_size=100, per_device=4, world=8)
    assert str(error.value) == (
        "batch.global = 100 cannot be split evenly: 8 ranks x batch.per_device = 4 makes 32 per pass, "
        "and 100 is not a multiple of 32. Use batch.global = 96 or 128."
    )
    for good in (96, 128):
        assert plan(global_size=good, per_device=4, world=8).global_size == good


def test_a_global_batch_below_one_pass_offers_a_smaller_micro_batch() -> None:
    with pytest.raises(RecipeError, match=r"Use batch\.global = 64, or a smaller batch\.per_device"):
        plan(global_size=4, world=8)


@pytest.mark.parametrize(("epochs", "per_epoch", "total"), [(0.1, 30, 3), (0.5, 3, 2), (1.5, 40, 60), (2.001, 40, 81)])
def test_a_part_of_an_epoch_is_rounded_up_to_a_step(epochs: float, per_epoch: int, total: int) -> None:
    assert plan(num_rows=per_epoch * 8, epochs=epochs).total_steps == total


def test_duration_steps_may_end_within_an_epoch() -> None:
    result = plan(epochs=None, steps=7, accumulate=8)
    assert result.total_steps == 7
    assert math.isclose(result.epochs, 7 / 40)


def test_the_plan_describes_all_its_numbers() -> None:
    assert plan(accumulate=8, world=4).describe() == [
        "batch: 256 samples per step = 8 per device x 8 accumulated x 4 ranks",
        "steps: 30 = 3 epochs x 10 per epoch (2,500 samples; the last step of an epoch has 196)",
    ]
    assert plan(accumulate=8, world=4, packed=True).describe() == [
        "batch: 256 rows per step = 8 per device x 8 accumulated x 4 ranks",
        "steps: 30 = 3 epochs x 10 per epoch (2,500 rows; the last step of an epoch has 196)",
    ]
    assert "1 rank" in plan().describe()[0]
    assert plan().describe()[0].count("ranks") == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_rows": 0}, "no sample"),
        ({"steps": 3}, "exclude each other"),
        ({"epochs": None}, "exactly one"),
        ({"accumulate": 2, "global_size": 16}, "exclude each other"),
    ],
)
def test_contradictions_are_errors(changes: dict[str, Any], words: str) -> None:
    with pytest.raises((RecipeError, ValidationError), match=words):
        plan(**changes)
