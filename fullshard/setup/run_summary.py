"""Describes a run as it was built: its header, and the recipe with every "auto" resolved. Must not decide anything."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from fullshard.contracts.evaluation import Evaluation
from fullshard.contracts.optimizer import describe_groups
from fullshard.contracts.world import World
from fullshard.control.triggers import Due
from fullshard.dist.recompute import of_block
from fullshard.formatting.plural import counted
from fullshard.multimodal import balance
from fullshard.recipe import Recipe
from fullshard.setup.built import Built
from fullshard.setup.inputs import RunInputs
from fullshard.setup.step_plan import StepPlan

NO_BLOCKS = "it works block by block, and the model is one unit"
NO_DATA = "there is no validation data"
NO_WORKERS = "none: each rank reads its data between steps"


def header_rows(
    recipe: Recipe, inputs: RunInputs, world: World, built: Built, checkpoint: Path | None, memory: list[str]
) -> list[tuple[str, str]]:
    """Label and fact, in reading order."""
    rows = [
        ("world", world.describe()),
        ("sharding", built.model.plan.layout.describe()),
        ("units", _units(built)),
        ("precision", built.model.precision.describe()),
        *_kept_in_fp32(built),
        *_float8(built),
        ("attention", built.model.kernels),
        ("compile", _compile(built)),
        ("recompute", _recompute(built)),
        *_dropout(built),
    ]
    for line in [*inputs.data.report, *built.plan.describe()]:
        label, _, text = line.partition(": ")
        rows.append((label, text) if text else ("data", line))
    rows += balance.described(recipe.data.balance, inputs.data)
    workers = f"{counted(built.workers, 'loader process')} per rank" if built.workers else NO_WORKERS
    rows += [("workers", workers), ("optimizer", _optimizer(recipe, inputs))]
    names = [name for name, _ in built.model.module.named_parameters()]
    groups = [*(recipe.optimizer.by_name or []), *recipe.model.groups(built.model.module)]
    rows += [("group", line) for line in describe_groups(groups, names)]
    if recipe.ema:
        rows.append(("ema", recipe.ema.describe(evaluated=bool(_running(recipe, inputs)))))
    rows += [
        ("evaluate", _evaluated(recipe, inputs, built)),
        ("checkpoints", _checkpoints(recipe, inputs, built)),
        ("export", _exported(recipe, built)),
        ("guard", recipe.guard.describe()),
    ]
    rows += [("MFU", mfu.describe())] if (mfu := built.parts.report.meters.mfu) else []
    rows += [("memory", line) for line in memory]
    rows += [("proven", proof) for proof in built.proofs]
    if checkpoint is not None:
        rows.append(("resumed", f"{checkpoint} at step {built.parts.progress.step}"))
    rows.append(("run folder", str(recipe.folder)))
    return rows


def resolved(recipe: Recipe, inputs: RunInputs, world: World, built: Built) -> Recipe:
    """The recipe with every "auto" replaced by what it became."""
    model, parts = built.model, built.parts
    checkpoint: dict[str, Any] = {"asynchronous": parts.saves.saver.background is not None}
    if recipe.checkpoint.best and parts.validation.best:
        checkpoint["best"] = recipe.checkpoint.best.model_copy(update={"mode": parts.validation.best.mode})
    sections: dict[str, dict[str, Any]] = {
        "sharding": {"strategy": model.plan.layout.strategy, "compile": model.plan.compile},
        "data": {
            "encode": inputs.data.encoder.settings,
            "workers": built.workers,
            "balance": balance.chosen(recipe.data.balance, inputs.data),
        },
        "batch": {"per_device": built.plan.per_device},
        "topology": {"device": world.device.type, "backend": world.backend, "devices": world.local_size},
        "checkpoint": checkpoint,
    }
    changed = {name: getattr(recipe, name).model_copy(update=changes) for name, changes in sections.items()}
    return recipe.model_copy(update={"precision": model.precision.word, **changed})


def _units(built: Built) -> str:
    classes = Counter(unit.class_name for unit in built.model.units)
    ties = sum(len(unit.tied) for unit in built.model.units)
    tied = f"; {counted(ties, 'tied group')}" if ties else ""
    found = ", ".join(f"{count} x {name}" for name, count in classes.items())
    return f"{found} ({built.model.plan.wrap.reason}{tied})"


def _compile(built: Built) -> str:
    plan = built.model.plan
    if plan.compile and not plan.wrap.blocks:
        return f"off: {NO_BLOCKS}"
    return "each block" if plan.compile else "off"


def _recompute(built: Built) -> str:
    plan = built.model.plan
    asked = plan.activation_checkpointing
    if plan.recompute:
        count = counted(len(plan.recompute), "block")
        return f"activation checkpointing {asked}, except for {count} that optimizer.groups or model.towers name"
    if asked == "none" or not plan.wrap.blocks:
        return "off" if asked == "none" else f"off: {NO_BLOCKS}"
    whole = sum(of_block(block, asked, plan.wrap.units) != asked for block in plan.wrap.blocks)
    rest = f", full in {counted(whole, 'block')} that contain other units" if whole else ""
    return f"activation checkpointing {asked}{rest}"


def _dropout(built: Built) -> list[tuple[str, str]]:
    """An exception to the promise that losses do not depend on the split."""
    most = max(active_dropout(built.model.module).values(), default=0)
    line = f"up to {most:g}: another number of ranks or another micro-batch draws other noise"
    return [("dropout", line)] if most else []


def _kept_in_fp32(built: Built) -> list[tuple[str, str]]:
    """What a half precision leaves alone, and what it could not."""
    wrap, word = built.model.plan.wrap, built.model.precision.word
    lines = []
    if wrap.exact and word != "fp32":
        named = ", ".join(wrap.exact[:2])
        lines.append(f"{counted(len(wrap.exact), 'unit')} (routers, the model's own list): {named} ...")
    if wrap.inexact and word != "fp32":
        lines.append(
            f"not {counted(len(wrap.inexact), 'single parameter')} of the model's own list, which compute in {word} "
            f"with the module around them: {', '.join(wrap.inexact[:2])} ..."
        )
    return [("in fp32", line) for line in lines]


def _float8(built: Built) -> list[tuple[str, str]]:
    plan = built.model.plan
    return (
        [("float8", plan.float8.describe(built.model.module, plan.wrap.blocks, plan.wrap.exact))] if plan.float8 else []
    )


def _optimizer(recipe: Recipe, inputs: RunInputs) -> str:
    optimizer, schedule = recipe.optimizer, recipe.schedule
    clip = f"clipped at norm {optimizer.clip:g}" if optimizer.clip else "not clipped"
    steps = schedule.warmup_steps(inputs.plan.total_steps)
    warmup = f" after {counted(steps, 'step')} of warm-up" if steps else ""
    return f"{optimizer.kind()}, lr {optimizer.lr:g}, {schedule.kind()} schedule{warmup}, gradients {clip}"


def _evaluated(recipe: Recipe, inputs: RunInputs, built: Built) -> str:
    """What is evaluated, and when; the end of the run always is."""
    parts, due, done = _running(recipe, inputs), built.parts.validation.due, built.parts.progress.step
    if not parts:
        return f"never: {'evaluate.parts is empty' if not recipe.evaluate.parts else NO_DATA}"
    often = [part.kind() for part in parts if not part.only_at_end]
    late = [part.kind() for part in parts if part.only_at_end]
    when = ["before the first step"] if due.at_start and not done else []
    when += [*intervals(due, inputs.plan, done), "at the end"]
    lines = [f"{', '.join(often)} {', '.join(when)}"] if often else []
    return "; ".join([*lines, *([f"{', '.join(late)} at the end"] if late else [])])


def _running(recipe: Recipe, inputs: RunInputs) -> list[Evaluation]:
    """The evaluations that have what they need."""
    held_out = inputs.data.validation is not None
    return [part for part in recipe.evaluate.parts if held_out or not part.needs_held_out]


def intervals(due: Due, plan: StepPlan, done: int) -> list[str]:
    """The intervals that fall within the remaining steps. A run that ends within an epoch ends that epoch."""
    found = []
    if due.every_steps and plan.total_steps // due.every_steps > done // due.every_steps:
        found.append("every step" if due.every_steps == 1 else f"every {due.every_steps:,} steps")
    last, before = math.ceil(plan.total_steps / plan.steps_per_epoch), done // plan.steps_per_epoch
    if due.every_epochs and last // due.every_epochs > before // due.every_epochs:
        found.append("every epoch" if due.every_epochs == 1 else f"every {due.every_epochs} epochs")
    if due.every_minutes:
        found.append(f"every {due.every_minutes:g} minutes")
    return found


def _checkpoints(recipe: Recipe, inputs: RunInputs, built: Built) -> str:
    policy, best_rule, saver = recipe.checkpoint, built.parts.validation.best, built.parts.saves.saver
    when = intervals(built.parts.saves.due, inputs.plan, built.parts.progress.step)
    when += [f"at each best ({best_rule.describe()})"] if best_rule else []
    when += ["at the end"] if policy.at_end else []
    why = NO_DATA if inputs.data.validation is None else "no evaluation finds a number"
    unjudged = f"; no best checkpoint: {why}" if policy.best and best_rule is None else ""
    if not when:
        return f"none: nothing will be saved, unless a signal stops the run{unjudged}"
    best = ", and the best" if best_rule else ""
    kept = f"the last {policy.keep if policy.keep > 1 else 'one'} kept{best}" if policy.keep else "all kept"
    how = f"{policy.format}, {'in the background' if saver.background else 'training waits for each'}"
    where = f", in {saver.target.run}" if policy.store else ""
    return f"{', '.join(when)}; {how}; {kept}{where}{unjudged}"


def _exported(recipe: Recipe, built: Built) -> str:
    if not recipe.checkpoint.at_end:
        return "none (checkpoint.at_end = false)"
    best = recipe.checkpoint.export == "best" and built.parts.validation.best is not None
    weights = "averaged weights" if recipe.ema else "weights"
    return f"model/, the {weights} of {'the best checkpoint' if best else 'the last step'}"


def dropout_layers(module: nn.Module) -> dict[str, float]:
    """The probability of each layer that drops out, by name."""
    return {name: part.p for name, part in module.named_modules() if isinstance(part, _DropoutNd) and part.p > 0}


def active_dropout(module: nn.Module) -> dict[str, float]:
    """The same, with probabilities that modules keep as plain numbers, as attention does."""
    found = dropout_layers(module)
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if "drop" in key and isinstance(value, float) and 0 < value < 1:
                found[f"{name}.{key}"] = value
    return found
