"""Whether a run fits: disk space for its checkpoints, host and GPU memory for its parameters and optimizer state.

Computed from the recipe and the number of parameters, before any rank starts; activations are not included.
Must not know how checkpoints are written, nor torch.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fullshard.check.findings import Finding, error, ok, warning
from fullshard.check.machine import Machine
from fullshard.checkpoint import folder as files
from fullshard.contracts.launcher import Ranks
from fullshard.formatting.readable import size
from fullshard.recipe import Checkpoint, Evaluate, Recipe
from fullshard.setup.step_plan import StepPlan

if TYPE_CHECKING:
    from torch import nn

TIGHT = 0.8
"""Warn when a run will use more than this share of what is free."""
EXPORT_BUFFER = 5_000_000_000
"""The export gathers one file's worth of tensors on rank 0."""


@dataclass(frozen=True)
class ModelSize:
    """The numbers that decide how much space a model takes."""

    parameters: int
    trainable: int
    weight_bytes: int | None = None
    """Bytes of the stored parameters; None: all have the precision's storage dtype."""
    adapters: bool = False
    """Only the adapters are exported."""


def size_of(recipe: Recipe, module: nn.Module) -> ModelSize:
    """Frozen parameters may stay in half precision."""
    parameters = dict(module.named_parameters())
    trainable = sum(p.numel() for p in parameters.values() if p.requires_grad)
    kept = sum(
        p.numel() * (_stored(recipe) if p.requires_grad else recipe.model.storage_dtype(name, p).itemsize)
        for name, p in parameters.items()
    )
    total = sum(p.numel() for p in parameters.values())
    return ModelSize(total, trainable, kept, adapters=bool(recipe.model.adapters(module)))


def disk(recipe: Recipe, model: ModelSize, plan: StepPlan | None = None) -> Iterator[Finding]:
    """Space in `output` for the checkpoints that are kept, the one being written, and the export. With `plan` no more
    checkpoints are counted than the run will write."""
    each, count, export = budget(recipe, model, plan)
    free = shutil.disk_usage(nearest_existing(recipe.output)).free
    remote = recipe.checkpoint.store
    if remote is not None:
        kept = f"{count} of them" if count is not None else "all of them (checkpoint.keep = null)"
        yield ok("store space", f"a checkpoint takes {size(each)}, {kept} at {remote}; free space is unknown")
        count, each = 0, 0
    if count is None:
        text = f"checkpoint.keep = null keeps every checkpoint of {size(each)}; {recipe.output} has {size(free)} free."
        yield warning("disk space", text, "Set checkpoint.keep to a number that fits.")
        return
    # Checkpoints of an earlier run already have their space.
    needed = max(count - len(files.published(recipe.folder)), 0) * each + export
    what = " and ".join(
        ([f"{count} checkpoint{'' if count == 1 else 's'} of {size(each)}"] if count else [])
        + (["the export"] if export else [])
    )
    text = f"{size(free)} free in {recipe.output}, {size(needed)} needed for {what or 'nothing'}"
    remedy = "Free some space, or choose another disk: output=DIR."
    if count > 2:
        remedy = f"{remedy[:-1]}; or keep fewer checkpoints: checkpoint.keep=1 (now {recipe.checkpoint.keep})."
    yield from _space_finding("disk space", text, remedy, needed=needed, free=free)


def budget(recipe: Recipe, model: ModelSize, plan: StepPlan | None = None) -> tuple[int, int | None, int]:
    """Bytes of one checkpoint, how many are on disk at once (None: all that are written), bytes of the export."""
    each = _checkpoint(recipe, model)
    settings = recipe.checkpoint
    export = 0
    if settings.at_end:
        export = 4 * model.trainable if model.adapters else model.weight_bytes or 4 * model.parameters
    writes = None if plan is None else _writes(recipe, plan)
    if settings.keep is None:
        return each, writes, export
    # The newest ones, the best one, and the one being written before an old one is deleted.
    at_once = settings.keep + (settings.best is not None) + 1
    return each, at_once if writes is None else min(at_once, writes), export


