"""From the user's recipe to the short runs that prove it, and what each must equal.

All runs train on the same samples in the same steps, and each differs from the straight run in one thing.
Must not start anything, nor know how runs are compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from fullshard.checkpoint import folder as files
from fullshard.config.part import decode, did_you_mean, plain
from fullshard.contracts.launcher import Ranks
from fullshard.errors import RecipeError
from fullshard.formatting.plural import counted
from fullshard.prove.kill import Kill
from fullshard.recipe import Recipe
from fullshard.setup.inputs import RunInputs
from fullshard.setup.run_summary import dropout_layers

STEPS, SAVE_EVERY, KILLS = 6, 2, (3, 5)
"""A checkpoint every second step, and a kill one step after each of the first two."""
MOST_ACCUMULATED = 4
"""A recipe with more micro-batches per step and rank gets a smaller step."""
NAMES = ("resume", "world", "split", "strategy")
"""What --cases may name."""
_OTHER_STRATEGY = {"full": "grad_op", "grad_op": "full", "hybrid": "grad_op", "none": "full"}


@dataclass(frozen=True)
class Case:
    """One run: its recipe and its ranks."""

    name: str
    title: str
    recipe: Recipe
    ranks: Ranks
    resume: str = "auto"
    """The checkpoint of another run that this one resumes from."""

    @property
    def folder(self) -> Path:
        return self.recipe.folder

    def killed_after(self, step: int) -> Case:
        """The same run, killed after a step."""
        kill = Kill(step=step, of=str(self.folder))
        evaluate = self.recipe.evaluate.model_copy(update={"parts": [kill], "every_steps": 1})
        return replace(self, recipe=self.recipe.model_copy(update={"evaluate": evaluate}))


@dataclass(frozen=True)
class Place:
    """Where the runs take place."""

    folder: Path
    """Where their run folders go."""
    ranks: Ranks
    """The recipe's ranks on this machine."""
    device: str
    num_gpus: int
    half: bool
    """The recipe computes in half precision here."""
    strategy: str
    """The recipe's strategy, with `auto` resolved."""


@dataclass(frozen=True)
class Plan:
    """The runs in order, and what to print about them."""

    straight: Case
    killed: Case | None
    reference: Case | None
    """What the others must be close to, if not the straight run: one without half precision and noise."""
    others: tuple[Case, ...]
    samples_per_step: int
    notes: tuple[str, ...]
    left_out: Mapping[str, str]
    """Cases that cannot be run, and why."""


def plan(recipe: Recipe, place: Place, inputs: RunInputs, *, cases: tuple[str, ...]) -> Plan:
    """The runs for the requested cases."""
    world, samples_per_step = place.ranks.per_node, inputs.plan.global_size
    other_world = 2 if world == 1 else world // 2
    gpus = len(place.ranks.device_ids) if place.ranks.device_ids else place.num_gpus
    shared = place.device == "cuda" and other_world > gpus
    per_device = inputs.plan.per_device
    recipe = _batch(recipe, per_device)
    own, split = _splits(per_device, half=place.half)
    # Two ranks on one GPU share its memory.
    elsewhere = min(own, split) if shared else own
    # A step that all runs can divide.
    passes = [per_device * world, own * world, own * other_world, split * world, elsewhere * other_world]
    step = _samples(samples_per_step, math.lcm(*passes), per_device * world)
    straight = _shrunk(recipe, place, samples=step)
    quiet, removed, noisy = _without_noise(recipe, inputs.module, inputs.processor, half=place.half)
    changed = bool(removed) or own != per_device
    base = _with(straight, **{key: getattr(quiet, key) for key in ("model", "precision", "optimizer")})
    base = _batch(base, own)
    wanted = {name for name in cases if name != "resume"}
    left_out = {name: noisy for name in sorted(wanted)} if noisy else {}
    reference = _case("reference", f"straight, {removed[0] if removed else 'fp32'}", base, place) if changed else None
    start = place.folder / ("reference" if reference else "straight") / files.name_of(SAVE_EVERY)
    once = _with(base, checkpoint=base.checkpoint.model_copy(update={"every_steps": STEPS}))
    others = [] if noisy else _others(once, place, other_world, start, split=split, elsewhere=elsewhere, shared=shared)
    chosen = tuple(case for case in others if case.name in wanted)
    killed = _case("killed", "killed", straight, place) if "resume" in cases else None
    first = _case("straight", "straight", straight, place)
    if killed is None and chosen and reference is not None:
        first, reference = reference, None  # it keeps its folder, from which the run on other ranks resumes
    return Plan(
        first,
        killed,
        reference if chosen else None,
        chosen,
        step,
        tuple(_notes(recipe, place, step, samples_per_step, removed if chosen else [], own, inputs.plan.noun)),
        left_out,
    )


def _without_noise(
    recipe: Recipe, module: nn.Module, processor: Any, *, half: bool
) -> tuple[Recipe, list[str], str | None]:
    """The recipe without what makes correct runs differ because it depends on which rank holds which sample or slice:
    half precision, dropout, quantised optimizer states. Also returns what was changed, and what could not be."""
    changed: dict[str, Any] = {}
    removed: list[str] = []
    if half:
        changed["precision"] = "fp32"
        removed.append("in fp32")
    model = recipe.model.without_noise(module, fp32=half)
    quiet = module
    if plain(model) != plain(recipe.model):
        changed["model"] = model
        quiet = model.build(processor=processor)
    if dropout_layers(module) or plain(recipe.model.without_noise(module, fp32=False)) != plain(recipe.model):
        removed.append("without dropout")
    if (optimizer := recipe.optimizer.unquantised()) is not recipe.optimizer:
        changed["optimizer"] = optimizer
        removed.append("with the optimizer's state in fp32")
    name = next(iter(dropout_layers(quiet)), None)
    left = f"no setting of the model turns off the dropout {name}, and other ranks draw other random numbers"
    return recipe.model_copy(update=changed), removed, left if name else None


