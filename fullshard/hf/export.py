"""Writes a trained model as a folder that `from_pretrained` reads: safetensors, or a PEFT adapter.

Tensors arrive one at a time and are written immediately; a block is held only if Transformers stores several of its
tensors as one. Must not know ranks or how tensors were gathered.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint.tensor_files import SafetensorsStream, TensorEntry
from fullshard.errors import CheckpointError
from fullshard.hf.adapters.edits import adapter_config, base_name, is_adapter
from fullshard.hf.adapters.merge import Merge, merged_rows
from fullshard.hf.adapters.peft_folder import stored_names
from fullshard.hf.scalars import is_scalar

SHARD_BYTES = 5_000_000_000
"""The usual size of one file."""


@dataclass(frozen=True)
class Form:
    """How a model is written."""

    dtype: torch.dtype | None = None
    """The dtype of parameters; None: fp32."""
    shard_bytes: int | None = None
    """The maximum size of a file, unless one tensor is larger; None: 5 GB."""
    merged: bool = False
    """Adapters are added to the weights; their tensors arrive before the weights that they adapt."""


def export_model(
    module: nn.Module,
    tensors: Iterator[tuple[str, torch.Tensor]],
    folder: Path,
    form: Form,
    *,
    source: Path | None,
    processor: Any,
) -> None:
    """Writes all parameters, tied ones once, under Transformers' stored names, and the config."""
    folder.mkdir(parents=True, exist_ok=True)
    model: Any = module
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    merge, dtype = Merge(module) if form.merged else None, form.dtype or torch.float32
    expected = {tied.get(name, name): p.shape for name, p in _base_parameters(module)}
    seen: set[str] = set()
    with _Writer(folder, module, dtype=dtype, shard_bytes=form.shard_bytes or SHARD_BYTES, merge=merge) as writer:
        for given, tensor in tensors:
            if merge is not None and is_adapter(given):
                merge.take(given, tensor)
                continue
            name = base_name(given)
            name = tied.get(name, name)
            if name in seen:
                continue
            seen.add(name)
            # A buffer keeps its dtype: it may hold positions or counts.
            writer.add(name, tensor, dtype if tensor.is_floating_point() and name in expected else tensor.dtype)
        require_complete(folder, expected, seen, "parameters")
        for name, buffer in _persistent_buffers(module):
            if name not in seen:
                writer.add(name, buffer.detach(), buffer.dtype)
    _write_config(model, folder, dtype=dtype, source=source)
    if processor is not None:
        processor.save_pretrained(folder)


def export_adapter(
    module: nn.Module,
    tensors: Iterator[tuple[str, torch.Tensor]],
    folder: Path,
    *,
    processor: Any,
    dtype: torch.dtype | None = None,
) -> None:
    """Writes the adapters in PEFT's layout, as trained or in `dtype`; the base is named, not copied."""
    folder.mkdir(parents=True, exist_ok=True)
    stored, seen = stored_names(module), set()
    with SafetensorsStream(folder / "adapter_model.safetensors") as stream:
        for name, tensor in tensors:
            if is_adapter(name):
                seen.add(name)
                stream.add(stored[name], tensor if dtype is None else tensor.to(dtype))
        require_complete(folder, stored, seen, "adapter tensors")
    config = copy.deepcopy(adapter_config(module))
    config.inference_mode = True
    config.save_pretrained(str(folder))
    if processor is not None:
        processor.save_pretrained(folder)


def require_complete(folder: Path, expected: Collection[str], seen: Collection[str], what: str) -> None:
    """Raises CheckpointError if a tensor did not arrive."""
    if missing := sorted(set(expected) - set(seen)):
        raise CheckpointError(
            f"{folder}: the export is incomplete, {len(missing)} of {len(expected)} {what} are missing: "
            f"{', '.join(missing[:5])}. Export from a complete checkpoint."
        )


