"""Reads tensors of a finished checkpoint of either format, by rows; needs no ranks and no model.

Starting from a checkpoint, exporting and comparing all read through this. Must not know what the tensors mean.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from fullshard.checkpoint import folder as files
from fullshard.checkpoint.dcp_files import Reader
from fullshard.errors import CheckpointError
from fullshard.formatting.plural import counted

EMA = "/ema"
"""The suffix of averaged weights in the optimizer's state."""


class CheckpointTensors:
    """Tensors by name: `model/NAME` and `optimizer/NAME/KEY`."""

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix

    def names(self) -> set[str]:
        """The stored names."""
        prefix = self._prefix
        return {name.removeprefix(prefix) for name in self._all() if name.startswith(prefix)}

    def shape(self, name: str) -> tuple[int, ...]:
        raise NotImplementedError

    def dtype(self, name: str) -> torch.dtype:
        raise NotImplementedError

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows `start` to `stop` (of dim 0), on the CPU, as stored; a 0-d tensor is whole."""
        raise NotImplementedError

    def whole(self, name: str) -> torch.Tensor:
        return self.read(name, 0, (self.shape(name) or (1,))[0])

    def section(self, name: str) -> CheckpointTensors:
        """The tensors of one section, `model` or `optimizer`, without its prefix."""
        raise NotImplementedError

    def _all(self) -> set[str]:
        raise NotImplementedError


def open_tensors(checkpoint: Path) -> CheckpointTensors:
    """The tensors of a checkpoint of either format."""
    if files.read_manifest(checkpoint).get("format") != "full":
        return Sharded(Reader(checkpoint))
    if files.is_remote(checkpoint):
        raise CheckpointError(
            f"{checkpoint} has the full format, which cannot be read by rows from a store. Copy it to a local folder."
        )
    return Full(checkpoint)


class Sharded(CheckpointTensors):
    """What DCP wrote: each tensor in pieces, one or more per rank."""

    def __init__(self, reader: Reader, prefix: str = "", metadata: Any = None) -> None:
        super().__init__(prefix)
        self._reader, self._metadata = reader, metadata or reader.read_metadata()
        self._pieces: dict[str, list[tuple[Any, Any]]] = {}
        for index, info in self._metadata.storage_data.items():
            self._pieces.setdefault(index.fqn, []).append((index, info))

    def section(self, name: str) -> CheckpointTensors:
        return Sharded(self._reader, f"{name}/", self._metadata)

    def _all(self) -> set[str]:
        return set(self._metadata.state_dict_metadata)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entry(name).size)

    def dtype(self, name: str) -> torch.dtype:
        dtype: torch.dtype = self._entry(name).properties.dtype
        return dtype

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        entry, parts = self._entry(name), []
        if not entry.size:
            return self._reader.chunk(self._pieces[self._prefix + name][0][1])
        for index, info in sorted(self._pieces[self._prefix + name], key=lambda piece: piece[0].offset):
            offset, size = index.offset, self._size(name, index.offset)
            if any(offset[1:]) or tuple(size[1:]) != tuple(entry.size[1:]):
                raise CheckpointError(f"{self._prefix}{name} is not stored by rows: fullshard did not write it.")
            begin, end = max(start, offset[0]), min(stop, offset[0] + size[0])
            if begin < end:
                parts.append((info, slice(begin - offset[0], end - offset[0])))
        found, done = torch.empty((max(stop - start, 0), *entry.size[1:]), dtype=entry.properties.dtype), 0
        for info, rows in parts:
            number = rows.stop - rows.start
            self._reader.rows(info, rows.start, found[done : done + number])
            done += number
        return self._complete(name, found[:done], stop - start)

    def _complete(self, name: str, found: torch.Tensor, rows: int) -> torch.Tensor:
        if found.shape[0] != max(rows, 0):
            raise CheckpointError(f"{self._prefix}{name}: {found.shape[0]} of {counted(rows, 'row')} are stored.")
        return found

    def _size(self, name: str, offset: Any) -> Any:
        return next(chunk.sizes for chunk in self._entry(name).chunks if tuple(chunk.offsets) == tuple(offset))

    def _entry(self, name: str) -> Any:
        return self._metadata.state_dict_metadata[self._prefix + name]


class Full(CheckpointTensors):
    """One safetensors file per section."""

    def __init__(self, checkpoint: Path, prefix: str = "") -> None:
        super().__init__(prefix)
        self._checkpoint = checkpoint
        self._files = {}
        for section in ("model", "optimizer"):
            path = checkpoint / f"{section}.safetensors"
            try:
                self._files[section] = safe_open(path, framework="pt")
            except Exception as error:  # SafetensorError
                raise CheckpointError(f"{path} cannot be read ({error}).") from error

    def section(self, name: str) -> CheckpointTensors:
        return Full(self._checkpoint, f"{name}/")

    def _all(self) -> set[str]:
        return {f"{section}/{name}" for section, file in self._files.items() for name in file.keys()}  # noqa: SIM118

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        return self.read(name, 0, 0).dtype

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        part = self._slice(name)
        rows: torch.Tensor = part[start:stop] if part.get_shape() else part[...]
        return rows

    def _slice(self, name: str) -> Any:
        section, _, key = (self._prefix + name).partition("/")
        return self._files[section].get_slice(key)


class Averaged(CheckpointTensors):
    """The model's tensors, with trained ones replaced by their averages."""

    def __init__(self, tensors: CheckpointTensors) -> None:
        super().__init__()
        self._model, self._kept = tensors.section("model"), tensors.section("optimizer")
        self._averages = {name.removesuffix(EMA) for name in self._kept.names() if name.endswith(EMA)}

    @property
    def there(self) -> bool:
        """Whether the run kept an average."""
        return bool(self._averages)

    def names(self) -> set[str]:
        return self._model.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._model.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._kept.dtype(name + EMA) if name in self._averages else self._model.dtype(name)

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        if name in self._averages:
            return self._kept.read(name + EMA, start, stop)
        return self._model.read(name, start, stop)


def weights_of(checkpoint: Path, which: str | None) -> CheckpointTensors:
    """The model's tensors, `ema` or `model`; None: averaged if the run kept an average."""
    tensors = open_tensors(checkpoint)
    averaged = Averaged(tensors)
    if which == "ema" and not averaged.there:
        raise CheckpointError(f"{checkpoint} holds no averaged weights: the run had no ema. Leave --weights out.")
    return averaged if averaged.there and which != "model" else tensors.section("model")


def described(tensors: CheckpointTensors) -> dict[str, dict[str, Any]]:
    """Shape and dtype by name, as in the manifest."""
    return {
        name: {"shape": list(tensors.shape(name)), "dtype": str(tensors.dtype(name)).removeprefix("torch.")}
        for name in tensors.names()
    }
