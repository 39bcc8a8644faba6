"""`fullshard.save` and `fullshard.load`: checkpoints of a loop of your own, in the engine's verified format.

A folder holds `checkpoint-STEP`, `last` and `best`, as a run folder does. Must not know recipes or losses.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint import folder as files
from fullshard.checkpoint import integrity, paths
from fullshard.checkpoint import load as loading
from fullshard.checkpoint.reader import CheckpointTensors, open_tensors
from fullshard.checkpoint.tensors import all_tensors, model_tensors, squares
from fullshard.checkpoint.write import Sharded, Snapshot, Target, write
from fullshard.dist import reduce
from fullshard.dist.shard import fsdp_modules
from fullshard.errors import CheckpointError, FullshardError, SetupError
from fullshard.formatting.plural import counted
from fullshard.own_loop import extras
from fullshard.own_loop.arguments import require_saved, whole_number
from fullshard.own_loop.optimizers import facts_of, require_groups, require_of, restore
from fullshard.own_loop.sharding import require_sharded

logger = logging.getLogger(__name__)

KEY = "own_loop"
"""The part of state.json that belongs to a loop of your own."""


def save(
    folder: str | Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    step: int | None = None,
    best: bool = False,
    keep: int | None = None,
    **extra: Any,
) -> Path:
    """Saves `folder/checkpoint-STEP` on all ranks, reads it back, and publishes it; returns its path.

    Without a `step` checkpoints are numbered. `best` points `folder/best` at it, and `keep` deletes all but that many;
    never `best` or `last`. `extra` are values for the next `load` (numbers, strings, lists, dicts), or objects with a
    state_dict, such as a scheduler; rank 0's are saved. The folder may be a URL."""
    require_saved(folder, model, optimizer, caller="save")
    require_sharded(model, "save")
    if optimizer is not None:
        require_of(model, optimizer)
    kept = {name: extras.encode(_state(value), name) for name, value in extra.items()}
    run = files.place(folder)
    keep = None if keep is None else whole_number(keep, "fullshard.save: keep", least=1)
    given = None if step is None else whole_number(step, "fullshard.save: step", least=0)
    number = _on_main(lambda: _next(run)) if given is None else given
    tensors = (
        {f"model/{name}": tensor for name, tensor in model_tensors(model).items()}
        if optimizer is None
        else all_tensors(model, optimizer)
    )
    shares = {kind: reduce.HostCopy(share.reshape(1)) for kind, share in squares(tensors).items()}
    own = {"extra": kept, "optimizer": facts_of(model, optimizer) if optimizer is not None else None}
    facts = {KEY: own, "progress": {"step": number}, "world_size": reduce.place()[0]}
    target = Target(run, keep, Sharded(threads=1))
    return write(Snapshot(number, tensors, shares, facts, {}, best), target).path


def load(
    folder: str | Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    missing_ok: bool = False,
    **objects: Any,
) -> dict[str, Any]:
    """Loads a checkpoint into the model, the optimizer and `objects` with a load_state_dict; returns what else was
    saved, and its `step`.

    `folder` is what `save` was given (its last complete checkpoint is loaded), `folder/best` or one checkpoint. The
    number of ranks may differ from that of the save. A model that is not sharded gets its weights as well, in one
    process. With `missing_ok` a folder without a checkpoint loads nothing and returns an empty dict."""
    require_saved(folder, model, optimizer, caller="load")
    sharded = bool(fsdp_modules(model))
    if optimizer is not None:
        require_sharded(model, "load")
        require_of(model, optimizer)
    for name, value in objects.items():
        if not hasattr(value, "load_state_dict"):
            raise SetupError(
                f"fullshard.load: {name} has no load_state_dict. Plain values come back in the dict that load returns."
            )
    if sharded:
        require_sharded(model, "load")
    path = _choose(files.place(folder), missing_ok=missing_ok, together=sharded)
    if path is None:
        return {}
    state, stored = files.read_state(path), open_tensors(path)
    own: dict[str, Any] = state.get(KEY) or {}
    _require_fit(path, model, stored)
    _require_all(path, own, objects, model, optimizer)
    if not sharded:
        _fill(model, stored)
    elif optimizer is None:
        loading.load_weights(path, model=model, average={})
    else:
        _load_both(path, model, optimizer, own, stored)
    kept = {name: extras.decode(value) for name, value in (own.get("extra") or {}).items()}
    for name, value in objects.items():
        value.load_state_dict(kept.pop(name))
    return kept | {"step": files.step_of(path)}