def stored_conversions(module: nn.Module) -> list[Any]:
    """How Transformers' stored names differ from the module's. Must run before sharding renames the class."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    return [t for t in get_model_conversion_mapping(module, add_legacy=False) if not isinstance(t, PrefixChange)]


class _Writer:
    """Streams tensors into files of limited size; a file ends between blocks if a block fits into a file."""

    def __init__(
        self, folder: Path, module: nn.Module, *, dtype: torch.dtype, shard_bytes: int, merge: Merge | None
    ) -> None:
        self._folder, self._module, self._shard_bytes, self._merge = folder, module, shard_bytes, merge
        self._block_bytes: dict[str, int] = {}
        self._reserve = 0
        for name, parameter in _base_parameters(module):
            block, size = _block_of(name), parameter.numel() * dtype.itemsize
            self._block_bytes[block] = self._block_bytes.get(block, 0) + size
            # Header space per tensor; fused experts may be stored one by one.
            self._reserve += 256 * (2 * parameter.shape[0] if parameter.dim() == 3 else 1)
        self._whole_blocks = any(_makes_one_of_several(t) for t in getattr(module, "_weight_conversions", None) or ())
        self._held: dict[str, torch.Tensor] = {}
        self._block = ""
        self._stream: SafetensorsStream | None = None
        self._open = contextlib.ExitStack()
        self._in_file = 0
        self._files: list[list[str]] = []
        self._total = 0

    def add(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        block = _block_of(name)
        if block != self._block:
            self._release()
            self._block = block
            self._cut(self._block_bytes.get(block, 0), whole=False)
        entry = TensorEntry(dtype, tuple(tensor.shape))
        stored = self._renamed(name, tensor.shape)
        if stored is not None:
            self._write(stored, entry, merged_rows(name, tensor, dtype, self._merge))
            return
        self._held[name] = held = torch.empty(tensor.shape, dtype=dtype)
        start = 0
        for piece in merged_rows(name, tensor, dtype, self._merge):
            held[start : start + len(piece)] = piece
            start += len(piece)
        if not self._whole_blocks:
            self._release()

    def _renamed(self, name: str, shape: torch.Size) -> str | None:
        """The stored name of a tensor that Transformers stores unchanged; None if its values change."""
        from transformers.core_model_loading import revert_weight_conversion

        probe = torch.empty(shape, device="meta")
        try:
            state = revert_weight_conversion(self._module, {name: probe})
        except Exception:  # an operation that needs values, or other tensors of the block
            return None
        [(stored, found), *more] = state.items()
        return stored if found is probe and not more else None

    def _release(self) -> None:
        """Writes the held tensors of a block in Transformers' stored form."""
        from transformers.core_model_loading import revert_weight_conversion

        if not self._held:
            return
        try:
            state = revert_weight_conversion(self._module, self._held)
        except Exception as error:
            model: Any = self._module
            raise CheckpointError(
                f"{self._folder}: Transformers cannot turn the tensors of model type {model.config.model_type} back "
                f"into their stored form ({type(error).__name__}: {error}). Export the full state instead."
            ) from error
        self._held = {}
        for name in list(state):
            tensor = state.pop(name)
            self._write(name, TensorEntry.of(tensor), iter([tensor]))

    def _write(self, name: str, entry: TensorEntry, pieces: Iterator[torch.Tensor]) -> None:
        self._cut(entry.size_bytes, whole=True)
        if self._stream is None:
            stream = SafetensorsStream(self._part(len(self._files)), reserve_bytes=min(self._reserve, 8 << 20))
            self._stream = self._open.enter_context(stream)
            self._files.append([])
        self._stream.add_rows(name, entry, pieces)
        self._files[-1].append(name)
        self._in_file += entry.size_bytes
        self._total += entry.size_bytes

    def _cut(self, coming: int, *, whole: bool) -> None:
        """Ends the file if the next tensors do not fit; a block larger than a file is split between tensors."""
        if self._in_file and self._in_file + coming > self._shard_bytes and (whole or coming <= self._shard_bytes):
            self._end()

    def _end(self) -> None:
        self._open.close()
        self._stream, self._in_file = None, 0

    def _part(self, index: int) -> Path:
        return self._folder / f"part-{index:05d}.safetensors"

    def __enter__(self) -> _Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._open.__exit__(kind, error, trace)
            return
        self._release()
        self._end()
        self._name()

    def _name(self) -> None:
        """Renames the files to their final names, which contain their number, and writes the index."""
        for old in (*self._folder.glob("model*.safetensors"), self._folder / "model.safetensors.index.json"):
            old.unlink(missing_ok=True)
        if len(self._files) == 1:
            self._part(0).rename(self._folder / "model.safetensors")
            return
        weight_map = {}
        for index, names in enumerate(self._files):
            final = f"model-{index + 1:05d}-of-{len(self._files):05d}.safetensors"
            self._part(index).rename(self._folder / final)
            weight_map.update(dict.fromkeys(names, final))
        body = {"metadata": {"total_size": self._total}, "weight_map": dict(sorted(weight_map.items()))}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(body, indent=2), encoding="utf-8")


def _makes_one_of_several(transform: Any) -> bool:
    from transformers.core_model_loading import WeightConverter

    return isinstance(transform, WeightConverter) and len(transform.target_patterns) > 1


def _block_of(name: str) -> str:
    found = re.match(r".*?\.\d+\.", name)
    return found.group(0) if found else name


def _base_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters without adapters, by their names before adapters were added."""
    own = ((name, p) for name, p in module.named_parameters() if not is_adapter(name) and not is_scalar(name))
    return ((base_name(name), p) for name, p in own)


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if name not in parameters and isinstance(tensor, torch.Tensor):
            yield base_name(name), tensor


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
