"""What a run takes over from the checkpoint that `start.from` names: weights, optimizer state, loss scale.

Optimizer state is matched by parameter name: a parameter that was trained there and is trained here keeps its state,
bit by bit on any number of ranks; any other starts as in a new run. Must not know losses or data.
"""

from __future__ import annotations

from pathlib import Path

import torch

from fullshard.checkpoint import folder as files
from fullshard.checkpoint import integrity, load
from fullshard.checkpoint.reader import open_tensors
from fullshard.checkpoint.saver import Saver
from fullshard.checkpoint.tensors import Tensors, materialise_state, optimizer_tensors
from fullshard.config.part import plain
from fullshard.contracts.progress import Progress
from fullshard.dist import reduce
from fullshard.dist.agreement import all_or_fail
from fullshard.dist.average import KEY as EMA
from fullshard.errors import CheckpointError
from fullshard.formatting.plural import counted
from fullshard.recipe import Recipe
from fullshard.stages.hand_over import is_requested
from fullshard.stages.standing import START, identity_of
from fullshard.stages.start import checkpoint_of


def take_over(recipe: Recipe, saver: Saver) -> str:
    """Loads what the recipe's `start` asks for, and says what that was; on all ranks together."""
    said = _take_over(recipe, saver)
    if reduce.from_main(is_requested(recipe.folder)):
        saver.save(Progress(), False, now=True)
    return said


def _take_over(recipe: Recipe, saver: Saver) -> str:
    start = recipe.start
    assert start is not None
    with all_or_fail("The run cannot start"):
        try:
            path = files.named(checkpoint_of(start))
        except CheckpointError as error:
            raise CheckpointError(f"start.from = {start.source}: {error}") from None
    _require_intact(path)
    if not plain(recipe.model).get("from"):  # otherwise the model was built with them
        load.load_weights(path, model=saver.model, left_out=saver.left_out, average={})
    saver.facts[START] = {"checkpoint": str(path), "identity": identity_of(path)}
    state = files.read_state(path)
    there, here = ((state.get("recipe") or {}).get("optimizer") or {}).get("kind"), recipe.optimizer.kind()
    if start.optimizer == "fresh" or (start.optimizer is None and there != here):
        why = "" if start.optimizer else f" ({there} there, {here} here)"
        return f"Starts from {path}, with fresh optimizer state{why}."
    if there != here:
        raise CheckpointError(
            f"start.optimizer = carry: {path} was trained with optimizer.kind = {there}, and this run has {here}. Use "
            "start.optimizer: fresh, or the same kind."
        )
    kept, new = _carry(path, saver)
    if saver.scaler and state.get("scaler"):
        saver.scaler.load_state_dict(state["scaler"])
    fresh = f", {counted(new, 'parameter')} newly trained" if new else ""
    return f"Starts from {path}: optimizer state of {counted(kept, 'parameter')} carried over{fresh}."


def _require_intact(path: Path) -> None:
    """Raises on every rank if the checkpoint is damaged; each reads a share of its bytes, as a resume does."""
    world, rank = reduce.place()
    found = reduce.gather_objects(integrity.problems(path, rank=rank, world=world))
    if lines := sorted({line for mine in found for line in mine}):
        raise CheckpointError(
            f"{path}, which this run starts from, is damaged: {lines[0]}. Train that run again, or name another "
            "checkpoint of it: start.from=RUN/checkpoint-STEP."
        )


def keep_start(saver: Saver, checkpoint: Path) -> None:
    """Lets later checkpoints of a resumed run say what it started from, as the one that it resumes from does."""
    if start := files.read_state(checkpoint).get(START):
        saver.facts[START] = start


def _carry(path: Path, saver: Saver) -> tuple[int, int]:
    """Reads the state of the parameters whose state is stored; returns how many, and how many others there are."""
    materialise_state(saver.optimizer)
    if saver.average:
        saver.average.materialise()
    with all_or_fail(f"{path} cannot be read"):
        stored = open_tensors(path)
    shapes = {name: entry.shape for name, entry in stored.entries.items()}
    wanted: Tensors = {}
    kept = new = 0
    for tensors in _by_parameter(saver).values():
        found = {name: t for name, t in tensors.items() if shapes.get(name) == tuple(t.shape)}
        averaged = {name for name in tensors if name.endswith(f"/{EMA}")}
        if found.keys() | averaged == tensors.keys():
            wanted |= found
            kept += 1
        else:
            _forget(tensors)
            new += 1
    load.read_into(wanted, path, stored)
    return kept, new


def _by_parameter(saver: Saver) -> dict[str, Tensors]:
    """The optimizer's tensors as a checkpoint names them, by parameter."""
    found: dict[str, Tensors] = {}
    for name, tensor in optimizer_tensors(saver.model, saver.optimizer).items():
        found.setdefault(name.rpartition("/")[0], {})[f"optimizer/{name}"] = tensor
    return found


@torch.no_grad()
def _forget(tensors: Tensors) -> None:
    """State as an optimizer creates it: moments are zero already, but creating them counted a step."""
    for tensor in tensors.values():
        if not tensor.dim():
            tensor.zero_()
