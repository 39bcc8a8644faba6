"""Checks a folder of stored weights before training starts from it: complete files, finite values.

Every header is compared with the size of its file, and a few rows of the tensors are read. Must not know
modules, recipes or ranks.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from fullshard.check.findings import Finding, error, ok, warning
from fullshard.hf.weights.safetensors_folder import Stored, files_of, open_folder

MOST_TENSORS = 512
"""At most this many tensors are sampled; reading every value would take minutes."""
_LARGEST_HEADER = 100_000_000
"""The limit of the safetensors format."""
_ROWS = 4
_WHOLE = 50_000_000
"""A matrix that looks like zeros is read to its end, unless it has more entries than this."""


def look(folder: Path) -> Iterator[Finding]:
    """Files, then values if every file is complete. Raises CheckpointError for a folder without weights."""
    broken = list(look_at_files(files_of(folder)))
    yield from broken
    if not any(finding.level == "error" for finding in broken):
        yield from look_at_values(open_folder(folder))


def look_at_files(files: Sequence[Path]) -> Iterator[Finding]:
    """Whether each file has a header, and exactly the bytes that the header describes."""
    size, broken = 0, 0
    for file in files:
        problem = _problem(file)
        if problem:
            broken += 1
            remedy = f"Run git lfs pull in {file.parent}." if _is_pointer(file) else "Download or save it again."
            yield error("weight files", f"{file}: {problem}.", remedy)
        size += file.stat().st_size
    if not broken:
        noun = "file is" if len(files) == 1 else "files are"
        yield ok("weight files", f"{len(files)} {noun} complete, {size / 1e9:,.2f} GB")


def _problem(file: Path) -> str | None:
    """What is wrong with a file; None if it is complete."""
    size = file.stat().st_size
    if size < 8:
        return f"{size} bytes, too few for a safetensors file"
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        if _is_pointer(file):
            return "it is a Git LFS pointer; the weights themselves were never downloaded"
        if length > min(size - 8, _LARGEST_HEADER):
            return f"its header claims {length:,} bytes, but the file has {size:,}: truncated, or not safetensors"
        raw = opened.read(length)
    try:
        header: dict[str, Any] = json.loads(raw)
        tensors = [entry for name, entry in header.items() if name != "__metadata__"]
        data = max((entry["data_offsets"][1] for entry in tensors), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return f"its header of {length:,} bytes is not a list of tensors"
    expected = 8 + length + data
    if size < expected:
        return f"truncated: {size:,} bytes, but its header describes {expected:,} ({expected - size:,} are missing)"
    if size > expected:
        return f"{size:,} bytes, but its header describes {expected:,} ({size - expected:,} too many)"
    return None


def _is_pointer(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(40).startswith(b"version https://git-lfs")


def look_at_values(stored: Stored) -> Iterator[Finding]:
    """A few rows of the tensors: NaN and infinity are errors, a matrix of zeros is suspicious."""
    names = [name for name, entry in stored.items() if entry.dtype.is_floating_point and 0 not in entry.shape]
    step = max(1, -(-len(names) // MOST_TENSORS))
    chosen = names[::step]
    bad = [name for name in chosen if not bool(torch.isfinite(_sample(stored, name)).all())]
    zero = [name for name in chosen if len(stored[name].shape) > 1 and name not in bad and _is_zero(stored, name)]
    if bad:
        text = f"{stored[bad[0]].file}: {_some(bad)} {_hold(bad)} NaN or Inf, and training cannot repair that."
        yield error("stored values", text, "Use an earlier version of the weights, or download them again.")
    if zero:
        text = f"{stored[zero[0]].file}: {_some(zero)} {_hold(zero)} nothing but zeros, as after a failed download."
        yield warning("stored values", text, "Download the weights again, unless the model is meant to start that way.")
    if not bad and not zero:
        yield ok("stored values", f"finite in a sample of {len(chosen)} of {len(names)} tensors")


def _sample(stored: Stored, name: str) -> torch.Tensor:
    """The first row, the last and two in between."""
    shape = stored[name].shape
    if len(shape) < 2:
        return stored.read(name)
    rows = sorted({round(share * (shape[0] - 1) / (_ROWS - 1)) for share in range(_ROWS)})
    return torch.cat([stored.read(name, row, row + 1) for row in rows])


def _is_zero(stored: Stored, name: str) -> bool:
    if _sample(stored, name).any():
        return False
    whole = torch.Size(stored[name].shape).numel() <= _WHOLE
    return not (whole and bool(stored.read(name).any()))


def _hold(names: Sequence[str]) -> str:
    return "holds" if len(names) == 1 else "hold"


def _some(names: Sequence[str], *, limit: int = 4) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