def _require_all(
    path: Path, own: dict[str, Any], objects: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> None:
    """Raises before anything is loaded if the checkpoint has no such optimizer or object."""
    saved = own.get("extra") or {}
    if lost := next((name for name in objects if name not in saved), None):
        raise CheckpointError(f"{path} was saved without {lost}. Saved were: {', '.join(saved) or 'no extra values'}.")
    if optimizer is not None and own:
        if own.get("optimizer") is None:
            raise CheckpointError(
                f"{path} was saved without an optimizer. Load the model alone, or another checkpoint."
            )
        require_groups(path, model, optimizer, own["optimizer"])


def _state(value: Any) -> Any:
    if isinstance(value, nn.Module | torch.optim.Optimizer):
        raise SetupError(
            f"fullshard.save: a {type(value).__name__} among the extra values. One model and one optimizer are saved: "
            "put several models into one nn.ModuleDict, or save each to a folder of its own."
        )
    return value.state_dict() if hasattr(value, "state_dict") else value


def _next(run: Path) -> int:
    return max((files.step_of(path) for path in files.published(run)), default=-1) + 1


def _on_main(act: Any) -> Any:
    """What rank 0 finds, on every rank; its error as well."""
    found, problem = None, None
    if reduce.place()[1] == 0:
        try:
            found = act()
        except (FullshardError, OSError) as error:
            problem = str(error)
    found, problem = reduce.from_main((found, problem))
    if problem:
        raise CheckpointError(problem)
    return found


def _choose(given: Path, *, missing_ok: bool, together: bool) -> Path | None:
    """The checkpoint that is named, or the newest complete one of a folder; the same on all ranks."""
    among: list[Path] = _on_main(lambda: _among(given)) if together else _among(given)
    if not among:
        if missing_ok:
            return None
        raise CheckpointError(
            f"{given} has no checkpoint. fullshard.load takes the folder that fullshard.save was given."
        )
    damaged: list[str] = []
    for path in among:
        found = _problems(path, together=together)
        if not found:
            if damaged and (not together or reduce.place()[1] == 0):
                logger.warning("%s. The newest complete one is loaded: %s", damaged[0], path)
            return path
        damaged.append(f"{path} is damaged: {found[0]}")
    raise CheckpointError(f"{'; '.join(damaged)}. Load another one, or start from the beginning.")


def _among(given: Path) -> list[Path]:
    pointer = given.name in ("best", "last")
    if not paths.exists(given) and not (pointer and files.published(given.parent)):
        return []
    if re.fullmatch(r"checkpoint-\d+", given.name) and not paths.exists(given / files.MANIFEST):
        raise CheckpointError(f"{given} is damaged: {files.MANIFEST} is missing. Load another one.")
    files.recover(given)
    if paths.exists(given / files.MANIFEST) or pointer:
        return [files.named(given)]
    return files.candidates(given)


def _problems(path: Path, *, together: bool) -> list[str]:
    """What is wrong with a checkpoint; each rank reads a share of its bytes."""
    if not together:
        return integrity.problems(path)
    size, rank = reduce.place()
    return sorted(
        {line for mine in reduce.gather_objects(integrity.problems(path, rank=rank, world=size)) for line in mine}
    )


def _require_fit(path: Path, model: nn.Module, stored: CheckpointTensors) -> None:
    """Raises with names if the checkpoint holds other parameters than the model."""
    saved = stored.section("model")
    shapes = {name: _shape(saved.shape(name)) for name in saved.names()}
    own = {name: _shape(tensor.shape) for name, tensor in model_tensors(model).items()}
    other = [name for name in own if name in shapes and shapes[name] != own[name]]
    found = {
        "missing from the checkpoint": sorted(own.keys() - shapes.keys()),
        "not in the model": sorted(shapes.keys() - own.keys()),
        "of another shape": [f"{name} (saved {list(shapes[name])}, the model has {list(own[name])})" for name in other],
    }
    wrong = [f"{counted(len(n), 'tensor')} {what}: {', '.join(n[:3])}" for what, n in found.items() if n]
    if wrong:
        raise CheckpointError(f"{path} does not fit the model. {'; '.join(wrong)}. Build the model that was saved.")


def _shape(shape: Any) -> tuple[int, ...]:
    return tuple(shape) or (1,)  # a sharded scalar is a vector of one


@torch.no_grad()
def _fill(model: nn.Module, stored: CheckpointTensors) -> None:
    saved = stored.section("model")
    for name, tensor in model_tensors(model).items():
        tensor.copy_(saved.whole(name).reshape(tensor.shape))


def _load_both(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, own: dict[str, Any], stored: CheckpointTensors
) -> None:
    with_state = {name.rpartition("/")[0] for name in stored.section("optimizer").names()}
    try:
        with _only(model, optimizer, with_state):
            loading.load(path, model=model, optimizer=optimizer)
    except CheckpointError as error:
        kind, saved = type(optimizer).__name__, (own.get("optimizer") or {}).get("class")
        if not saved or saved == kind:
            raise
        found = str(error).partition(" does not fit this run ")[2].partition(")")[0].lstrip("(")
        raise CheckpointError(
            f"{path} was saved with {saved}, and its state does not fit this {kind} ({found or error}). Build the "
            "optimizer that was saved, or load the model alone."
        ) from None
    if own:
        restore(model, optimizer, own["optimizer"])


@contextmanager
def _only(model: nn.Module, optimizer: torch.optim.Optimizer, names: set[str]) -> Iterator[None]:
    """Inside, the optimizer has only the parameters that have a state in the checkpoint; the others have none."""
    by_parameter = {parameter: name for name, parameter in model.named_parameters()}
    whole = [list(group["params"]) for group in optimizer.param_groups]
    before = dict(optimizer.state)
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if by_parameter[p] in names]
    try:
        yield
    except BaseException:
        optimizer.state.clear()
        optimizer.state.update(before)  # a load that fails changes nothing
        raise
    finally:
        for group, parameters in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = parameters
