"""A folder of safetensors files as one mapping from stored name to shape, dtype and rows.

Must not know modules, names of parameters or ranks.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fullshard.errors import CheckpointError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


_STEMS = ("model", "diffusion_pytorch_model")


@dataclass(frozen=True)
class TensorEntry:
    """One stored tensor."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


class Stored(Mapping[str, TensorEntry]):
    """The tensors of a folder; headers are read immediately, values on demand."""

    def __init__(self, entries: dict[str, TensorEntry]) -> None:
        self._entries = entries
        self._open: dict[Path, Any] = {}

    def __getitem__(self, name: str) -> TensorEntry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows of one tensor; all of it without `start` and `stop`. Rows beyond the last are left out."""
        entry = self._entries[name]
        if entry.file not in self._open:
            self._open[entry.file] = _open(entry.file)
        part = self._open[entry.file].get_slice(name)
        tensor: torch.Tensor = part[start:stop] if entry.shape else part[...]
        # A slice may be a view of the mapped file; a copy lets the file be closed.
        return tensor.clone()

    def dtype(self) -> torch.dtype:
        """The floating-point dtype that most values are stored in."""
        sizes: Counter[torch.dtype] = Counter()
        for entry in self._entries.values():
            if entry.dtype.is_floating_point:
                sizes[entry.dtype] += torch.Size(entry.shape).numel()
        return sizes.most_common(1)[0][0] if sizes else torch.float32


def open_folder(folder: Path) -> Stored:
    """Opens `model.safetensors`, or the files of `model.safetensors.index.json`, and reads their headers."""
    return open_files(files_of(folder))


@functools.lru_cache(maxsize=8)
def stored_dtype(folder: Path) -> torch.dtype:
    """The dtype that most values of a folder are stored in."""
    return open_folder(folder).dtype()


def open_files(files: Sequence[Path]) -> Stored:
    """The tensors of these files together; headers are read, values are not."""
    entries: dict[str, TensorEntry] = {}
    for file in files:
        handle = _open(file)
        for name in list(handle.keys()):
            part = handle.get_slice(name)
            dtype = part.get_dtype()
            if dtype not in _DTYPES:
                raise CheckpointError(
                    f"{file}: {name} is stored as {dtype}, a quantised form that cannot be trained. "
                    f"Use the unquantised weights ({', '.join(k for k in _DTYPES if 'F' in k)})."
                )
            entries[name] = TensorEntry(file, tuple(part.get_shape()), _DTYPES[dtype])
    return Stored(entries)


def files_of(folder: Path) -> list[Path]:
    """`model.safetensors`, or the files that `model.safetensors.index.json` names; raises if one is missing.
    diffusers has other names for the same files."""
    stem = next((stem for stem in _STEMS if any(folder.glob(f"{stem}.safetensors*"))), _STEMS[0])
    index, single = folder / f"{stem}.safetensors.index.json", folder / f"{stem}.safetensors"
    if index.is_file():
        try:
            weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{index} is not a safetensors index ({error}). Fetch or save it again.") from error
        files = [folder / name for name in sorted(set(weight_map.values()))]
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise CheckpointError(
                f"{folder}: {len(absent)} of {len(files)} weight files are missing: {', '.join(absent[:5])}. "
                "Fetch the model again."
            )
        return files
    if single.is_file():
        return [single]
    others = sorted(p.name for p in folder.glob("*.bin")) + sorted(p.name for p in folder.glob("*.pt*"))
    if others:
        raise CheckpointError(
            f"{folder} holds {others[0]} but no safetensors; pickled weights can run code and cannot be read in "
            "slices. Convert once: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)."
        )
    raise CheckpointError(
        f"{folder} holds neither model.safetensors nor model.safetensors.index.json. "
        "Give model.path a folder with weights."
    )


def _open(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(str(file), framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        size = file.stat().st_size if file.is_file() else 0
        raise CheckpointError(
            f"{file} ({size:,} bytes) is truncated or not a safetensors file ({error}). Fetch or save it again."
        ) from error
