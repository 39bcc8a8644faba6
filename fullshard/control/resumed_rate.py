"""Whether a resumed run goes on with the learning rate that it had, and why not.

A schedule is a function of the run's length: a run that is made longer goes back up its curve. Must not know
checkpoints or optimizers.
"""

from __future__ import annotations

import contextlib
import math
from fractions import Fraction
from typing import Any

from fullshard.config.part import decode
from fullshard.contracts.progress import Progress
from fullshard.contracts.schedule import Schedule
from fullshard.errors import RecipeError


def jump(before: dict[str, Any], now: dict[str, Any], progress: Progress, *, steps_per_epoch: int) -> str | None:
    """What to say where the settings of `now` give the last step another rate than those of `before`, which it was
    trained with; both are whole recipes."""
    done = progress.schedule_step - 1
    if done < 0:
        return None
    with contextlib.suppress(RecipeError, KeyError, TypeError, ValueError):  # a part that is not there any more
        had, has = _rate(before, done, steps_per_epoch), _rate(now, done, steps_per_epoch)
        if not math.isclose(had, has, rel_tol=1e-9, abs_tol=1e-15):
            following = _rate(now, done + 1, steps_per_epoch)
            return (
                f"The learning rate at step {progress.step:,} was {had:.3g} and is {has:.3g} by this recipe; the next "
                f"step has {following:.3g}. Changed: {'; '.join(_reasons(before, now))}."
            )
    return None


def _rate(recipe: dict[str, Any], step: int, steps_per_epoch: int) -> float:
    duration, schedule = recipe["duration"], decode(Schedule, recipe["schedule"], where="schedule")
    total = duration.get("steps") or math.ceil(Fraction(str(duration["epochs"])) * steps_per_epoch)
    return float(recipe["optimizer"]["lr"] * schedule.factor(step, total))


def _reasons(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    changed = []
    for section in ("duration", "schedule", "optimizer"):
        old, new = before[section], now[section]
        for key in dict.fromkeys((*old, *new)):
            if (section != "optimizer" or key == "lr") and old.get(key) != new.get(key):
                changed.append(f"{section}.{key} went from {_show(old.get(key))} to {_show(new.get(key))}")
    return changed


def _show(value: Any) -> str:
    return "not set" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


__all__ = ["jump"]
