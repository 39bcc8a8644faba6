"""Learning-rate schedules against those of Transformers and torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import StepLR
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from fullshard.config.part import decode, kinds
from fullshard.contracts.schedule import Schedule
from fullshard.errors import RecipeError

TOTAL = 40


def schedule(value: Any) -> Schedule:
    return decode(Schedule, value, where="schedule")


def factors(value: Any, total: int = TOTAL) -> list[float]:
    made = schedule(value)
    return [made.factor(step, total) for step in range(total)]


def rates(make: Any) -> list[float]:
    """The rates that a torch scheduler gives to the steps of a run."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer)
    found = []
    for _ in range(TOTAL):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(
    ("kind", "reference"), [("linear", get_linear_schedule_with_warmup), ("cosine", get_cosine_schedule_with_warmup)]
)
def test_decay_is_that_of_transformers(kind: str, reference: Any) -> None:
    assert factors(kind) == pytest.approx(rates(lambda o: reference(o, 0, TOTAL)), abs=1e-12)


@pytest.mark.parametrize(
    ("kind", "reference"), [("linear", get_linear_schedule_with_warmup), ("cosine", get_cosine_schedule_with_warmup)]
)
def test_after_warmup_decay_is_that_of_transformers(kind: str, reference: Any) -> None:
    """Transformers' first step has rate 0 and moves nothing; ours starts with the first part of the way up."""
    ours, theirs = factors({"kind": kind, "warmup": 8}), rates(lambda o: reference(o, 8, TOTAL))
    assert ours[8:] == pytest.approx(theirs[8:], abs=1e-12)
    assert ours[:8] == pytest.approx([(step + 1) / 8 for step in range(8)])
    assert theirs[1:8] == pytest.approx(ours[:7])


def test_step_is_that_of_torch() -> None:
    ours = factors({"kind": "step", "step_size": 7, "gamma": 0.3})
    assert ours == pytest.approx(rates(lambda o: StepLR(o, 7, 0.3)), abs=1e-12)


def test_constant_stays_and_is_warmed_up() -> None:
    assert factors("constant") == [1.0] * TOTAL
    assert factors({"kind": "constant", "warmup": 4})[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize("kind", kinds(Schedule))
def test_every_schedule_starts_at_the_base_rate_and_stays_within_it(kind: str) -> None:
    found = factors({"kind": kind, "warmup": 5})
    assert found[4] == 1.0
    assert all(0 <= factor <= 1 for factor in found)
    assert schedule(kind).factor(TOTAL + 10, TOTAL) >= 0, "a longer run may ask beyond the end"


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_floor_is_reached_and_kept(kind: str) -> None:
    made = schedule({"kind": kind, "floor": 0.1})
    assert made.factor(0, TOTAL) == 1.0
    assert made.factor(TOTAL, TOTAL) == pytest.approx(0.1)
    assert made.factor(2 * TOTAL, TOTAL) == pytest.approx(0.1)


@pytest.mark.parametrize(("warmup", "steps"), [(0, 0), (10, 10), (0.05, 2), ("0.1", 4), (1, 1), (0.99, 40)])
def test_warmup_is_steps_or_a_share(warmup: Any, steps: int) -> None:
    assert schedule({"kind": "linear", "warmup": warmup}).warmup_steps(TOTAL) == steps


@pytest.mark.parametrize("warmup", [-1, 1.5, -0.1])
def test_warmup_out_of_range_is_refused(warmup: Any) -> None:
    with pytest.raises(RecipeError, match=r"schedule.warmup.*number of steps \(0, 100\) or a share"):
        schedule({"kind": "linear", "warmup": warmup})


def test_warmup_as_long_as_the_run_never_divides_by_zero() -> None:
    assert factors({"kind": "cosine", "warmup": TOTAL})[-1] == 1.0
    assert factors({"kind": "linear", "warmup": 1000})[-1] == TOTAL / 1000


def test_an_unknown_schedule_lists_the_known_ones() -> None:
    with pytest.raises(RecipeError, match=r"schedule.kind = 'cosin' is not known.*did you mean 'cosine'"):
        schedule("cosin")


def test_the_warm_up_help_states_the_difference_to_transformers() -> None:
    """In the description that editors and `fullshard recipes schema` show."""
    text = " ".join((Schedule.model_fields["warmup"].description or "").split())
    assert "Step n of N has n/N of the rate" in text
    assert "Transformers" in text
