"""Section 2 of a check: where the recipe comes from, what its settings amount to, and which of them conflict.

Reading a recipe already rejects values that can never work; here the ranks and the data are known as well.
Must not know how the model is built. Imports torch only to ask for devices.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fullshard.check import unused_settings
from fullshard.check.findings import Finding, error, guarded, ok, warning
from fullshard.contracts.launcher import Ranks
from fullshard.errors import RecipeError
from fullshard.faults.micro_batch import described
from fullshard.formatting.plural import counted
from fullshard.launch.local import num_cores
from fullshard.recipes.read import Reading
from fullshard.setup.step_plan import plan_steps

if TYPE_CHECKING:
    from fullshard.dist.mesh import Layout
    from fullshard.recipe import Recipe
    from fullshard.setup.inputs import RunInputs

SMALLEST_LR = 1e-9
"""A smaller rate cannot change an fp32 weight of 0.02."""
MOST_DECAY = 1.0
"""Published runs use 0 to 0.1, a few 0.5."""
_MOST_LINES = 12


def look(reading: Reading, ranks: Ranks, inputs: RunInputs | None) -> Iterator[Finding]:
    """The findings. Without `inputs` (the data could not be read) what depends on the data is left out."""
    recipe = reading.recipe
    layout = _layout(recipe, ranks)
    yield from _origin(reading)
    yield from guarded("batch", lambda: arithmetic(recipe, ranks, inputs))
    yield from mesh(recipe, ranks, layout)
    yield ok("guard", recipe.guard.describe())
    yield from (ok("memory", line) for line in described(recipe.batch))
    found = [
        *conflicts(recipe, ranks, inputs),
        *best_model(recipe, inputs),
        *prompts(recipe, inputs),
        *learning_rate(recipe),
        *learning_rate_schedule(recipe, inputs),
        *unused_settings.of_sharding(recipe, ranks, device=device_of(recipe), shards=layout.shards if layout else None),
        *unused_settings.of_evaluation(recipe, inputs),
        *unused_settings.of_intervals(recipe, inputs),
    ]
    yield from found or [ok("settings", "no conflicts, and every setting has an effect")]


def _origin(reading: Reading) -> Iterator[Finding]:
    under = "".join(f", preset {name}" for name in reading.presets)
    yield ok("recipe", f"{reading.source}{under}: every key is known and every value is valid")
    lines = reading.overridden
    for line in lines[:_MOST_LINES]:
        yield ok("recipe", line)
    if len(lines) > _MOST_LINES:
        yield ok("recipe", f"and {counted(len(lines) - _MOST_LINES, 'more setting')} from the command line or a preset")


def arithmetic(recipe: Recipe, ranks: Ranks, inputs: RunInputs | None) -> Iterator[Finding]:
    """What a step, an epoch and the run consist of."""
    if inputs:
        plan = inputs.plan
    else:  # the batch alone; the number of rows is unknown
        packed, world = recipe.data.pack and recipe.objective.encoder is None, ranks.per_node * ranks.nodes
        plan = plan_steps(recipe.batch, recipe.duration, num_rows=1, world=world, packed=packed)
    lines = [line.partition(": ") for line in plan.describe()]
    for label, _, text in lines if inputs else lines[:1]:
        yield ok(label, text)
    if inputs and plan.num_rows < plan.global_size:
        problem = f"batch: {counted(plan.global_size, plan.noun)} per step, but the training data has only "
        problem += f"{plan.num_rows:,}: every step uses all of it and is still not full."
        remedy = f"Use batch.global = {plan.num_rows // plan.world * plan.world or plan.world:,} or less, shorten "
        remedy += "data.sequence_length, or add data."
        yield warning("batch", problem, remedy)


def mesh(recipe: Recipe, ranks: Ranks, layout: Layout | None) -> Iterator[Finding]:
    """The layout on these ranks; on several GPUs, `auto` depends on the size of the model."""
    size = ranks.per_node * ranks.nodes
    nodes = f" on {ranks.nodes} nodes" if ranks.nodes > 1 else ""
    where = f"{counted(size, 'rank')}{nodes} ({device_of(recipe).upper()})"
    if layout is None:
        yield ok("mesh", f"{where}; strategy auto depends on the size of the model")
    elif size == 1:
        yield ok("mesh", f"{where}; {layout.strategy}: nothing to shard; checkpoints load on any number of ranks")
    else:
        yield ok("mesh", f"{where}; {layout.describe()}")


def _layout(recipe: Recipe, ranks: Ranks) -> Layout | None:
    """The layout; None if it depends on the model."""
    import torch

    from fullshard.contracts.world import World
    from fullshard.dist.mesh import choose_layout

    size, device = ranks.per_node * ranks.nodes, device_of(recipe)
    if recipe.sharding.strategy == "auto" and device == "cuda" and size > 1:
        return None
    world = World(0, size, 0, ranks.per_node, torch.device(device), recipe.topology.backend)
    return choose_layout(recipe.sharding.strategy, world, state_bytes=0)


def device_of(recipe: Recipe) -> str:
    """`cuda` or `cpu`; `cuda` if the recipe asks for it, even without a GPU: the environment section reports that."""
    if recipe.topology.device != "auto":
        return recipe.topology.device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def conflicts(recipe: Recipe, ranks: Ranks, inputs: RunInputs | None) -> Iterator[Finding]:
    """Settings that conflict with each other, or with this machine."""
    topology, checkpoint = recipe.topology, recipe.checkpoint
    device = device_of(recipe)
    if topology.backend == "nccl" and device == "cpu":
        text = "topology.backend = nccl, but the run is on the CPU: NCCL connects GPUs only."
        yield error("conflict", text, "Leave topology.backend out, or use gloo.")
    if topology.backend == "gloo" and device == "cuda" and ranks.per_node > 1:
        import torch

        if ranks.per_node <= torch.cuda.device_count():
            text = "topology.backend = gloo with a GPU for every rank: all traffic goes through host memory."
            remedy = "Leave topology.backend out: NCCL is many times faster. gloo is for ranks that share a GPU."
            yield warning("conflict", text, remedy)
    if checkpoint.export == "best" and (checkpoint.best is None or not unused_settings.gives_numbers(recipe, inputs)):
        why = "checkpoint.best = null" if checkpoint.best is None else "nothing is validated"
        remedy = "Use checkpoint.export: last, or give data.validation (or data.holdout) and checkpoint.best."
        yield error("conflict", f"checkpoint.export = best, but {why}: there will be no best checkpoint.", remedy)
    cores = num_cores()
    workers = (recipe.data.workers or 0) * ranks.per_node
    if workers > 2 * cores:
        text = f"data.workers = {recipe.data.workers:,} x {counted(ranks.per_node, 'rank')} is "
        text += f"{counted(workers, 'process')} on {counted(cores, 'core')}."
        yield warning("workers", text, f"Use data.workers = {max(cores // ranks.per_node, 1)}, or leave it out.")


def best_model(recipe: Recipe, inputs: RunInputs | None) -> Iterator[Finding]:
    """A direction in checkpoint.best that contradicts the evaluation."""
    from fullshard.setup.run_inputs import find_best

    with contextlib.suppress(RecipeError):  # reported when the inputs were prepared
        rule = find_best(recipe, inputs.module) if inputs else None
        if rule and rule.contradicts:
            better = "higher" if rule.mode == "min" else "lower"
            text = f"checkpoint.best.mode = {rule.mode} keeps the model with the {rule.describe()}, the worst one: a "
            remedy = f"Leave mode out: checkpoint.best: {rule.metric}."
            yield warning("best", f"{text}{better} {rule.metric} is better.", remedy)


def prompts(recipe: Recipe, inputs: RunInputs | None) -> Iterator[Finding]:
    """Evaluations that need a tokenizer; the first validation would be too late to find out."""
    for part in recipe.evaluate.parts if inputs and inputs.processor is None else ():
        if part.needs_tokenizer:
            text = f"evaluate.parts: {part.kind()} reads text, which needs a tokenizer, but the model has no tokenizer."
            remedy = f"Name one in model.tokenizer (a folder or hub name), or leave {part.kind()} out."
            yield error("conflict", text, remedy)


def learning_rate(recipe: Recipe) -> Iterator[Finding]:
    """Learning rate and weight decay."""
    optimizer = recipe.optimizer
    largest = optimizer.largest_lr
    if optimizer.lr > largest:
        text = f"optimizer.lr = {optimizer.lr:g}: {optimizer.kind()} would move every weight by about that much at "
        text += f"each step; usual rates are up to {largest:g}."
        remedy = "Use 3e-4 for training from scratch, 2e-5 for fine-tuning, 2e-4 for LoRA; is a minus sign missing?"
        yield warning("learning rate", text, remedy)
    elif optimizer.lr < SMALLEST_LR:
        text = f"optimizer.lr = {optimizer.lr:g}: below {SMALLEST_LR:g} updates do not change fp32 weights."
        yield warning("learning rate", text, "Use 2e-5 or more.")
    share = optimizer.lr * optimizer.weight_decay
    if optimizer.weight_decay > MOST_DECAY or (share >= 0.1 and optimizer.lr <= largest):
        text = f"optimizer.weight_decay = {optimizer.weight_decay:g}: every step shrinks every matrix by optimizer.lr "
        text += f"x optimizer.weight_decay = {share:g} of itself; 0.01 to 0.1 is usual."
        yield warning("weight decay", text, "Use optimizer.weight_decay = 0.1 or less.")


def learning_rate_schedule(recipe: Recipe, inputs: RunInputs | None) -> Iterator[Finding]:
    """The learning-rate schedule over the run."""
    schedule = recipe.schedule
    total = inputs.plan.total_steps if inputs else recipe.duration.steps or 1000
    some_steps = {min(total - 1, round(index * (total - 1) / 50)) for index in range(51)}
    factors = [schedule.factor(step, total) for step in sorted(some_steps)]
    if not all(math.isfinite(factor) and factor >= 0 for factor in factors):
        text = f"schedule.kind = {schedule.kind()}: its factor of the learning rate falls to {min(factors):g}; below 0 "
        text += "training goes backwards."
        yield error("schedule", text, "Use a schedule.floor from 0 to 1.")
    elif max(factors) == 0:
        text = f"schedule.kind = {schedule.kind()}: the learning rate is 0 throughout."
        yield error("schedule", text, "Use another schedule.")
    if inputs and schedule.warmup_steps(total) >= total > 1:
        text = f"schedule.warmup = {schedule.warmup:g} is as long as the run of {counted(total, 'step')}: the learning "
        text += "rate never decays."
        remedy = "Shorten it (0.03 is a share of the run, 100 a number of steps), or lengthen the run."
        yield warning("no effect", text, remedy)
    if mistake := schedule.never_falls(total if inputs else None):
        yield warning("schedule", *mistake)
