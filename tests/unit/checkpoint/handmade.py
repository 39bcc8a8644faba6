"""Small checkpoints made without ranks, in either format, for tests that damage them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from fullshard.checkpoint import folder as files
from fullshard.checkpoint import integrity
from fullshard.checkpoint.dcp_files import Writer
from fullshard.checkpoint.tensors import tree

FORMATS = ("sharded", "full")


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(6, 4, generator=generator)
    return {
        "model/head.weight": weight,
        "model/head.bias": weight[0].bfloat16(),
        "optimizer/head.weight/exp_avg": weight * 0.1,
        "optimizer/head.weight/step": torch.tensor(4.0),
    }


def make(run: Path, step: int = 4, *, format: str = "sharded", point: str = "last") -> Path:
    """A published checkpoint of `tensors()`."""
    hidden, content = files.begin(run, step), tensors()
    if format == "full":
        for section in ("model", "optimizer"):
            part = {n.partition("/")[2]: t for n, t in content.items() if n.startswith(section)}
            save_file(part, hidden / f"{section}.safetensors")
    else:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save(dict(content), storage_writer=Writer(hidden, threads=1), no_dist=True)
    files.write_json(hidden / files.STATE, {"progress": {"step": step}})
    manifest = {"step": step, "epoch": 0, "format": format, "files": described(hidden), "tensors": tree(content)}
    path = files.publish(run, step, manifest)
    files.point(run, point, path)
    return path


def described(checkpoint: Path) -> dict[str, Any]:
    """The content of every file."""
    paths = [path for path in sorted(checkpoint.rglob("*")) if path.is_file() and path.name != files.MANIFEST]
    return integrity.describe(checkpoint, {str(p.relative_to(checkpoint)): integrity.checksum(p) for p in paths})


def seal(checkpoint: Path, **changes: Any) -> Path:
    """Rewrites the manifest for the files as they are now, so that only their content can give them away."""
    manifest = json.loads((checkpoint / files.MANIFEST).read_text())
    files.write_json(checkpoint / files.MANIFEST, {**manifest, "files": described(checkpoint), **changes})
    return checkpoint
