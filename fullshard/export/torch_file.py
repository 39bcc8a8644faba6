"""Writes the flat state that `torch.load` reads, one tensor at a time. Must not know what the tensors are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from fullshard.checkpoint.tensor_files import TensorEntry, TensorStream


class TorchStream(TensorStream):
    """A torch file with one flat mapping from name to tensor, as `torch.save` writes it; tensors come in any order.

    `torch.load` reads it with `weights_only=True` and with `mmap=True`. Checksums inside the archive are those of
    empty tensors; torch ignores them.
    """

    def __init__(self, path: Path, *, entries: Mapping[str, TensorEntry]) -> None:
        self._offsets = _write_skeleton(path, entries)
        super().__init__(path, entries=entries, mode="r+b")

    def _place(self, name: str, entry: TensorEntry) -> None:
        self._file.seek(self._offsets[name])


def _write_skeleton(path: Path, entries: Mapping[str, TensorEntry]) -> dict[str, int]:
    """Writes the file without its tensors; returns the offset of each."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = {name: torch.empty(entry.shape, dtype=entry.dtype) for name, entry in entries.items()}
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(fake, path)
    with FakeTensorMode():
        loaded = torch.load(path, weights_only=True)
    return {name: tensor.untyped_storage()._checkpoint_offset for name, tensor in loaded.items()}
