"""A resumed run whose settings give another learning rate says so, with both rates and what changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fullshard.contracts.progress import Progress
from fullshard.control.resume import rate_change


def recipe(**changes: Any) -> dict[str, Any]:
    sections: dict[str, Any] = {
        "duration": {"epochs": None, "steps": 100},
        "schedule": {"kind": "cosine", "warmup": 0},
        "optimizer": {"kind": "adamw", "lr": 3e-4, "betas": [0.9, 0.95]},
    }
    for key, values in changes.items():
        sections[key] = sections[key] | values
    return sections


def said(before: dict[str, Any], now: dict[str, Any], step: int, *, steps_per_epoch: int = 50) -> str | None:
    return rate_change(before, now, Progress(step=step, schedule_step=step), steps_per_epoch=steps_per_epoch)


def rates(total: int) -> list[float]:
    """Torch's own cosine."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=3e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
    found = []
    for _ in range(total):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return found


def test_a_longer_cosine_schedule_reports_both_rates() -> None:
    line = said(recipe(), recipe(duration={"steps": 200}, optimizer={"betas": [0.9, 0.99]}), 90)
    had, has, following = rates(100)[89], rates(200)[89], rates(200)[90]
    assert line == (
        f"The learning rate at step 90 was {had:.3g} and is {has:.3g} by this recipe; the next step has "
        f"{following:.3g}. Changed: duration.steps: 100 then, 200 now."
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"duration": {"epochs": 4.0, "steps": None}}, "duration.epochs: not set then, 4.0 now"),
        ({"schedule": {"kind": "linear"}}, "schedule.kind: cosine then, linear now"),
        ({"optimizer": {"lr": 1e-3}}, "optimizer.lr: 0.0003 then, 0.001 now"),
        ({"schedule": {"warmup": 80}}, "schedule.warmup: 0 then, 80 now"),
    ],
)
def test_whatever_moves_the_rate_is_named(change: dict[str, Any], words: str) -> None:
    line = said(recipe(), recipe(**change), 60)
    assert line is not None
    assert words in line


def test_changes_that_keep_the_rate_are_not_reported() -> None:
    constant = {"schedule": {"kind": "constant"}}
    assert said(recipe(**constant), recipe(**constant, duration={"steps": 900}), 90) is None
    assert said(recipe(), recipe(optimizer={"betas": [0.9, 0.99]}), 90) is None
    # Two epochs of 50 steps are the 100 steps that they were.
    assert said(recipe(), recipe(duration={"epochs": 2.0, "steps": None}), 90) is None
    assert said(recipe(), recipe(duration={"steps": 200}), 0) is None


def test_a_schedule_that_is_not_installed_is_ignored() -> None:
    assert said(recipe(schedule={"kind": "gone.away.Mine"}), recipe(duration={"steps": 200}), 90) is None
