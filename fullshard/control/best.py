"""The best model: which validation number decides, whether a validation found it, and when patience ends.

Names and directions come from the evaluations; the loss is the only metric known here, and lower is always better.
Must not know how anything is measured or saved.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fullshard.checkpoint.settings import Best
from fullshard.config.part import did_you_mean
from fullshard.contracts.ema import Ema
from fullshard.contracts.evaluation import Evaluation
from fullshard.contracts.objective import Direction, Numbers, Objective
from fullshard.contracts.progress import Progress
from fullshard.errors import RecipeError
from fullshard.formatting import readable
from fullshard.log.console import Console

if TYPE_CHECKING:
    from torch import nn

LOSS: Numbers = {"loss": "min"}


@dataclass(frozen=True)
class BestRule:
    """Which validation number decides, and which way."""

    metric: str
    mode: Direction
    contradicts: bool = False
    """The recipe states the opposite of what the evaluation declares."""

    def better(self, value: float, than: float | None) -> bool:
        return than is None or (value < than if self.mode == "min" else value > than)

    def describe(self) -> str:
        return f"{'lowest' if self.mode == 'min' else 'highest'} {self.metric}"


def best_rule(
    best: Best | None, parts: Sequence[Evaluation], objective: Objective, model: nn.Module, ema: Ema | None
) -> BestRule | None:
    """The recipe's rule; raises if no evaluation gives the number, or if its direction is unknown."""
    if best is None:
        return None
    said = [_said(part, objective, model) for part in parts if not part.only_at_end]
    known: Numbers = {name: mode for numbers in said for name, mode in (LOSS if numbers is None else numbers).items()}
    known = ema.names(known) if ema else known
    if (right := known.get(best.metric)) is not None:
        return BestRule(best.metric, best.mode or right, contradicts=best.mode not in (None, right))
    if None not in said and known:
        late = [
            part.kind() for part in parts if part.only_at_end and best.metric in (_said(part, objective, model) or {})
        ]
        why = f" (evaluate.parts: {late[0]} gives it at the end only, when nothing is left to choose)" if late else ""
        write = f" Write checkpoint.best: {next(iter(known))}, or checkpoint.best: null for no best checkpoint."
        raise RecipeError(missing(best.metric, known, why) + write)
    if None in said and best.mode is None:
        raise RecipeError(
            f"checkpoint.best.metric = {best.metric!r}: no evaluation says whether lower or higher is better"
            f"{did_you_mean(best.metric, list(known))}. Write checkpoint.best: {{metric: {best.metric}, mode: max}} "
            f'(or min), or declare it in the evaluation: numbers = {{"{best.metric}": "max"}} in its class.'
        )
    return BestRule(best.metric, best.mode or "min")


def _said(part: Evaluation, objective: Objective, model: nn.Module) -> Numbers | None:
    numbers = part.gives(objective, model)
    if numbers is not None and not (
        isinstance(numbers, Mapping) and all(mode in ("min", "max") for mode in numbers.values())
    ):
        raise RecipeError(
            f"evaluate.parts: {part.kind()} with objective.kind = {objective.kind()} declares {numbers!r}. "
            'It must declare each number with its direction, such as numbers = {"loss": "min", "accuracy": "max"}.'
        )
    return numbers


def gives_numbers(
    parts: Sequence[Evaluation], objective: Objective, model: nn.Module | None, *, held_out: bool
) -> bool:
    """Whether a validation gives a number that could decide; without a model, numbers that depend on it count."""
    runs = [part for part in parts if not part.only_at_end and (held_out or not part.needs_held_out)]
    return any(part.gives(objective, model) != {} if model is not None else part.numbers != {} for part in runs)


def missing(metric: str, known: Iterable[str], why: str = "") -> str:
    names = sorted(known)
    return (
        f"checkpoint.best.metric = {metric!r} is not among the validation numbers{why or did_you_mean(metric, names)}: "
        f"{', '.join(names)}."
    )


def not_found(rule: BestRule, numbers: Mapping[str, float], *, saved: str | None) -> RecipeError:
    """The error if no evaluation gave the number that decides; `saved` says which model is saved."""
    kept = f" {saved}: correct the recipe and run the same command again to continue from there." if saved else ""
    return RecipeError(
        missing(rule.metric, numbers) + f" Write checkpoint.best: {{metric: {next(iter(numbers))}, mode: max}} (or "
        f"min), or checkpoint.best: null.{kept}"
    )


def judge(
    rule: BestRule, progress: Progress, value: float, *, patience: int | None, console: Console
) -> tuple[str, bool]:
    """Whether to stop, and whether to keep this model as the best; the value is the same on every rank.

    Later values are compared with the first. A value from before the first step has no checkpoint."""
    _forget_other_metric(rule, progress, console)
    finite, first, name = math.isfinite(value), progress.first is None, f"Val {readable.title(rule.metric)}"
    keep = finite and progress.step > 0 and rule.better(value, progress.best)
    gain = finite and (first or (rule.better(value, progress.best) and rule.better(value, progress.first)))
    if not finite:
        console.warn(f"{name} is {value} at step {progress.step}: it cannot be the best.")
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
        _track_decline(rule, progress, value, console)
    if keep:
        progress.best, progress.best_step = value, progress.step
    progress.validations_without_gain = 0 if gain else progress.validations_without_gain + 1
    if patience and progress.validations_without_gain >= patience:
        console.say(f"Stopping early: {patience} validations without a better {rule.metric}.")
        progress.finished = True
        return "patience", keep
    return "done", keep


def _forget_other_metric(rule: BestRule, progress: Progress, console: Console) -> None:
    """Forgets values of another metric or direction: they cannot be compared."""
    by = f"{rule.mode} {rule.metric}"
    if progress.best_by not in (None, by):
        console.note(f"checkpoint.best changed from {progress.best_by} to {by}: the search for the best starts over.")
        progress.best = progress.best_step = progress.first = progress.previous = None
        progress.validations_without_gain = progress.only_worse = 0
    if progress.best_by is None and progress.best is not None:  # a checkpoint without the first value
        progress.first, progress.only_worse = progress.best, -1
    progress.best_by = by


def _track_decline(rule: BestRule, progress: Progress, value: float, console: Console) -> None:
    """Warns if every validation since the first was worse than the one before it."""
    before = progress.previous
    worse = not math.isfinite(value) or (before is not None and rule.better(before, value))
    progress.previous = value if math.isfinite(value) else before
    progress.only_worse = progress.only_worse + 1 if worse and progress.only_worse >= 0 else -1
    if line := only_worse(rule, progress):
        console.warn(line)


def only_worse(rule: BestRule, progress: Progress) -> str | None:
    """The warning; None if it does not apply."""
    if progress.only_worse < 1 or progress.first is None or progress.previous is None:
        return None
    gone = "risen" if rule.mode == "min" else "fallen"
    since = "at every evaluation since the first" if progress.only_worse > 1 else "since the first evaluation"
    return (
        f"validation {rule.metric} has {gone} {since} ({readable.number(progress.first)} → "
        f"{readable.number(progress.previous)}): optimizer.lr may be too high, or the model memorises its data."
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
