"""A finished checkpoint as the model it was saved from: on meta, with its tensors read one after the other.

What the checkpoint leaves out (the frozen base of adapters) comes from where the run had it, and is proven to be the
same. Must not know how anything is written.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from fullshard.checkpoint import folder as files
from fullshard.checkpoint.reader import CheckpointTensors, open_tensors
from fullshard.checkpoint.tensor_files import TensorEntry
from fullshard.config.part import decode, part_class
from fullshard.contracts.model import Family, Weights
from fullshard.dist.values import checksums
from fullshard.errors import CheckpointError, FullshardError
from fullshard.hf.scalars import is_scalar

LARGE = 32 * 2**20
"""Tensors of this many bytes or more are read row by row."""
_EMA = "/ema"
"""The suffix of averaged weights in the optimizer's state."""
MOVED = "If the run's base model has moved, give its new place: --base PATH."


@dataclass(frozen=True)
class Trained:
    """The model of a checkpoint, its tensors still on disk."""

    checkpoint: Path
    family: Family
    processor: Any
    module: nn.Module
    stored: CheckpointTensors
    base: Weights | None
    frozen: Mapping[str, int]
    """Checksums of what the checkpoint leaves out."""
    averaged: bool
    """Its tensors are averaged weights."""

    @cached_property
    def adapters(self) -> set[str]:
        """Names of the adapters' tensors; empty if the model itself was trained."""
        return self.family.adapters(self.module)

    def entries(self) -> dict[str, TensorEntry]:
        """Dtype and shape of every tensor, in the order in which they are read: adapters first."""
        stored = self.stored.names()
        found = {}
        for name, tensor in _tensors_of(self.module).items():
            dtype = self.stored.dtype(name) if name in stored else self._dtype(name, tensor)
            found[name] = TensorEntry(dtype, tuple(tensor.shape))
        return {name: found[name] for name in sorted(found, key=lambda name: name not in self.adapters)}

    def tensors(self, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor whole, on the CPU, one at a time."""
        stored, own = self.stored.names(), _tensors_of(self.module)
        base = self.base.names() if self.base is not None else set()
        for name in names:
            if name in stored:
                yield name, self._read(name)
            elif self.base is not None and name in base:
                yield name, self._frozen(name, own[name], self.base)
            elif not own[name].is_meta:
                yield name, own[name]  # a buffer that the module computes
            else:
                raise CheckpointError(
                    f"{self.checkpoint} does not hold {name}, and the run's model settings do not say where to "
                    f"find it. {MOVED}"
                )

    def _read(self, name: str) -> torch.Tensor:
        """A stored tensor; rows of a large one are read only when they are written."""
        num_bytes = torch.Size(self.stored.shape(name)).numel() * self.stored.dtype(name).itemsize
        large = num_bytes > LARGE and name not in self.adapters
        return cast(torch.Tensor, _Rows(self.stored, name)) if large else self.stored.whole(name)

    def _dtype(self, name: str, tensor: torch.Tensor) -> torch.dtype:
        """The dtype that the run kept it in."""
        return self.family.storage_dtype(name, tensor) if isinstance(tensor, nn.Parameter) else tensor.dtype

    def _frozen(self, name: str, tensor: torch.Tensor, base: Weights) -> torch.Tensor:
        values = base.read(name, 0, (tensor.shape or (1,))[0]).to(self._dtype(name, tensor))
        if name in self.frozen and int(checksums([values])) != self.frozen[name]:  # type: ignore[list-item]
            raise CheckpointError(
                f"{self.checkpoint} was trained on different weights than those found: {name} of the frozen base "
                f"differs. Name the base model that the run used: --base PATH."
            )
        return values


class _Rows:
    """As much of a stored tensor as an export needs: its dtype and shape, and some of its rows."""

    def __init__(self, stored: CheckpointTensors, name: str) -> None:
        self._stored, self._name = stored, name
        self.shape, self.dtype = torch.Size(stored.shape(name)), stored.dtype(name)

    def __getitem__(self, rows: slice) -> torch.Tensor:
        start, stop, _ = rows.indices(self.shape[0])
        return self._stored.read(self._name, start, stop)

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return self.shape.numel()

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point


class Values:
    """The tensors of a checkpoint, and of the frozen base that it leaves out, by rows: weights for a sharded model."""

    def __init__(self, trained: Trained) -> None:
        self._trained, self._stored = trained, trained.stored.names()
        self._names = self._stored | (trained.base.names() if trained.base is not None else set())
        for name, _ in trained.module.named_parameters():
            if name not in self._names:
                next(trained.tensors([name]))  # raises, with a message for users

    def names(self) -> set[str]:
        return self._names

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        if name in self._stored:
            return self._trained.stored.read(name, start, stop)
        _, tensor = next(self._trained.tensors([name]))  # whole, so that it can be proven
        return tensor[start:stop] if tensor.dim() else tensor


def open_trained(checkpoint: Path, *, base: str | None, trust_remote_code: bool, weights: str | None = None) -> Trained:
    """The model that a checkpoint's own recipe describes, checked against the checkpoint's tensors."""
    settings = model_settings(checkpoint, files.read_state(checkpoint), base, trust_remote_code)
    family = decode(Family, settings, where="model")
    with _advised():
        processor = _processor(checkpoint, family)
        module = family.build(processor=processor)
    return trained_as(checkpoint, family, processor, module, weights=weights)


def trained_as(
    checkpoint: Path, family: Family, processor: Any, module: nn.Module, *, weights: str | None = None
) -> Trained:
    """The tensors of a checkpoint for an existing module, checked against it."""
    stored = weights_of(checkpoint, weights)
    _check_fit(checkpoint, module, stored)
    with _advised():
        start = _weights(family, module, needed=set(_tensors_of(module)) - stored.names())
    state = files.read_state(checkpoint)
    averaged = weights != "model" and bool((state.get("recipe") or {}).get("ema"))
    return Trained(checkpoint, family, processor, module, stored, start, state.get("frozen") or {}, averaged)


@contextlib.contextmanager
def _advised() -> Iterator[None]:
    try:
        yield
    except FullshardError as error:
        error.add_note(MOVED)
        raise


def model_settings(
    checkpoint: Path, state: dict[str, Any], base: str | None, trust_remote_code: bool
) -> dict[str, Any]:
    """The model section of the run's recipe; `base` replaces where its weights come from."""
    recipe = state.get("recipe")
    if not isinstance(recipe, Mapping) or not isinstance(recipe.get("model"), Mapping):
        raise CheckpointError(
            f"{checkpoint / files.STATE} does not hold a recipe. If fullshard.save wrote it, read it with "
            "fullshard.load. If an older fullshard did, resume the run and export the checkpoint that it then writes."
        )
    settings = dict(recipe["model"])
    if settings.get("trust_remote_code") and not trust_remote_code:
        # A checkpoint may come from anywhere; running code is for the person at the keyboard to allow.
        raise CheckpointError(
            f"{checkpoint}: its model {settings.get('path')!r} runs its own Python code. Read that code, then "
            "run this again with --trust-remote-code."
        )
    if base is None:
        return settings
    is_checkpoint = "://" in base or (Path(base) / files.MANIFEST).is_file() or bool(files.candidates(Path(base)))
    kind = settings.get("kind") or str(Family.default_kind)
    family = cast(type[Family], part_class(Family, kind, where="model"))
    changed = family.with_base(settings, base, is_checkpoint=is_checkpoint)
    if changed is None:
        raise CheckpointError(f"--base {base}: the run's model of kind {kind!r} has no base to replace.")
    return changed


def _processor(checkpoint: Path, family: Family) -> Any:
    """The tokenizer or processor in the checkpoint, if it has one."""
    folder = checkpoint / files.PROCESSOR
    if not folder.is_dir():
        return None
    with contextlib.ExitStack() as held:
        if files.is_remote(folder):
            local = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="fullshard-")))
            for file in folder.iterdir():
                with file.open("rb") as source, (local / file.name).open("wb") as target:
                    shutil.copyfileobj(source, target)
            folder = local
        return family.load_processor(folder, where=str(folder))


