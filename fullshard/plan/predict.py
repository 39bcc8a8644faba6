"""From a recipe to what one rank will hold and need: the model without weights, its units, its activations, one step.

Must not know how anything is shown, nor start ranks.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from fullshard.config.part import plain
from fullshard.contracts.world import World
from fullshard.dist.mesh import choose_layout
from fullshard.dist.precision import resolve_for
from fullshard.dist.shard import ShardPlan
from fullshard.errors import FullshardError
from fullshard.faults.micro_batch import sizes, usual
from fullshard.hf.hub import fetch
from fullshard.optim.adamw_8bit import AdamW8bit
from fullshard.optim.muon import Muon
from fullshard.plan.activations import Activations, activations
from fullshard.plan.hardware import GIB, Gpu
from fullshard.plan.measure import measure
from fullshard.plan.measured import Measured
from fullshard.plan.moments import Layout, Moment, Step, peak
from fullshard.plan.sizes import Held, UnitSize, checkpoint_bytes, held, unit_sizes
from fullshard.plan.workload import Workload, workload
from fullshard.recipe import Recipe
from fullshard.setup.run_inputs import build_module, cache_folder
from fullshard.setup.sharded_model import shard_plan, state_bytes, with_groups

logger = logging.getLogger(__name__)

CONTEXT = int(0.6 * GIB)
"""CUDA's context and libraries on a GPU, outside torch's allocator. Measured on an H200 with torch 2.11: 0.5 to 0.7."""
NCCL = int(0.35 * GIB)
"""Buffers of NCCL for each group of ranks that communicate."""
UNUSED, GAPS = 0.01, 0.8
"""What torch reserves and cannot use, with segments that grow: a share of the peak, and one of the gradients. These lie
where activations were freed, so the next step does not find the same room again. Fitted to 24 runs on one H200."""


@dataclass(frozen=True)
class Place:
    """Where a run is to take place."""

    per_node: int
    nodes: int
    gpu: Gpu | None
    """None: CPU ranks."""

    @property
    def world(self) -> int:
        return self.per_node * self.nodes


@dataclass(frozen=True)
class Prediction:
    """What one rank needs, in bytes."""

    recipe: Recipe
    place: Place
    plan: ShardPlan
    units: Sequence[UnitSize]
    held: Held
    activations: Activations
    work: Workload
    moments: Sequence[Moment]
    accumulate: int
    outside: Mapping[str, int]
    """On the device, but not allocated by torch: contexts, and what is reserved and unused."""
    host: Mapping[str, int]
    """In host memory, for all ranks of a node."""
    checkpoint: int
    flops: tuple[float, float]
    """Of a token (or image), as MFU counts; and what is really computed, with recomputation."""
    notes: Sequence[str]
    measured: Measured | None = None
    """What was measured for these settings, or for others of the same recipe."""

    @property
    def peak(self) -> Moment:
        return peak(self.moments)

    @property
    def needed(self) -> int:
        """All that the device must have."""
        return self.peak.memory.total + sum(self.outside.values())

    @property
    def room(self) -> int | None:
        """What is left on the device; negative if it does not fit. None: CPU ranks."""
        return None if self.place.gpu is None else int(self.place.gpu.memory) - self.needed


class Planner:
    """Predicts variants of one recipe. What does not depend on the variant is found once."""

    def __init__(self, module: nn.Module | None = None, *, run: bool = True) -> None:
        """`module`: the model on meta, if it has been built already. `run`: the forward pass may run on fake tensors;
        without it no activations are predicted."""
        self._built, self._run = module, run
        self._modules: dict[str, tuple[nn.Module, tuple[str, ...]]] = {}
        self._shapes: dict[str, _Shape] = {}
        self._activations: dict[str, Activations] = {}
        self._measured: Measured | None = None

    def measure(self, found: Prediction, device: torch.device, *, modelled: float | None) -> None:
        """Measures parts of the model on this device; from then on `predict` uses the numbers. `modelled`: the seconds
        of computing a micro-batch, without them."""
        module, sharing = self._shape(found.recipe, found.place).module, found.place.per_node
        asked = (found.recipe, module, found.plan, found.work, found.activations)
        self._measured = measure(*asked, device=device, sharing=sharing, modelled=modelled)

    def predict(self, recipe: Recipe, place: Place) -> Prediction:
        """What a rank needs with this recipe at this place; `batch.per_device: auto` is the largest that fits."""
        if recipe.batch.per_device == "auto":
            return self._largest(recipe, place)
        shape = self._shape(recipe, place)
        plan = _placed(recipe, shape, place)
        work = workload(recipe, shape.module)
        work = work if self._run else replace(work, run=None)
        seen = self._seen(recipe, shape, plan, work, place)
        if self._measured is not None:
            seen = self._measured.over(seen, recipe, plan, work.tokens)
        has = held(recipe, shape.units, shards=plan.layout.shards, buffers=shape.buffers)
        accumulate = accumulation(recipe, place.world)
        layout = Layout(
            shards=plan.layout.shards,
            reshard=plan.layout.reshard_after_forward,
            prefetch=plan.forward_prefetch,
            offload=plan.cpu_offload,
            accumulate=accumulate,
            reduce_once=work.whole > work.rows,
        )
        batch = 4 * 8 * work.tokens if work.noun != "image" else 0
        step = Step(shape.units, has, seen, layout, _update(recipe, shape.units, plan), batch)
        moments, stored = step.moments(), checkpoint_bytes(recipe, shape.units)
        return Prediction(
            recipe=recipe,
            place=place,
            plan=plan,
            units=shape.units,
            held=has,
            activations=seen,
            work=work,
            moments=moments,
            accumulate=accumulate,
            outside=_outside(plan, place, peak(moments).memory.total, gaps=_gaps(plan, has.gradients, seen)),
            host=_host(recipe, plan, place, has, stored),
            checkpoint=stored,
            flops=_flops(recipe, shape.module, plan),
            notes=(*shape.notes, *seen.notes),
            measured=self._measured,
        )

    def _largest(self, recipe: Recipe, place: Place) -> Prediction:
        """With the largest micro-batch that fits; the smallest one if none does."""
        share = (recipe.batch.global_size or 0) // place.world
        tried = sizes(share) if place.gpu else [usual("auto", share)]
        for rows in reversed(tried or [1]):
            batch = recipe.batch.model_copy(update={"per_device": rows})
            found = self.predict(recipe.model_copy(update={"batch": batch}), place)
            if found.room is None or found.room >= 0:
                break
        return found

    def _shape(self, recipe: Recipe, place: Place) -> _Shape:
        built = f"{recipe.model!r} {recipe.objective!r} {recipe.optimizer.by_name!r}"
        if built not in self._modules:
            self._modules[built] = (self._built, ()) if self._built is not None else empty_module(recipe)
        module, notes = self._modules[built]
        key = f"{built} {recipe.precision} {recipe.sharding.wrap!r} {place.gpu is None}"
        if key not in self._shapes:
            self._shapes[key] = _shape(recipe, copy.deepcopy(module), place, notes)
        return self._shapes[key]

    def _seen(self, recipe: Recipe, shape: _Shape, plan: ShardPlan, work: Workload, place: Place) -> Activations:
        decides = (recipe.model, recipe.objective, recipe.data, work.rows, plan.compute, plan.compile)
        key = f"{decides!r} {plan.activation_checkpointing} {plan.recompute!r} {plan.wrap.units} {place.gpu is None}"
        if key not in self._activations:
            self._activations[key] = activations(recipe, shape.module, plan, work, gpu=place.gpu is not None)
        return self._activations[key]


@dataclass(frozen=True)
class _Shape:
    """A model with its units, which are the same for any number of ranks."""

    module: nn.Module
    plan: ShardPlan
    units: list[UnitSize]
    buffers: int
    state: int
    notes: tuple[str, ...]


def _shape(recipe: Recipe, module: nn.Module, place: Place, notes: tuple[str, ...]) -> _Shape:
    precision = resolve_for(recipe.precision, capability=(9, 0) if place.gpu else None)
    world = World(0, 1, 0, 1, torch.device("cpu"), "gloo")
    plan = shard_plan(recipe, module, world, precision)
    state = state_bytes(recipe, module)
    units = unit_sizes(module, plan, recipe)
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in module.buffers())
    if frozen := [*recipe.objective.frozen()]:
        notes = (*notes, f"frozen models beside it are not counted: {', '.join(frozen)}")
    return _Shape(module, plan, units, buffers, state, notes)


def empty_module(recipe: Recipe) -> tuple[nn.Module, tuple[str, ...]]:
    """The model on meta, and what was assumed. Of a hub name only the settings are downloaded, never weights."""
    for where, (name, revision) in recipe.model.hub_names().items():
        fetch(name, revision=revision, code=False, weights=False, where=where)
    try:
        return build_module(recipe, recipe.model.processor(cache=cache_folder(recipe), fingerprint="")), ()
    except FullshardError:
        pass  # the tokenizer is not trained yet, or some other mistake, which comes again below
    training = (plain(recipe.model).get("tokenizer") or {}).get("train")
    note = "the tokenizer is not trained yet: the vocabulary is taken to be"
    if training is not None:
        size = int(training["vocab_size"])
        with contextlib.suppress(AttributeError):  # a processor of images or audio, which has more than tokens
            return build_module(recipe, _Untrained(size)), (f"{note} {size:,} tokens",)
    return build_module(recipe, None), (f"{note} that of the model's config",)


@dataclass(frozen=True)
class _Untrained:
    """Stands for a tokenizer that will be trained: a model asks only how many tokens it has."""

    size: int

    def __len__(self) -> int:
        return self.size


def _placed(recipe: Recipe, shape: _Shape, place: Place) -> ShardPlan:
    """The sharding plan of a run, as the run itself makes it, for devices that need not exist."""
    world, asked = World(0, place.world, 0, place.per_node, torch.device("cpu"), "gloo"), recipe.sharding
    memory = int(place.gpu.memory) if place.gpu else None
    plan = replace(
        shape.plan,
        layout=choose_layout(asked.strategy, world, state_bytes=shape.state, memory=memory),
        activation_checkpointing=asked.activation_checkpointing,
        compile=place.gpu is not None if asked.compile is None else asked.compile,
        cpu_offload=asked.cpu_offload,
        forward_prefetch=asked.forward_prefetch,
    )
    return with_groups(recipe, shape.module, plan)


def accumulation(recipe: Recipe, world: int) -> int:
    """Micro-batches of one rank in a step."""
    if recipe.batch.global_size is None:
        return recipe.batch.accumulate or 1
    return max(-(-recipe.batch.global_size // (usual(recipe.batch.per_device) * world)), 1)


def _update(recipe: Recipe, units: Sequence[UnitSize], plan: ShardPlan) -> int:
    """What the update needs for a short time: fp32 copies for an average of bf16 weights, Muon's whole matrices."""
    shards, trained = plan.layout.shards, [tensor for unit in units for tensor in unit.trained]
    averaged = sum(4 * t.mine(shards) for t in trained if t.itemsize < 4) if recipe.ema else 0
    if isinstance(recipe.optimizer, AdamW8bit):
        # Both moments of one parameter, in fp32: their new scales need all values.
        return max(averaged, max((8 * t.mine(shards) for t in trained), default=0))
    if isinstance(recipe.optimizer, Muon):
        taken = recipe.optimizer.taken([(tensor.name, tensor.dims) for tensor in trained])
        # Momentum, look-ahead and moved weights of its slice; the whole matrix, and five of its size in bf16.
        each = [12 * t.mine(shards) + (t.itemsize + 10) * t.numel for t in trained if t.name in taken]
        return max(averaged, max(each, default=0))
    return averaged


