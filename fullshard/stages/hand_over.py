"""The hand-over from one stage to the next, for `fullshard prove`: what a run had before its first step, compared bit
by bit with the checkpoint that it started from.

A run whose folder holds the request saves `checkpoint-0`. Must not train anything, nor know how proofs are reported.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.checkpoint import folder as files
from fullshard.config.part import decode, plain
from fullshard.contracts.model import Family
from fullshard.formatting.plural import counted
from fullshard.recipe import Recipe
from fullshard.stages.start import checkpoint_of

_REQUEST = "save-the-start"
_AVERAGE = "/ema"
"""Averaged weights start anew in each stage."""


@dataclass(frozen=True)
class HandOver:
    """What a run took over."""

    title: str
    word: str
    drift: str | None = None
    """What differs, if anything does."""


def request(run: Path) -> None:
    """Asks the run in this folder to save what it starts with."""
    run.mkdir(parents=True, exist_ok=True)
    (run / _REQUEST).touch()


def is_requested(run: Path) -> bool:
    return (run / _REQUEST).exists()


def look(recipe: Recipe) -> HandOver:
    """Compares what a finished run started with and the checkpoint that its recipe names."""
    from fullshard.checkpoint.reader import open_tensors

    assert recipe.start is not None
    place = recipe.folder / files.name_of(0)
    earlier = files.named(checkpoint_of(recipe.start))
    theirs, ours = open_tensors(earlier), open_tensors(place)
    weights = _both(theirs.names(), ours.names(), "model/")
    states = _both(theirs.names(), ours.names(), "optimizer/")
    new = sorted(_parameters(ours.names()) - _parameters(theirs.names()))
    wrong = [name for name in (*weights, *states) if not _equal(theirs, ours, name)]
    wrong += [name for name in ours.names() if name.split("/")[1] in new and _is_used(ours, name)]
    scales = [(files.read_state(each).get("scaler") or {}).get("scale") for each in (earlier, place)]
    if states and None not in scales and scales[0] != scales[1]:
        wrong.append("the loss scale")
    title = f"starts from {earlier.parent.name}: {counted(len(weights), 'weight')}"
    kept = len(_parameters(states))
    title += f", {counted(kept, 'optimizer state')}" if kept else ", fresh optimizer states"
    title += f", {len(new)} new" if kept and new else ""
    if not weights:
        return HandOver(title, "none", f"no weight of {earlier} is in the model")
    if not wrong:
        return HandOver(title, "bitwise")
    text = f"before the first step, {counted(len(wrong), 'tensor')} differ from {earlier}, first {wrong[0]}"
    return HandOver(title, f"{len(wrong)} differ", text)


def _both(theirs: Iterable[str], ours: Iterable[str], section: str) -> list[str]:
    found = sorted(set(theirs) & set(ours))
    return [name for name in found if name.startswith(section) and not name.endswith(_AVERAGE)]


def _parameters(names: Iterable[str]) -> set[str]:
    """The parameters that have optimizer state."""
    return {name.split("/")[1] for name in names if name.startswith("optimizer/") and not name.endswith(_AVERAGE)}


def _equal(theirs: Any, ours: Any, name: str) -> bool:
    import torch

    one, other = theirs.whole(name), ours.whole(name)
    return one.dtype == other.dtype and torch.equal(one, other)


def _is_used(tensors: Any, name: str) -> bool:
    """Whether state of a newly trained parameter is not as an optimizer creates it."""
    if not name.startswith("optimizer/") or name.endswith(_AVERAGE):
        return False
    tensor = tensors.whole(name)
    return bool(tensor.is_floating_point() and tensor.any())  # the codes of a quantised zero are not zero


def from_proof(stage: Recipe, run: Path) -> Recipe:
    """The stage with the start that the proof of an earlier stage has left in `run`."""
    assert stage.start is not None
    source, model = str(stage.start.source), plain(stage.model)
    changes: dict[str, Any] = {"from": f"{run}/last"} if model.get("from") == checkpoint_of(stage.start) else {}
    tokenizer = str((model.get("tokenizer") or {}).get("path"))
    if tokenizer.startswith((f"{source}/", f"{stage.output}/")):
        changes["tokenizer"] = {"path": f"{run}/last/{files.PROCESSOR}"}
    start = decode(type(stage.start), {**plain(stage.start), "from": str(run), "weights": "last"}, where="start")
    return stage.model_copy(update={"model": decode(Family, {**model, **changes}, where="model"), "start": start})