def _weights(family: Family, module: nn.Module, *, needed: set[str]) -> Weights | None:
    """The run's starting weights, opened in any case: they hold the names under which the model was stored."""
    try:
        return family.weights(module)
    except FullshardError:
        if any(tensor.is_meta for name, tensor in _tensors_of(module).items() if name in needed):
            raise
        return None


def _tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, a tied one once, and persistent buffers, by name: what a checkpoint may hold."""
    parameters: dict[str, torch.Tensor] = dict(module.named_parameters())
    aliases = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return parameters | {name: t for name, t in module.state_dict(keep_vars=True).items() if name not in aliases}


def weights_of(checkpoint: Path, which: str | None) -> CheckpointTensors:
    """The model's tensors, `ema` or `model`; None: averaged if the run kept an average."""
    model, optimizer = (open_tensors(checkpoint).section(section) for section in ("model", "optimizer"))
    averages = {name for name in model.entries if name + _EMA in optimizer.entries}
    if which == "ema" and not averages:
        raise CheckpointError(f"{checkpoint} holds no averaged weights: the run had no ema. Leave --weights out.")
    if which == "model" or not averages:
        return model

    def read(name: str, start: int, stop: int) -> torch.Tensor:
        return optimizer.read(name + _EMA, start, stop) if name in averages else model.read(name, start, stop)

    return CheckpointTensors(model.entries | {name: optimizer.entries[name + _EMA] for name in averages}, read)


def _check_fit(checkpoint: Path, module: nn.Module, stored: CheckpointTensors) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in _tensors_of(module).items()}
    # Parameters of the objective are not exported.
    unknown = sorted(name for name in stored.names() - shapes.keys() if not is_scalar(name))
    other = sorted(name for name in stored.names() & shapes.keys() if stored.shape(name) != shapes[name])
    if unknown or other:
        first = f"{unknown[0]} is not part of it" if unknown else ""
        if other:
            first = f"{other[0]} is {list(stored.shape(other[0]))} in it and {list(shapes[other[0]])} in the model"
        raise CheckpointError(
            f"{checkpoint} does not fit the model that its own recipe describes: {first} "
            f"({len(unknown) + len(other)} of {len(stored.names())} tensors). Check that the model's folder has not "
            "changed since."
        )
