"""Adds trained adapters to the weights they adapt, a few rows at a time and in fp32.

What peft's `merge_and_unload` computes, without the whole model in memory. Must not know files or where the tensors
come from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint.tensor_files import in_rows
from fullshard.errors import CheckpointError
from fullshard.hf.adapters.edits import ADAPTER, base_name


class Merge:
    """The adapters of one module: takes their tensors first, then merges them into rows of the weights."""

    def __init__(self, module: nn.Module) -> None:
        self._layers = _adapted(module)
        self._owner = {part: name for name, (path, layer) in self._layers.items() for part in _parts(path, layer)}
        self._values: dict[str, torch.Tensor] = {}

    def take(self, name: str, tensor: torch.Tensor) -> None:
        """One adapter tensor, under its own name."""
        if name not in self._owner:
            raise CheckpointError(f"{name} is not part of a mergeable adapter. Export it with --as adapter.")
        self._values[name] = tensor.detach().to("cpu", torch.float32)

    def rows(self, name: str, rows: torch.Tensor, start: int) -> torch.Tensor:
        """Rows of a weight (by its name before adapters) with the adapter added, in fp32; others as they are."""
        if name not in self._layers:
            return rows
        path, layer = self._layers[name]
        missing = [part for part in _parts(path, layer) if part not in self._values]
        if missing:
            raise CheckpointError(f"{', '.join(missing)}: missing, or received after the adapted weight {name}.")
        down, up = (self._values[part] for part in _parts(path, layer))
        delta = _delta(layer, down, up, slice(start, start + rows.shape[0]))
        scaling: float = layer.scaling[ADAPTER]
        return rows.to(torch.float32) + delta * scaling


def merged_rows(name: str, tensor: torch.Tensor, dtype: torch.dtype, merge: Merge | None) -> Iterator[torch.Tensor]:
    """A tensor in pieces of a few rows, in `dtype`, with its adapter added if there is a `merge`."""
    start = 0
    for piece in in_rows(tensor):
        yield (merge.rows(name, piece, start) if merge is not None and piece.dim() else piece).to(dtype)
        start += len(piece) if piece.dim() else 1


def _adapted(module: nn.Module) -> dict[str, tuple[str, Any]]:
    """Adapted weight, by its name before adapters -> path and layer of the adapter."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import Embedding, Linear, ParamWrapper

    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(base_name(name))
    found = {}
    for path, layer in module.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        given: Any = layer
        if not isinstance(layer, (Linear, Embedding, ParamWrapper)) or given.use_dora.get(ADAPTER):
            raise CheckpointError(
                f"{path}: adapters on {type(given.get_base_layer()).__name__} layers cannot be merged here. Export "
                "with --as adapter, and merge with peft: PeftModel.from_pretrained(base, FOLDER).merge_and_unload()."
            )
        weight = given.get_param() if isinstance(layer, ParamWrapper) else given.get_base_layer().weight
        if len(names[id(weight)]) > 1:
            raise CheckpointError(
                f"{path} is adapted, and its weight is also {', '.join(names[id(weight)])}: merging would change both. "
                "Export with --as adapter, which keeps them apart."
            )
        found[names[id(weight)][0]] = (path, layer)
    return found


def _parts(path: str, layer: Any) -> tuple[str, str]:
    """The names of an adapter's two matrices: down and up."""
    if layer.lora_embedding_A:
        return f"{path}.lora_embedding_A.{ADAPTER}", f"{path}.lora_embedding_B.{ADAPTER}"
    return f"{path}.lora_A.{ADAPTER}.weight", f"{path}.lora_B.{ADAPTER}.weight"


def _delta(layer: Any, down: torch.Tensor, up: torch.Tensor, rows: slice) -> torch.Tensor:
    """Rows of the product of the two matrices, in the layout of the weight."""
    experts = getattr(layer, "num_experts", 1)
    if experts > 1:
        # peft stacks the ranks of all experts: rows are (expert, rank) one way and (rank, expert) the other.
        down_ERI = down.reshape(experts, -1, down.shape[-1])[rows]
        up_ORE = up.reshape(up.shape[0], -1, experts)[..., rows]
        form = "ore,eri->eoi" if layer._did_swap_in_out_features else "ore,eri->eio"
        return torch.einsum(form, up_ORE, down_ERI)
    # Embeddings and GPT-2's Conv1D store their matrix transposed.
    if layer.lora_embedding_A or layer.fan_in_fan_out:
        return down[:, rows].T @ up.T
    return up[rows] @ down
