"""Values from `model.from`: the weights of any fullshard checkpoint, or one file with a whole state.

Each tensor is read in rows, when a rank asks for them. Adapters and frozen parameters that a checkpoint leaves out come
from the base model's own folder. Must not know recipes, ranks or optimizers.
"""

from __future__ import annotations

import fnmatch
import functools
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

from fullshard.config.part import part_class
from fullshard.contracts.model import Family, Weights
from fullshard.errors import CheckpointError
from fullshard.hf import checkpoint_model
from fullshard.hf.adapters.edits import base_name, has_adapters, is_adapter
from fullshard.hf.scalars import is_scalar
from fullshard.hf.weights.safetensors_folder import Stored, TensorEntry
from fullshard.hf.weights.state_file import Renamed, open_state
from fullshard.hf.weights.stored_weights import FirstOf, NamedWeights, StoredWeights, adapter_shapes

logger = logging.getLogger(__name__)

_ADVICE = (
    "Check that model.path or model.architecture, model.overrides, the tokenizer and model.lora are those that it was "
    "saved with."
)


class _Section(Stored):
    """The model's tensors in a checkpoint of either format."""

    def __init__(self, checkpoint: Path) -> None:
        from fullshard.checkpoint.reader import open_tensors

        self._reader = open_tensors(checkpoint).section("model")
        super().__init__(
            {n: TensorEntry(checkpoint, self._reader.shape(n), self._reader.dtype(n)) for n in self._reader.names()}
        )

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        rows = (self[name].shape or (1,))[0]
        return self._reader.read(name, start, rows if stop is None else min(stop, rows))


def open_start(start: str) -> Stored:
    """The model's tensors that `model.from` names."""
    try:
        if checkpoint_model.is_file(start):
            return open_state(Path(start).expanduser())
        return _Section(checkpoint_model.checkpoint_of(start))
    except CheckpointError as error:
        raise CheckpointError(f"model.from = {start!r}: {error}") from error


def frozen_dtype(start: str) -> torch.dtype | None:
    """The dtype of the stored base model; None if only adapters are stored."""
    return _frozen_dtype(start, os.getcwd())


@functools.lru_cache(maxsize=8)
def _frozen_dtype(start: str, folder: str) -> torch.dtype | None:
    stored = open_start(start)
    base = {name: name for name in stored if not is_adapter(name) and not is_scalar(name)}
    return Renamed(stored, base).dtype() if base else None


def start_weights(
    start: str,
    module: nn.Module,
    *,
    base: Callable[[], Weights] | None,
    adapter: Callable[[], Weights] | None,
    resized: bool,
    alpha: float | None,
) -> Weights:
    """Values for the module. `base` and `adapter` open the folders of `model.path`, for what the start does not hold.

    If neither the start nor `model.path` has adapters, they get no value here and start fresh."""
    stored = open_start(start)
    place, sources = f"model.from = {start!r}", list[Weights]()
    if not stored:
        raise CheckpointError(f"{place} holds no tensors of a model. Name another checkpoint.")
    logger.info("weights to start from: %s", next(iter(stored.values())).file)
    adapters = {name: name for name in stored if is_adapter(name)}
    # Scalars that an objective trained with the model belong to that run.
    rest = {base_name(name): name for name in stored if not is_adapter(name) and not is_scalar(name)}
    if adapters:
        if not has_adapters(module):
            raise CheckpointError(
                f"{place} holds {len(adapters)} adapter tensors ({next(iter(adapters))}, ...), but this model has no "
                "adapters. Set model.lora as in that run, or merge them first: fullshard export."
            )
        _compare(start, alpha)
        what = f"{place} does not hold the adapters of this model"
        renamed, shapes = Renamed(stored, adapters), adapter_shapes(module)
        sources.append(NamedWeights(renamed, adapters, shapes, what=what, advice=_ADVICE))
    elif adapter is not None:
        sources.append(adapter())
    if not rest and base is None:
        raise CheckpointError(f"{place} holds adapters, but no base model. Name the base in model.path.")
    if rest:
        absent = _left_out(start, whole=bool(adapters)) if base is not None else lambda name: False
        names = Renamed(stored, rest)
        sources.append(
            StoredWeights(names, module, place=place, advice=_ADVICE, resized=resized, own_names=True, may_miss=absent)
        )
    have = {name for source in sources for name in source.names()}
    if base is not None and any(
        n not in have and not is_adapter(n) and not is_scalar(n) for n in module.state_dict(keep_vars=True)
    ):
        sources.append(base())
    return FirstOf(*sources)


def _left_out(start: str, *, whole: bool) -> Callable[[str], bool]:
    """Which parameters a checkpoint leaves to the base model's folder: those that its run did not train."""
    frozen = (None if checkpoint_model.is_file(start) else checkpoint_model.recorded_model(start)) or {}
    never = part_class(Family, frozen["kind"], where="model").never_trained if "kind" in frozen else ()
    groups = [] if checkpoint_model.is_file(start) else checkpoint_model.recorded_groups(start)
    patterns = [*(frozen.get("freeze") or []), *never, *(p for g in groups if g.get("freeze") for p in g["match"])]
    return lambda name: whole or any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _compare(start: str, alpha: float | None) -> None:
    """Adapters have another effect with another scale, which no shape shows."""
    settings = None if checkpoint_model.is_file(start) else checkpoint_model.recorded_model(start)
    then = (settings or {}).get("lora")
    if isinstance(then, Mapping) and alpha is not None and then.get("alpha") != alpha:
        logger.warning(
            "model.lora.alpha = %g, but the adapters of model.from were trained with %s: they start with a "
            "different effect",
            *(alpha, then.get("alpha")),
        )
