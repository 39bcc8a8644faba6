"""Dense layers of sentence-transformers after pooling: the module, and its stored tensors.

Must not know recipes, ranks or what an embedding is used for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fullshard.checkpoint.tensor_files import SafetensorsStream, TensorEntry, in_rows
from fullshard.contracts.model import Weights
from fullshard.errors import CheckpointError
from fullshard.families.embedding.embedder.sentence_folder import AFTER_POOLING, Layer, is_after_pooling
from fullshard.hf.weights.safetensors_folder import Stored, open_files
from fullshard.hf.weights.state_file import open_pickle
from fullshard.hf.weights.stored_weights import FirstOf, NamedWeights

_SAFE, _PICKLED = "model.safetensors", "pytorch_model.bin"
_OWN = {"linear.weight": "weight", "linear.bias": "bias", "residual.weight": "residual"}
"""Stored name -> parameter name."""


class Dense(nn.Module):
    """One layer, on meta.

    Its parameters are its own, not those of an `nn.Linear`: adapters on all linear layers must stay in the backbone,
    the only place where sentence-transformers looks for them."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer
        shapes = {own: layer.shapes().get(stored) for stored, own in _OWN.items()}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device="meta")) if shape else None)
        self.activation: nn.Module = getattr(nn, layer.activation)()

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        given: Any = self
        vectors = vectors.to(given.weight.dtype)
        found: torch.Tensor = self.activation(F.linear(vectors, given.weight, given.bias))
        if not self.layer.residual:
            return found
        return found + (vectors if given.residual is None else F.linear(vectors, given.residual))


class AfterPooling(nn.Module):
    """The layers in sequence; the output is fp32.

    Not an `nn.ModuleList`: layers of one class in a list would be taken for the blocks of the model."""

    stored_apart = True
    """Stored in their own folders, not with the backbone."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__()
        for place, layer in enumerate(layers):
            self.add_module(str(place), Dense(layer))

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        for part in self.children():
            vectors = part(vectors)
        return vectors.float()


def layers_of(module: nn.Module) -> tuple[Layer, ...]:
    """The Dense layers of a module."""
    found = getattr(module, AFTER_POOLING, None)
    return tuple(part.layer for part in found.children()) if found is not None else ()


def backbone_of(module: nn.Module) -> nn.Module:
    """The same module on the same tensors without these layers: what Transformers knows of it."""
    # Made by hand: a sharded module cannot be copied, and must not lose a part while its tensors are read.
    bare: nn.Module = object.__new__(type(module))
    parts = {name: part for name, part in module._modules.items() if name != AFTER_POOLING}
    bare.__dict__ = {**module.__dict__, "_modules": parts}
    return bare


def dense_weights(layers: Sequence[Layer]) -> Weights:
    """The stored tensors of the layers, by parameter name."""
    return FirstOf(*(_layer_weights(place, layer) for place, layer in enumerate(layers)))


def _layer_weights(place: int, layer: Layer) -> NamedWeights:
    names = {own: name for name, own in _names(place, layer).items()}
    return NamedWeights(
        _open(layer.folder),
        names,
        {own: layer.shapes()[name] for own, name in names.items()},
        what=f"{layer.folder} does not hold the tensors that its config.json describes",
        advice="Fetch or save the model again.",
    )


def parameter_names(layers: Sequence[Layer]) -> set[str]:
    """The names of the layers' parameters."""
    return {own for place, layer in enumerate(layers) for own in _names(place, layer).values()}


def set_aside(
    tensors: Iterator[tuple[str, torch.Tensor]], kept: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of the backbone, and puts those of the Dense layers, which are small, into `kept`."""
    for name, tensor in tensors:
        if is_after_pooling(name):
            kept[name] = tensor
        else:
            yield name, tensor


def write_layers(
    folders: Sequence[Path], layers: Sequence[Layer], tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None
) -> None:
    """Writes tensors, by parameter name, into the layers' new folders, in `dtype` or as stored."""
    if missing := sorted(parameter_names(layers) - tensors.keys()):
        raise CheckpointError(
            f"{folders[0].parent}: the export is incomplete, {', '.join(missing)} are missing. Export from a "
            "complete checkpoint."
        )
    for place, (folder, layer) in enumerate(zip(folders, layers, strict=True)):
        kind = dtype or _open(layer.folder).dtype()
        with SafetensorsStream(folder / _SAFE) as stream:
            for name, own in _names(place, layer).items():
                pieces = (piece.to(kind) for piece in in_rows(tensors[own]))
                stream.add_rows(name, TensorEntry(kind, layer.shapes()[name]), pieces)


def _names(place: int, layer: Layer) -> dict[str, str]:
    """Stored name -> parameter name in the module."""
    return {name: f"{AFTER_POOLING}.{place}.{_OWN[name]}" for name in layer.shapes()}


def _open(folder: Path) -> Stored:
    if (folder / _SAFE).is_file():
        return open_files([folder / _SAFE])
    if (folder / _PICKLED).is_file():
        return open_pickle(folder / _PICKLED)
    raise CheckpointError(f"{folder} holds neither {_SAFE} nor {_PICKLED}. Fetch or save the model again.")
