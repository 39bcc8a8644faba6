"""The best model: what each validation means for it, and when a run stops for lack of a better one.

Must not know how anything is measured or saved.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fullshard.config.part import did_you_mean
from fullshard.contracts.objective import Direction
from fullshard.contracts.progress import Progress
from fullshard.errors import RecipeError
from fullshard.formatting import readable
from fullshard.log.console import Console


@dataclass(frozen=True)
class BestRule:
    """Which validation number decides, and which way."""

    metric: str
    mode: Direction
    against: bool = False
    """The recipe states a mode that contradicts what the evaluation says."""

    def better(self, value: float, than: float | None) -> bool:
        return than is None or (value < than if self.mode == "min" else value > than)

    def describe(self) -> str:
        return f"{'lowest' if self.mode == 'min' else 'highest'} {self.metric}"

    def warning(self) -> tuple[str, str] | None:
        """What is wrong with a mode that contradicts the metric, and what to do."""
        if not self.against:
            return None
        better = "higher" if self.mode == "min" else "lower"
        return (
            f"checkpoint.best.mode = {self.mode} keeps the model with the {self.describe()}, the worst one: a {better} "
            f"{self.metric} is better.",
            f"Leave mode out: checkpoint.best: {self.metric}.",
        )


def missing(metric: str, known: Iterable[str], why: str = "") -> str:
    names = sorted(known)
    return (
        f"checkpoint.best.metric = {metric!r} is not among the validation numbers{why or did_you_mean(metric, names)}: "
        f"{', '.join(names)}."
    )


def not_found(rule: BestRule, numbers: Mapping[str, float], *, saved: str | None) -> RecipeError:
    """The error when no evaluation gave the number that decides; `saved` says what is kept."""
    kept = f" {saved}: correct the recipe and run the same command again to go on from there." if saved else ""
    return RecipeError(
        missing(rule.metric, numbers) + f" Write checkpoint.best: {{metric: {next(iter(numbers))}, mode: max}} (or "
        f"min), or checkpoint.best: null.{kept}"
    )


def judge(
    rule: BestRule, progress: Progress, value: float, *, patience: int | None, console: Console
) -> tuple[str, bool]:
    """Whether to stop, and whether to keep this model as the best; the value is the same on every rank.

    Later values are compared with the first. A value from before the first step has no checkpoint."""
    _start_over(rule, progress, console)
    finite, name = math.isfinite(value), _name(rule)
    first = progress.first is None
    keep = finite and progress.step > 0 and rule.better(value, progress.best)
    gain = finite and (first or (rule.better(value, progress.best) and rule.better(value, progress.first)))
    if not finite:
        console.warn(f"{name} is {value} at step {progress.step}: it is never the best.")
    elif first:
        progress.first, progress.previous = value, value
        console.first_value(value, rule.metric)
    elif gain:
        console.new_best(value, rule.metric)
    elif keep:
        console.say(
            f"{name} {readable.number(value)} is worse than {readable.number(progress.first or 0)} before training."
        )
    if not first:
        _follow(rule, progress, value, console)
    if keep:
        progress.best, progress.best_step = value, progress.step
    progress.validations_without_gain = 0 if gain else progress.validations_without_gain + 1
    if patience and progress.validations_without_gain >= patience:
        console.say(f"Stopping early: {patience} validations without a better {rule.metric}.")
        progress.finished = True
        return "patience", keep
    return "done", keep


def _start_over(rule: BestRule, progress: Progress, console: Console) -> None:
    """Forgets values of another number or another direction: they cannot be compared."""
    by = f"{rule.mode} {rule.metric}"
    if progress.best_by not in (None, by):
        console.note(f"checkpoint.best was by {progress.best_by} and is by {by}: the best is looked for from here on.")
        progress.best = progress.best_step = progress.first = progress.previous = None
        progress.validations_without_gain = progress.only_worse = 0
    if progress.best_by is None and progress.best is not None:  # a checkpoint without the first value
        progress.first, progress.only_worse = progress.best, -1
    progress.best_by = by


def _follow(rule: BestRule, progress: Progress, value: float, console: Console) -> None:
    """Warns when no validation since the first was better than the one before it."""
    before = progress.previous
    worse = not math.isfinite(value) or (before is not None and rule.better(before, value))
    progress.previous = value if math.isfinite(value) else before
    progress.only_worse = progress.only_worse + 1 if worse and progress.only_worse >= 0 else -1
    if line := only_worse(rule, progress):
        console.warn(line)


def only_worse(rule: BestRule, progress: Progress) -> str | None:
    """A warning when every validation since the first was worse than the one before it."""
    if progress.only_worse < 1 or progress.first is None or progress.previous is None:
        return None
    gone = "risen" if rule.mode == "min" else "fallen"
    since = "at every evaluation since the first" if progress.only_worse > 1 else "since the first evaluation"
    return (
        f"validation {rule.metric} has {gone} {since} ({readable.number(progress.first)} → "
        f"{readable.number(progress.previous)}): optimizer.lr is probably too high, or the model memorises its "
        "training data."
    )


def outcome(rule: BestRule | None, progress: Progress) -> str:
    """The best value in one line, for the end of the run."""
    if progress.best is None or rule is None:
        return "none"
    text = f"{readable.precise(progress.best)} at step {progress.best_step}"
    if progress.first == progress.best:
        return f"{text}, the first evaluation; no later one was better" if progress.only_worse else text
    beaten = progress.first is not None and rule.better(progress.first, progress.best)
    return f"{text}, worse than {readable.number(progress.first or 0)} before training" if beaten else text


def _name(rule: BestRule) -> str:
    return f"Val {readable.title(rule.metric)}"