def _splits(per_device: int, *, half: bool) -> tuple[int, int]:
    """Samples per micro-batch of the runs in fp32, and another split of the same step. Activations are twice as large
    in fp32, so a recipe in half precision gets smaller micro-batches there."""
    own = max(per_device // 2, 1) if half else per_device
    return own, own // 2 if own > 1 else 2


def _samples(asked: int, unit: int, per_pass: int) -> int:
    """Samples per step: the recipe's own if it is small and divisible, else a few micro-batches."""
    accumulated = asked // per_pass
    if asked % unit == 0 and accumulated <= MOST_ACCUMULATED:
        return asked
    return unit * (2 if accumulated > 1 and unit == per_pass else 1)


def _shrunk(recipe: Recipe, place: Place, *, samples: int) -> Recipe:
    """The recipe as a run of a few steps; nothing else differs from the real one."""
    batch = {"per_device": recipe.batch.per_device, "global": samples}
    evaluate = recipe.evaluate.model_copy(
        update={"parts": [], "every_steps": None, "every_epochs": None, "patience": None}
    )
    saves = {"every_steps": SAVE_EVERY, "every_epochs": None, "every_minutes": None, "keep": None, "store": None}
    # The save of the last step is one of every second step; `at_end` would export the model as well.
    checkpoint = recipe.checkpoint.model_copy(update=saves | {"best": None, "export": "last", "at_end": False})
    return _with(
        recipe,
        output=place.folder,
        batch=decode(type(recipe.batch), batch),
        duration=decode(type(recipe.duration), {"steps": STEPS}),
        evaluate=evaluate,
        checkpoint=checkpoint,
        log=recipe.log.model_copy(update={"every_steps": 1, "sample_ids": True, "sinks": []}),
    )


def _others(
    base: Recipe, place: Place, other_world: int, start: Path, *, split: int, elsewhere: int, shared: bool
) -> list[Case]:
    """The runs that must be close to the reference. The one on other ranks resumes from its first checkpoint, the
    others start from scratch."""
    world = place.ranks.per_node
    backend = "gloo" if shared else base.topology.backend
    moved = _with(_batch(base, elsewhere), topology=base.topology.model_copy(update={"backend": backend}))
    where = ", one GPU" if shared else ""
    strategy = _OTHER_STRATEGY[place.strategy]
    sharding = base.sharding.model_copy(update={"strategy": strategy})
    # One rank has nothing to shard: another strategy needs two.
    spread = (other_world, _with(moved, sharding=sharding)) if world == 1 else (world, _with(base, sharding=sharding))
    on = f", on {_ranks(spread[0])}" if world == 1 else ""
    title = f"micro-batches of {split} instead of {base.batch.per_device}"
    return [
        _case("split", title, _batch(base, split), place),
        replace(
            _case(
                "world",
                f"{_ranks(other_world)} instead of {world}{where}, from step {SAVE_EVERY}",
                moved,
                place,
                world=other_world,
            ),
            resume=str(start),
        ),
        _case("strategy", f"{strategy} instead of {place.strategy}{on}", spread[1], place, world=spread[0]),
    ]


def _case(name: str, title: str, recipe: Recipe, place: Place, *, world: int | None = None) -> Case:
    number = world or place.ranks.per_node
    ids = place.ranks.device_ids
    # Ranks that share a GPU all get the same one.
    ranks = replace(place.ranks, per_node=number, nodes=1, node_rank=0, master=None, device_ids=ids and ids[:number])
    topology = recipe.topology.model_copy(update={"devices": number, "nodes": 1})
    return Case(name, title, _with(recipe, name=name, topology=topology), ranks)


def _notes(
    recipe: Recipe, place: Place, step: int, samples_per_step: int, removed: list[str], own: int, noun: str
) -> list[str]:
    lines = []
    if step != samples_per_step:
        lines.append(f"{counted(step, noun)} per step instead of {samples_per_step:,}: a few micro-batches are enough.")
    if recipe.topology.nodes > 1:
        lines.append(f"One node instead of {recipe.topology.nodes}.")
    if recipe.checkpoint.store is not None:
        lines.append("Checkpoints go to a local folder, not to checkpoint.store.")
    if place.device == "cuda":
        lines.append("Deterministic kernels, so that two runs can be compared bit for bit.")
    if removed:
        smaller = f", in micro-batches of {own}" if own != recipe.batch.per_device else ""
        lines.append(
            f"Other ranks, splits and strategies are compared {' and '.join(removed)}{smaller}: there they give the "
            "same numbers up to rounding."
        )
    return lines


def check_names(text: str | None) -> tuple[str, ...]:
    """The cases that --cases names."""
    if text is None:
        return NAMES
    names = tuple(word.strip() for word in text.split(",") if word.strip())
    for name in names:
        if name not in NAMES:
            raise RecipeError(f"--cases {text}: {name!r} is not a case{did_you_mean(name, NAMES)}: {', '.join(NAMES)}.")
    return names or NAMES


def _batch(recipe: Recipe, per_device: int) -> Recipe:
    return _with(recipe, batch=recipe.batch.model_copy(update={"per_device": per_device}))


def _with(recipe: Recipe, **sections: Any) -> Recipe:
    return recipe.model_copy(update=sections)


def _ranks(number: int) -> str:
    return counted(number, "rank")