def _gaps(plan: ShardPlan, gradients: int, seen: Activations) -> int:
    """What of the activations' memory gradients make unusable."""
    room = seen.kept + seen.loss - seen.outside if seen.known else gradients
    return 0 if plan.cpu_offload else int(GAPS * min(gradients, room))


def _outside(plan: ShardPlan, place: Place, allocated: int, *, gaps: int) -> dict[str, int]:
    if place.gpu is None:
        return {}
    groups = 0 if place.world == 1 else 1 + (plan.layout.replicas > 1 and plan.layout.shards > 1)
    return {"CUDA context": CONTEXT, "NCCL": groups * NCCL, "fragmentation": int(UNUSED * allocated) + gaps}


def _host(recipe: Recipe, plan: ShardPlan, place: Place, has: Held, stored: int) -> dict[str, int]:
    """Of one node: offloaded state, copies for saves in the background, processes."""
    ranks = place.per_node
    copies = ranks * (place.world // plan.layout.shards) / place.world
    found = {"processes": int(2.5 * GIB) * ranks}
    workers = recipe.data.workers if recipe.data.workers is not None else (2 if place.gpu else 0)
    found["loader workers"] = int(0.6 * GIB) * workers * ranks
    if plan.cpu_offload:
        found["offloaded state"] = ranks * (has.parameters + has.gradients + has.optimizer + has.ema)
    if recipe.checkpoint.asynchronous is not False:
        found["copies for saves in the background"] = int(stored * copies / max(place.nodes * copies, 1))
    return {name: amount for name, amount in found.items() if amount}


def _flops(recipe: Recipe, module: nn.Module, plan: ShardPlan) -> tuple[float, float]:
    """Per token: as MFU counts them, and with what is computed again."""
    counted = recipe.model.flops_per_token(module, length=recipe.data.sequence_length)
    forward = {"none": 0.0, "selective": 0.12, "full": 1 / 3}[plan.activation_checkpointing]
    return counted, counted * (1 + forward)
