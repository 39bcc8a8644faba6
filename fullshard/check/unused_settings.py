"""Settings without effect in this run: on these ranks, with this data, in this number of steps.

Defaults are never reported. Must not know models.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fullshard.check.findings import Finding, warning
from fullshard.config.section import without_effect
from fullshard.contracts.launcher import Ranks
from fullshard.formatting.plural import counted

if TYPE_CHECKING:
    from fullshard.recipe import Checkpoint, Data, Evaluate, Log, Recipe
    from fullshard.setup.inputs import RunInputs

LEAVE_OUT = "Leave it out."


def of_sharding(recipe: Recipe, ranks: Ranks, *, device: str, shards: int | None) -> Iterator[Finding]:
    """Keys of the sharding section without effect on these ranks; `shards` is None if unknown."""
    sharding = recipe.sharding
    for line in (*without_effect(recipe), *recipe.guard.unused()):
        yield warning("no effect", line, LEAVE_OUT)
    if sharding.cpu_offload and device == "cpu":
        text = "sharding.cpu_offload has no effect on a CPU: everything is in host memory already."
        yield warning("no effect", text, LEAVE_OUT)
    if sharding.forward_prefetch and shards == 1:
        where = f"with strategy {sharding.strategy} on {counted(ranks.per_node * ranks.nodes, 'rank')}"
        text = f"sharding.forward_prefetch has no effect: {where} every rank holds all parameters already."
        yield warning("no effect", text, LEAVE_OUT)
    if sharding.wrap and sharding.wrap.whole:
        asked = {
            "activation_checkpointing": sharding.activation_checkpointing != "none",
            "compile": sharding.compile is True,
            "forward_prefetch": sharding.forward_prefetch,
        }
        for key in (key for key, is_asked in asked.items() if is_asked):
            text = (
                f"sharding.{key} has no effect with sharding.wrap.whole: it works per block, and the model is one unit."
            )
            yield warning("no effect", text, f"Leave out sharding.{key}, or sharding.wrap.")


def of_evaluation(recipe: Recipe, inputs: RunInputs | None) -> Iterator[Finding]:
    """Settings that wait for a validation that never comes."""
    evaluate, data = recipe.evaluate, recipe.data
    validates = has_validation(recipe, inputs)
    if not validates:
        for key in ("every_steps", "per_device", "patience"):
            if getattr(evaluate, key) is not None and not _needs_no_data(evaluate):
                text = f"evaluate.{key} has no effect: there is no validation data."
                yield warning("no effect", text, "Set data.validation or a data.holdout above 0, or leave it out.")
    elif not evaluate.parts:
        kept = "data.validation" if data.validation else f"data.holdout = {data.holdout:g}"
        text = f"{kept} is held out but never used: evaluate.parts is empty."
        yield warning("no effect", text, "Leave evaluate.parts out, or set data.holdout to 0.")
    if data.validation is not None and data.holdout not in (0, _default(data, "holdout")):
        yield warning("no effect", "data.holdout has no effect: data.validation is set.", LEAVE_OUT)
    if evaluate.patience is not None and validates:
        yield from _patience(recipe, inputs)


def _patience(recipe: Recipe, inputs: RunInputs | None) -> Iterator[Finding]:
    evaluate = recipe.evaluate
    if recipe.checkpoint.best is None:
        text = "evaluate.patience has no effect: checkpoint.best is null, so validations are not compared."
        yield warning("no effect", text, "Leave checkpoint.best out, or evaluate.patience.")
    elif inputs and evaluate.parts:
        plan = inputs.plan
        times = plan.total_steps // evaluate.every_steps if evaluate.every_steps else 0
        times += int(plan.epochs // evaluate.every_epochs) if evaluate.every_epochs else 0
        if times <= (evaluate.patience or 0):
            runs = f"the run has {counted(times, 'validation')}, and the first is always the best"
            text = f"evaluate.patience = {evaluate.patience} has no effect: {runs}."
            yield warning("no effect", text, "Lower it, or validate more often with evaluate.every_steps.")


def of_intervals(recipe: Recipe, inputs: RunInputs | None) -> Iterator[Finding]:
    """Intervals that are longer than the run."""
    if inputs is None:
        return
    plan = inputs.plan
    for name in ("checkpoint", "evaluate", "log"):
        section: Checkpoint | Evaluate | Log = getattr(recipe, name)
        if name == "evaluate" and not has_validation(recipe, inputs):
            continue
        steps = section.every_steps
        if steps is not None and steps > plan.total_steps and steps != _default(section, "every_steps"):
            length = counted(plan.total_steps, "step")
            text = f"{name}.every_steps = {steps:,} has no effect: the run has only {length}."
            remedy = f"Lower it, for instance to {max(plan.total_steps // 5, 1):,}, or leave it out."
            yield warning("no effect", text, remedy)
        epochs = getattr(section, "every_epochs", None)
        if epochs is not None and epochs > max(plan.epochs, 1):
            text = f"{name}.every_epochs = {epochs} has no effect: the run has only {counted(plan.epochs, 'epoch')}."
            yield warning("no effect", text, "Lower it, or set it to null.")


def has_validation(recipe: Recipe, inputs: RunInputs | None) -> bool:
    """Whether there is validation data."""
    if inputs:
        return inputs.data.validation is not None
    return recipe.data.validation is not None or recipe.data.holdout > 0


def gives_numbers(recipe: Recipe, inputs: RunInputs | None) -> bool:
    """Whether a validation can give a number; some evaluations need no data."""
    from fullshard.control import best

    module = inputs.module if inputs else None
    held_out = has_validation(recipe, inputs)
    return best.gives_numbers(recipe.evaluate.parts, recipe.objective, module, held_out=held_out)


def _needs_no_data(evaluate: Evaluate) -> bool:
    """Whether some evaluation runs without validation data."""
    return any(not part.needs_held_out and not part.only_at_end for part in evaluate.parts)


def _default(section: Checkpoint | Data | Evaluate | Log, key: str) -> Any:
    return type(section).model_fields[key].get_default()
