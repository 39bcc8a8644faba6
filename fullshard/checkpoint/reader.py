"""Reads tensors of a finished checkpoint of either format, by rows; needs no ranks and no model.

Starting from a checkpoint, exporting and comparing all read through this. Must not know what the tensors mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from fullshard.checkpoint import folder as files
from fullshard.checkpoint.dcp_files import Reader
from fullshard.checkpoint.tensor_files import DTYPES, TensorEntry
from fullshard.errors import CheckpointError
from fullshard.formatting.plural import counted

SECTIONS = ("model", "optimizer")


@dataclass(frozen=True)
class CheckpointTensors:
    """Tensors by name: `model/NAME` and `optimizer/NAME/KEY`."""

    entries: dict[str, TensorEntry]
    _rows: Callable[[str, int, int], torch.Tensor]

    def names(self) -> set[str]:
        return set(self.entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.entries[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self.entries[name].dtype

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows `start` to `stop` (of dim 0), on the CPU, as stored; a 0-d tensor is whole."""
        return self._rows(name, start, stop)

    def whole(self, name: str) -> torch.Tensor:
        return self.read(name, 0, (self.shape(name) or (1,))[0])

    def section(self, section: str) -> CheckpointTensors:
        """The tensors of one section, `model` or `optimizer`, without its prefix."""
        prefix = f"{section}/"
        inside = {name.removeprefix(prefix): entry for name, entry in self.entries.items() if name.startswith(prefix)}
        return CheckpointTensors(inside, lambda name, start, stop: self.read(prefix + name, start, stop))


def open_tensors(checkpoint: Path) -> CheckpointTensors:
    """The tensors of a checkpoint of either format."""
    if not is_full(checkpoint):
        return _sharded(Reader(checkpoint))
    if files.is_remote(checkpoint):
        raise CheckpointError(
            f"{checkpoint} has the full format, which cannot be read by rows from a store. Copy it to a local folder."
        )
    return _full(checkpoint)


def is_full(checkpoint: Path) -> bool:
    """Whether the checkpoint has the `full` format, not `sharded`."""
    return files.read_manifest(checkpoint).get("format") == "full"


def _sharded(reader: Reader) -> CheckpointTensors:
    """What DCP wrote: each tensor in pieces of rows, one or more per rank."""
    metadata = reader.read_metadata()
    stored: dict[str, Any] = metadata.state_dict_metadata
    pieces: dict[str, list[tuple[Any, Any]]] = {}
    for index, info in metadata.storage_data.items():
        pieces.setdefault(index.fqn, []).append((index.offset, info))

    def read(name: str, start: int, stop: int) -> torch.Tensor:
        whole, done = stored[name], 0
        if not whole.size:
            return reader.piece(pieces[name][0][1])
        sizes = {tuple(chunk.offsets): chunk.sizes for chunk in whole.chunks}
        rows = torch.empty((max(stop - start, 0), *whole.size[1:]), dtype=whole.properties.dtype)
        for offset, info in sorted(pieces[name], key=lambda piece: piece[0]):
            size = sizes[tuple(offset)]
            if any(offset[1:]) or size[1:] != whole.size[1:]:
                raise CheckpointError(f"{name} is not stored by rows: fullshard did not write it.")
            first, last = max(start, offset[0]), min(stop, offset[0] + size[0])
            if first < last:
                reader.rows(info, first - offset[0], rows[done : done + last - first])
                done += last - first
        if done != len(rows):
            raise CheckpointError(f"{name}: {done} of {counted(len(rows), 'row')} are stored.")
        return rows

    return CheckpointTensors({name: TensorEntry(e.properties.dtype, tuple(e.size)) for name, e in stored.items()}, read)


def _full(checkpoint: Path) -> CheckpointTensors:
    """One safetensors file per section."""
    opened: dict[str, Any] = {}
    entries = {}
    for section in SECTIONS:
        path = checkpoint / f"{section}.safetensors"
        try:
            file = opened[section] = safe_open(path, framework="pt")
        except Exception as error:  # SafetensorError
            raise CheckpointError(f"{path} cannot be read ({error}).") from error
        for name in file.keys():  # noqa: SIM118
            found = file.get_slice(name)
            entries[f"{section}/{name}"] = TensorEntry(DTYPES[found.get_dtype()], tuple(found.get_shape()))

    def read(name: str, start: int, stop: int) -> torch.Tensor:
        section, _, key = name.partition("/")
        found = opened[section].get_slice(key)
        rows: torch.Tensor = found[start:stop] if found.get_shape() else found[...]
        return rows

    return CheckpointTensors(entries, read)
