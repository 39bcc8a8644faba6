"""Writes a trained model as a folder that the ecosystem's own loader reads: safetensors, or a PEFT adapter.

Tensors arrive one at a time; at most one file's worth is in memory. Must not know ranks or how tensors were gathered.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.errors import CheckpointError
from fullshard.hf.edits import ADAPTER, adapter_config, is_adapter

SHARD_BYTES = 5_000_000_000
"""The size of one file, the ecosystem's habit."""


def export_model(
    module: nn.Module,
    tensors: Iterator[tuple[str, torch.Tensor]],
    folder: Path,
    *,
    dtype: torch.dtype,
    source: Path | None,
    processor: Any,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes all parameters in `dtype`, tied ones once, under the names that Transformers stores, and the config."""
    folder.mkdir(parents=True, exist_ok=True)
    model: Any = module
    writer = _Writer(folder, module, shard_bytes)
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    expected = {tied.get(name, name) for name, _ in module.named_parameters()}
    seen: set[str] = set()
    for given, tensor in tensors:
        name = tied.get(given, given)
        if name in seen:
            continue
        seen.add(name)
        writer.add(name, tensor.to(dtype) if tensor.is_floating_point() else tensor)
    if missing := sorted(expected - seen):
        raise CheckpointError(
            f"{folder}: the export is incomplete, {len(missing)} of {len(expected)} parameters were not given: "
            f"{', '.join(missing[:5])}. Export from a complete checkpoint."
        )
    for name, buffer in _persistent_buffers(module):
        if name not in seen:
            writer.add(name, buffer.detach().cpu())
    writer.close()
    _write_config(model, folder, dtype=dtype, source=source)
    if processor is not None:
        processor.save_pretrained(folder)


def export_adapter(
    module: nn.Module, tensors: Iterator[tuple[str, torch.Tensor]], folder: Path, *, base: str | None, processor: Any
) -> None:
    """Writes the adapters in PEFT's own layout; the base model is named, not copied."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    adapters = {name: tensor.contiguous() for name, tensor in tensors if is_adapter(name)}
    expected = {name for name, _ in module.named_parameters() if is_adapter(name)}
    if missing := sorted(expected - adapters.keys()):
        raise CheckpointError(
            f"{folder}: the export is incomplete, {len(missing)} adapter tensors were not given: "
            f"{', '.join(missing[:5])}. Export from a complete checkpoint."
        )
    state = get_peft_model_state_dict(module, state_dict=adapters, adapter_name=ADAPTER, save_embedding_layers=False)
    state = {f"base_model.model.{name}": tensor for name, tensor in state.items()}
    save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = copy.deepcopy(adapter_config(module))
    config.base_model_name_or_path = base
    config.inference_mode = True
    config.save_pretrained(str(folder))
    if processor is not None:
        processor.save_pretrained(folder)


def stored_conversions(module: nn.Module) -> list[Any]:
    """How Transformers' stored names differ from the module's; asked for before sharding renames the module's class."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    return [t for t in get_model_conversion_mapping(module, add_legacy=False) if not isinstance(t, PrefixChange)]


class _Writer:
    """Collects tensors into files of a given size; one ends between blocks, for conversions that need a whole block."""

    def __init__(self, folder: Path, module: nn.Module, shard_bytes: int) -> None:
        self._folder, self._module, self._shard_bytes = folder, module, shard_bytes
        self._held: dict[str, torch.Tensor] = {}
        self._bytes = 0
        self._block = ""
        self._files: list[tuple[Path, list[str]]] = []
        self._total = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        block = _block_of(name)
        if self._held and block != self._block and self._bytes >= self._shard_bytes:
            self._flush()
        self._block = block
        self._held[name] = tensor.contiguous()
        self._bytes += tensor.nbytes

    def _flush(self) -> None:
        from safetensors.torch import save_file
        from transformers.core_model_loading import revert_weight_conversion

        try:
            state = revert_weight_conversion(self._module, self._held)
        except Exception as error:
            model: Any = self._module
            raise CheckpointError(
                f"{self._folder}: Transformers cannot turn the tensors of model type {model.config.model_type} back "
                f"into their stored form ({type(error).__name__}: {error}). Export the full state instead."
            ) from error
        path = self._folder / f"part-{len(self._files):05d}.safetensors"
        # Conversions may give views of one tensor, which safetensors refuses.
        save_file({n: t.clone().contiguous() for n, t in state.items()}, path, metadata={"format": "pt"})
        self._files.append((path, list(state)))
        self._total += sum(t.nbytes for t in state.values())
        self._held, self._bytes = {}, 0

    def close(self) -> None:
        """Gives the files their final names, which hold their number, and writes the index."""
        if self._held:
            self._flush()
        for old in (*self._folder.glob("model*.safetensors"), self._folder / "model.safetensors.index.json"):
            old.unlink(missing_ok=True)
        if len(self._files) == 1:
            self._files[0][0].rename(self._folder / "model.safetensors")
            return
        weight_map = {}
        for index, (path, names) in enumerate(self._files, start=1):
            final = f"model-{index:05d}-of-{len(self._files):05d}.safetensors"
            path.rename(self._folder / final)
            weight_map.update(dict.fromkeys(names, final))
        body = {"metadata": {"total_size": self._total}, "weight_map": dict(sorted(weight_map.items()))}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(body, indent=2), encoding="utf-8")


def _block_of(name: str) -> str:
    found = re.match(r".*?\.\d+\.", name)
    return found.group(0) if found else name


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if name not in parameters and isinstance(tensor, torch.Tensor):
            yield name, tensor


def _write_config(model: Any, folder: Path, *, dtype: torch.dtype, source: Path | None) -> None:
    from transformers import GenerationConfig

    config = copy.deepcopy(model.config)
    config.architectures = [model.architecture_name]
    config.dtype = dtype
    for part in {id(c): c for c in (config, config.get_text_config(decoder=True))}.values():
        if hasattr(part, "use_cache"):
            # Off only while training.
            part.use_cache = True
    config.save_pretrained(folder)
    if source is not None and (source / "generation_config.json").is_file():
        shutil.copy(source / "generation_config.json", folder)
    else:
        GenerationConfig.from_model_config(config).save_pretrained(folder)
    if source is not None and getattr(config, "auto_map", None):
        for code in source.glob("*.py"):
            shutil.copy(code, folder)
