"""An export needs little more memory than the largest file that it writes, however large the model is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from fullshard.checkpoint import integrity
from fullshard.checkpoint.dcp_files import Writer
from fullshard.config.part import plain
from fullshard.families.language.models.hf import Hf
from fullshard.hf.adapters.settings import Lora
from tests.unit.export import peak_memory

SHARD_BYTES = 40_000_000
AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}
"""glibc gives freed memory back at once, so that a peak holds only what the export holds."""
SHAPE: dict[str, Any] = {
    "vocab_size": 36_000,  # embedding and head have 74 MB each
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a model of 200 MB, most of it in two tensors, and one of adapters on a model as large."""
    path = tmp_path_factory.mktemp("memory")
    whole = Hf(architecture="llama", overrides=SHAPE)
    module = whole.build(processor=None)
    checkpoint(path / "whole", whole, module)
    whole.export(module, tensors(module), path / "model", processor=None)
    adapters = Hf(path=str(path / "model"), lora=Lora(r=8))
    checkpoint(path / "adapters", adapters, adapters.build(processor=None))
    return path


def tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What is trained, with values that cost little: how many there are is what matters."""
    return ((name, torch.ones(p.shape)) for name, p in module.named_parameters() if p.requires_grad)


def checkpoint(path: Path, family: Hf, module: nn.Module) -> None:
    state = {f"model/{name}": tensor for name, tensor in tensors(module)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(state, storage_writer=Writer(path, threads=1), no_dist=True)
    (path / "state.json").write_text(json.dumps({"recipe": {"model": plain(family)}}))
    described = integrity.describe(path, {file.name: integrity.checksum(file) for file in path.iterdir()})
    (path / "manifest.json").write_text(json.dumps({"format": "sharded", "files": described, "tensors": {}}))


def peaks(words: list[str]) -> list[int]:
    """The peak of each export above what the process held before, in a process of its own."""
    command = [sys.executable, "-m", peak_memory.__name__, *words]
    environ = {**os.environ, **AT_ONCE}
    root = Path(__file__).parents[3]
    said = subprocess.run(command, check=False, capture_output=True, text=True, cwd=root, env=environ)
    assert said.returncode == 0, said.stderr
    return [int(word) for word in said.stdout.split()]


def test_peak_memory_stays_near_one_file(folder: Path) -> None:
    """In bf16 the embedding has its own file, half as large as the tensor that it is read from, in parts."""
    words = []
    for name, form, dtype in (("whole", "hf", "bf16"), ("adapters", "merged", "original")):
        words += [str(folder / name), str(folder / form), form, str(SHARD_BYTES), dtype]
    for form, above in zip(("hf", "merged"), peaks(words), strict=True):
        sizes = [path.stat().st_size for path in (folder / form).glob("*.safetensors")]
        assert sum(sizes) > 2.5 * max(sizes)
        assert max(sizes) < 1.01 * (SHARD_BYTES if form == "hf" else 74_000_000)
        assert above < 1.25 * max(sizes), (form, above / max(sizes))
