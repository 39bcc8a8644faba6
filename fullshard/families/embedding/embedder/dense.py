"""Dense layers of sentence-transformers between pooling and the embedding: as a module, and their tensors in files.

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
from fullshard.errors import CheckpointError
from fullshard.families.embedding.embedder.sentence_folder import AFTER_POOLING, Layer, is_after_pooling
from fullshard.hf.weights.safetensors_folder import Stored, open_files
from fullshard.hf.weights.state_file import open_pickle
from fullshard.hf.weights.stored_weights import check_names

_SAFE, _PICKLED = "model.safetensors", "pytorch_model.bin"
_OWN = {"linear.weight": "weight", "linear.bias": "bias", "residual.weight": "residual"}
"""The stored names, and those of the parameters."""


class Dense(nn.Module):
    """One layer, on meta.

    It holds its parameters itself, in no `nn.Linear`: adapters on all linear layers are for the backbone, the only
    place where sentence-transformers looks for them."""

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
    """Layers one after the other; fp32 comes out, whatever they compute in.

    No `nn.ModuleList`: layers of one class in a list would be taken for the blocks of the model."""

    stored_apart = True
    """Their values lie in folders of their own, not among the backbone's."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__()
        for place, layer in enumerate(layers):
            self.add_module(str(place), Dense(layer))

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        for part in self.children():
            vectors = part(vectors)
        return vectors.float()


def layers_of(module: nn.Module) -> tuple[Layer, ...]:
    """The layers that a module was given."""
    found = getattr(module, AFTER_POOLING, None)
    return tuple(part.layer for part in found.children()) if found is not None else ()


def backbone_of(module: nn.Module) -> nn.Module:
    """The same module on the same tensors, but for these layers: what Transformers knows of it."""
    # Made by hand: a sharded module cannot be copied, and while its tensors are read it must not lose a part.
    bare: nn.Module = object.__new__(type(module))
    parts = {name: part for name, part in module._modules.items() if name != AFTER_POOLING}
    bare.__dict__ = {**module.__dict__, "_modules": parts}
    return bare


class DenseWeights:
    """The stored tensors of layers by their parameters' names; strict both ways."""

    stored_apart = True
    """Their values lie in folders of their own, not among the backbone's."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._found: dict[str, tuple[Stored, str]] = {}
        for place, layer in enumerate(layers):
            stored, needed = _open(layer.folder), layer.shapes()
            check_names(
                f"{layer.folder} does not hold the tensors that its config.json describes",
                missing=sorted(needed.keys() - stored.keys()),
                extra=sorted(stored.keys() - needed.keys()),
                shapes={
                    name: (stored[name].shape, shape)
                    for name, shape in needed.items()
                    if name in stored and stored[name].shape != shape
                },
                advice="Fetch or save the model again.",
            )
            self._found |= {own: (stored, name) for name, own in _names(place, layer).items()}

    def names(self) -> set[str]:
        return set(self._found)

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        stored, source = self._found[name]
        return stored.read(source, start, stop)


def parameter_names(layers: Sequence[Layer]) -> set[str]:
    """The module's names of what the layers hold."""
    return {own for place, layer in enumerate(layers) for own in _names(place, layer).values()}


def set_aside(
    tensors: Iterator[tuple[str, torch.Tensor]], kept: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Passes on the tensors of the backbone, and keeps those of these layers, which are small."""
    for name, tensor in tensors:
        if is_after_pooling(name):
            kept[name] = tensor
        else:
            yield name, tensor


def write_layers(
    folders: Sequence[Path], layers: Sequence[Layer], tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None
) -> None:
    """Writes tensors, given by the names of parameters, into the layers' new folders: in `dtype`, else as stored."""
    if missing := sorted(parameter_names(layers) - tensors.keys()):
        raise CheckpointError(
            f"{folders[0].parent}: the export is incomplete, {', '.join(missing)} were not given. Export from a "
            "complete checkpoint."
        )
    for place, (folder, layer) in enumerate(zip(folders, layers, strict=True)):
        kind = dtype or _open(layer.folder).dtype()
        with SafetensorsStream(folder / _SAFE) as stream:
            for name, own in _names(place, layer).items():
                pieces = (piece.to(kind) for piece in in_rows(tensors[own]))
                stream.add_rows(name, TensorEntry(kind, layer.shapes()[name]), pieces)


def _names(place: int, layer: Layer) -> dict[str, str]:
    """Stored names, and those of the parameters."""
    return {name: f"{AFTER_POOLING}.{place}.{_OWN[name]}" for name in layer.shapes()}


def _open(folder: Path) -> Stored:
    if (folder / _SAFE).is_file():
        return open_files([folder / _SAFE])
    if (folder / _PICKLED).is_file():
        return open_pickle(folder / _PICKLED)
    raise CheckpointError(f"{folder} holds neither {_SAFE} nor {_PICKLED}. Fetch or save the model again.")


__all__ = [
    "AfterPooling",
    "Dense",
    "DenseWeights",
    "backbone_of",
    "layers_of",
    "parameter_names",
    "set_aside",
    "write_layers",
]
