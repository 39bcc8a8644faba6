"""Which validation number decides the best model, and which way, as the recipe says.

Names and directions come from the evaluations themselves; the loss is the only metric known here, and it is always
minimised. Must not know how anything is measured or saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from fullshard.checkpoint.settings import Best
from fullshard.config.part import did_you_mean
from fullshard.contracts.ema import Ema
from fullshard.contracts.evaluation import Evaluation
from fullshard.contracts.objective import Numbers, Objective
from fullshard.control.best import BestRule, missing
from fullshard.errors import RecipeError

LOSS: Numbers = {"loss": "min"}


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
        raise RecipeError(_not_given(best.metric, known, parts, objective, model))
    if None in said and best.mode is None:
        raise RecipeError(
            f"checkpoint.best.metric = {best.metric!r}: no evaluation says whether lower or higher is better"
            f"{did_you_mean(best.metric, list(known))}. Write checkpoint.best: {{metric: {best.metric}, mode: max}} "
            f'(or min), or have the evaluation say it: numbers = {{"{best.metric}": "max"}} in its class.'
        )
    return BestRule(best.metric, best.mode or "min")


def _said(part: Evaluation, objective: Objective, model: nn.Module) -> Numbers | None:
    numbers = part.gives(objective, model)
    if numbers is not None and not (
        isinstance(numbers, Mapping) and all(mode in ("min", "max") for mode in numbers.values())
    ):
        raise RecipeError(
            f"evaluate.parts: {part.kind()} with objective.kind = {objective.kind()} says that it gives {numbers!r}. "
            'It must say each number\'s name and direction, such as numbers = {"loss": "min", "accuracy": "max"}.'
        )
    return numbers


def _not_given(metric: str, known: Numbers, parts: Sequence[Evaluation], objective: Objective, model: nn.Module) -> str:
    late = [part.kind() for part in parts if part.only_at_end and metric in (_said(part, objective, model) or {})]
    why = f" (evaluate.parts: {late[0]} gives it at the end only, when nothing is left to choose)" if late else ""
    write = f" Write checkpoint.best: {next(iter(known))}, or checkpoint.best: null for no best checkpoint."
    return missing(metric, known, why) + write


def mode_warning(rule: BestRule) -> tuple[str, str] | None:
    """What is wrong with a mode that contradicts the evaluation, and what to do."""
    if not rule.contradicts:
        return None
    better = "higher" if rule.mode == "min" else "lower"
    return (
        f"checkpoint.best.mode = {rule.mode} keeps the model with the {rule.describe()}, the worst one: a {better} "
        f"{rule.metric} is better.",
        f"Leave mode out: checkpoint.best: {rule.metric}.",
    )


def gives_numbers(
    parts: Sequence[Evaluation], objective: Objective, model: nn.Module | None, *, held_out: bool
) -> bool:
    """Whether a validation gives a number that could decide; without a model, numbers that depend on it count."""
    runs = [part for part in parts if not part.only_at_end and (held_out or not part.needs_held_out)]
    return any(part.gives(objective, model) != {} if model is not None else part.numbers != {} for part in runs)