def memory(recipe: Recipe, ranks: Ranks, model: ModelSize, *, machine: Machine) -> Iterator[Finding]:
    """Memory for parameters, gradients and optimizer state, where they are kept, and for the export."""
    stored = _stored(recipe)
    state = (model.weight_bytes or stored * model.parameters) + (stored + _moments(recipe)) * model.trainable
    on_gpu = bool(machine.gpus) and recipe.topology.device != "cpu"
    here = math.ceil(state * _copies(recipe, ranks))
    held = "parameters, gradients and optimizer state"
    if on_gpu and not recipe.sharding.cpu_offload:
        smallest = min(machine.used(ranks), key=lambda gpu: gpu.memory_bytes)
        # With gloo, ranks may share a GPU, which then holds the state of all of them.
        sharing = math.ceil(ranks.per_node / len(machine.gpus)) if recipe.topology.backend == "gloo" else 1
        each = math.ceil(here / ranks.per_node) * sharing
        text = f"{size(smallest.memory_bytes)} on {smallest.name}, {size(each)} needed for its share of {held}"
        remedy = (
            "Shard over more GPUs, use sharding.cpu_offload=true or model.lora=true, or a smaller model; "
            f"sharding.strategy = {recipe.sharding.strategy}"
            + (" (full shards everything)." if recipe.sharding.strategy != "full" else ".")
        )
        yield from _space_finding("GPU memory", text, remedy, needed=each, free=smallest.memory_bytes)
        here, held = 0, ""
    held += f" of {ranks.per_node} ranks" if held and ranks.per_node > 1 else ""
    export = min(EXPORT_BUFFER, 4 * model.parameters) if recipe.checkpoint.at_end and ranks.node_rank == 0 else 0
    if recipe.checkpoint.asynchronous:
        export += math.ceil(_checkpoint(recipe, model) * _copies(recipe, ranks))
    last = "saving in the background" if recipe.checkpoint.asynchronous else "the export" if export else ""
    what = " and ".join(filter(None, (held, last)))
    text = f"{size(machine.memory_bytes)} available, {size(here + export)} needed for {what or 'nothing'}"
    remedy = (
        "Use fewer ranks or a smaller model, shard over more nodes, or free memory; a container or job may have a "
        "lower limit than the machine."
    )
    yield from _space_finding("host memory", text, remedy, needed=here + export, free=machine.memory_bytes)


def strategies(recipe: Recipe, ranks: Ranks, model: ModelSize, *, machine: Machine) -> Iterator[Finding]:
    """What each strategy would keep on one device, and which of them fit: how to choose one."""
    on_gpu = bool(machine.gpus) and recipe.topology.device != "cpu"
    stored, whole = _stored(recipe), recipe.precision == "fp32" or (recipe.precision == "auto" and not on_gpu)
    weights, world = model.weight_bytes or stored * model.parameters, ranks.per_node * ranks.nodes
    state = weights + (stored + _moments(recipe)) * model.trainable
    held = {
        "full": state / world,
        # The gathered parameters stay from the forward pass to the backward pass.
        "grad_op": state / world + ((4 if whole else 2) * model.parameters),
        "hybrid": state / ranks.per_node,
        "none": float(state),
    }
    room = machine.memory_bytes // ranks.per_node
    if on_gpu:
        room = min(gpu.memory_bytes for gpu in machine.used(ranks))
    if world == 1:
        yield ok(
            "strategies", f"one rank keeps {size(state)} of {size(room)} under every strategy, without activations"
        )
        return
    fits = [name for name, needed in held.items() if needed <= TIGHT * room]
    each = ", ".join(f"{name} {size(math.ceil(needed))}" for name, needed in held.items())
    advice = "nothing fits" if not fits else f"fits: {', '.join(fits)}"
    if "none" in fits:
        advice += "; where memory is no concern, none (replicated) exchanges the least"
    what = "a GPU" if on_gpu else "a rank"
    yield ok("strategies", f"{what} with {size(room)} would keep: {each} (without activations); {advice}")


def nearest_existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    path = path.expanduser().absolute()
    return next(p for p in (path, *path.parents) if p.exists())


def _space_finding(check: str, text: str, remedy: str, *, needed: int, free: int) -> Iterator[Finding]:
    if needed > free:
        yield error(check, f"{text}.", remedy)
    elif needed > TIGHT * free:
        yield warning(check, f"{text}: more than {TIGHT:.0%} of what is free.", remedy)
    else:
        yield ok(check, text)


def _checkpoint(recipe: Recipe, model: ModelSize) -> int:
    """Bytes of one checkpoint, without frozen weights that the model's folder holds."""
    stored = _stored(recipe)
    frozen_elsewhere = model.trainable < model.parameters and recipe.model.stored_in() is not None
    weights = stored * model.trainable if frozen_elsewhere else model.weight_bytes or stored * model.parameters
    return weights + _moments(recipe) * model.trainable


def _stored(recipe: Recipe) -> int:
    """Bytes of one trained value."""
    return 2 if recipe.precision == "bf16-pure" else 4


def _moments(recipe: Recipe) -> int:
    """Bytes of optimizer state for one trained value, and of its average."""
    return recipe.optimizer.state_bytes(_stored(recipe)) + (4 if recipe.ema else 0)


def _copies(recipe: Recipe, ranks: Ranks) -> float:
    """How much of the whole state this node holds; `auto` keeps more only where memory is plentiful."""
    strategy = recipe.sharding.strategy
    return float(ranks.per_node) if strategy == "none" else 1.0 if strategy == "hybrid" else 1 / ranks.nodes


def _writes(recipe: Recipe, plan: StepPlan) -> int:
    """How many checkpoints the whole run writes at most: when they are due, and at every best validation."""
    total = plan.total_steps
    steps = {total} if recipe.checkpoint.at_end else set()
    sections: list[Checkpoint | Evaluate] = [recipe.checkpoint]
    sections += [recipe.evaluate] if recipe.checkpoint.best else []
    for due in sections:
        if due.every_steps is not None:
            steps |= set(range(due.every_steps, total + 1, due.every_steps))
        if due.every_epochs is not None:
            every = due.every_epochs * plan.steps_per_epoch
            steps |= set(range(every, total + 1, every))
    return len(steps)
