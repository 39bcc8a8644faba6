"""Writes safetensors files one tensor at a time.

Bytes go to disk as they arrive; nothing is buffered. Must not know what the tensors mean or where they come
from, nor anything else of the package but its errors.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

import torch
from safetensors.torch import _TYPES

from fullshard.errors import CheckpointError

DTYPES: dict[str, torch.dtype] = _TYPES
"""The dtypes of safetensors by its own names."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PIECE_BYTES = 16 << 20
"""Bytes per write call: object stores copy each into a buffer."""
_ROWS_BYTES = 4 << 20
"""Bytes read, converted and written at a time, so that large tensors are never copied whole."""


@dataclass(frozen=True)
class TensorEntry:
    """Dtype and shape of one tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorEntry:
        return cls(tensor.dtype, tuple(tensor.shape))


def in_rows(tensor: Any) -> Iterator[torch.Tensor]:
    """A tensor, or an object that reads rows when indexed, in pieces of a few rows."""
    if tensor.dim() == 0 or tensor.numel() == 0:
        yield tensor[...].cpu()
        return
    rows = max(_ROWS_BYTES * tensor.shape[0] // (tensor.numel() * 4), 1)
    for start in range(0, tensor.shape[0], rows):
        yield tensor[start : start + rows].cpu()


class TensorStream:
    """A file that takes tensors by name, each once."""

    def __init__(self, file: Path | IO[bytes], *, entries: Mapping[str, TensorEntry] | None, mode: str) -> None:
        opened: Any = file
        # A UPath is not a pathlib.Path, but opens like one.
        self._owned = not hasattr(opened, "write")
        self._file: Any = opened.open(mode) if self._owned else opened
        self._where = str(opened if self._owned else getattr(opened, "name", "the file"))
        self._expected = dict(entries) if entries is not None else None
        self._written: dict[str, TensorEntry] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Writes a whole tensor."""
        self.add_rows(name, TensorEntry.of(tensor), [tensor])

    def add_rows(self, name: str, entry: TensorEntry, pieces: Iterable[torch.Tensor]) -> None:
        """Writes a tensor that comes in pieces of rows, so that only one piece is in memory."""
        if name in self._written:
            raise ValueError(f"{self._where}: {name} was added twice")
        if self._expected is not None and self._expected.get(name) != entry:
            raise ValueError(f"{self._where}: {name} is {entry}, but was announced as {self._expected.get(name)}")
        self._place(name, entry)
        self._written[name] = entry
        written = 0
        for piece in pieces:
            if piece.dtype != entry.dtype:
                raise ValueError(f"{self._where}: rows of {name} are {piece.dtype}, but it is {entry.dtype}")
            written += self._write(piece)
        if written != entry.size_bytes:
            raise ValueError(f"{self._where}: {name} has {written} bytes, but {entry} needs {entry.size_bytes}")

    def _write(self, tensor: torch.Tensor) -> int:
        if tensor.numel() == 0:
            return 0
        # numpy has no bf16 and fp8: view the memory as bytes.
        flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        data: Any = memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
        for start in range(0, len(data), _PIECE_BYTES):
            self._file.write(data[start : start + _PIECE_BYTES])
        return len(data)

    def _place(self, name: str, entry: TensorEntry) -> None:
        """Moves to where the tensor begins."""

    def _finish(self) -> None:
        """Writes what comes after the last tensor."""

    def close(self) -> None:
        """Completes the file, and closes it if it was opened here."""
        try:
            if missing := [name for name in self._expected or () if name not in self._written]:
                raise ValueError(f"{self._where}: {len(missing)} announced tensors were not added: {missing[:5]}")
            self._finish()
            self._file.flush()
        finally:
            if self._owned:
                self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is None:
            self.close()
        elif self._owned:
            with contextlib.suppress(OSError):
                self._file.close()  # it stays unreadable: it has no header, or no end


class SafetensorsStream(TensorStream):
    """One safetensors file.

    With `entries` the header is written first, and tensors come in that order: the file may be a stream that cannot
    seek. Without, `reserve_bytes` are left for the header, which is written on `close` (padded with spaces, as the
    format allows; if they are too few, the tensors are moved once).
    """

    def __init__(
        self,
        file: Path | IO[bytes],
        *,
        entries: Mapping[str, TensorEntry] | None = None,
        metadata: Mapping[str, str] | None = None,
        reserve_bytes: int = 1 << 16,
    ) -> None:
        super().__init__(file, entries=entries, mode="wb" if entries is not None else "w+b")
        self._metadata = {"format": "pt", **(metadata or {})}
        self._order: Iterator[str] = iter(self._expected or ())
        if self._expected is not None:
            self._file.write(self._header(self._expected))
        else:
            self._reserved = 8 + reserve_bytes + -reserve_bytes % 8
            self._file.write(b"\0" * self._reserved)

    def _place(self, name: str, entry: TensorEntry) -> None:
        if entry.dtype not in _NAMES:
            raise CheckpointError(
                f"{self._where}: {name} is {entry.dtype}, which safetensors cannot hold. Convert it to one of: "
                f"{', '.join(str(dtype).removeprefix('torch.') for dtype in _NAMES)}."
            )
        if self._expected is not None and (due := next(self._order)) != name:
            raise ValueError(f"{self._where}: {name} was added where {due} was announced")

    def _header(self, entries: Mapping[str, TensorEntry], *, length: int = 0) -> bytes:
        """The size and the JSON, padded to `length` and to the 8 bytes that keep the tensors aligned."""
        body: dict[str, Any] = {"__metadata__": self._metadata}
        end = 0
        for name, entry in entries.items():
            start, end = end, end + entry.size_bytes
            body[name] = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [start, end]}
        text = json.dumps(body, separators=(",", ":")).encode()
        text += b" " * max(-len(text) % 8, length - 8 - len(text))
        return struct.pack("<Q", len(text)) + text

    def _finish(self) -> None:
        if self._expected is not None:
            return
        header = self._header(self._written, length=self._reserved)
        if len(header) > self._reserved:
            self._move(len(header) - self._reserved)
        self._file.seek(0)
        self._file.write(header)
        self._file.seek(0, 2)

    def _move(self, distance: int) -> None:
        """Moves the tensors towards the end, the last piece first."""
        end = self._file.seek(0, 2)
        while end > self._reserved:
            start = max(end - _PIECE_BYTES, self._reserved)
            self._file.seek(start)
            piece = self._file.read(end - start)
            self._file.seek(start + distance)
            self._file.write(piece)
            end = start
