"""Paths that compile: blocks on a CPU, and 8-bit AdamW; each on two real ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard.checkpoint import folder as files
from tests.ranks import RankPool
from tests.small import curve, model_folder, recipe, token_file, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compiled")
    model_folder(path / "model", num_hidden_layers=2)
    # torchao quantises the state of slices with at least 4,096 numbers.
    model_folder(path / "wide", num_hidden_layers=1, hidden_size=128, intermediate_size=256)
    token_file(path / "train.jsonl", records=64)
    return path


def test_compiled_blocks_give_the_same_losses(ranks: RankPool, folder: Path) -> None:
    packed = {"pack": True, "sequence_length": 32}
    plain = ranks.run(train, recipe(folder, name="plain", data=packed, duration={"steps": 3}), world=2)[0]
    settings = recipe(folder, name="compiled", data=packed, duration={"steps": 3}, sharding={"compile": True})
    compiled = ranks.run(train, settings, world=2)[0]
    # Fused kernels add up in another order.
    torch.testing.assert_close(
        torch.tensor(curve(compiled, "loss", "grad_norm")),
        torch.tensor(curve(plain, "loss", "grad_norm")),
        rtol=1e-5,
        atol=0,
    )


@pytest.mark.slow
def test_8bit_adamw_trains_saves_and_resumes(ranks: RankPool, folder: Path) -> None:
    """Its states are quantised in blocks, so it stays near AdamW, not on it; resume is exact all the same. On other
    ranks the blocks differ: there it stays close, like two quantisations of one state."""
    same: dict[str, Any] = {"model": {"path": str(folder / "wide")}, "checkpoint": {"every_steps": 3, "keep": None}}
    exact = ranks.run(train, recipe(folder, name="exact", optimizer={"lr": 2e-3}, **same), world=2)[0]
    same |= {"optimizer": {"kind": "adamw_8bit", "lr": 2e-3}}
    straight = ranks.run(train, recipe(folder, name="straight", **same), world=2)[0]
    checkpoint = folder / "runs" / "straight" / "checkpoint-3"
    resumed = ranks.run(train, recipe(folder, name="resumed", **same), resume=str(checkpoint), world=2)[0]
    assert curve(resumed, "loss", "grad_norm") == curve(straight, "loss", "grad_norm")[3:]
    moved = ranks.run(train, recipe(folder, name="moved", **same), resume=str(checkpoint), world=1)[0]
    losses = {name: torch.tensor(curve(r, "loss")) for name, r in (("moved", moved), ("straight", straight))}
    torch.testing.assert_close(losses["moved"], losses["straight"][3:], rtol=1e-4, atol=0)
    torch.testing.assert_close(losses["straight"], torch.tensor(curve(exact, "loss")), rtol=2e-2, atol=0)
    assert losses["straight"][-1] < losses["straight"][0]
    weights = 4 * sum(math.prod(t["shape"]) for n, t in tensors(checkpoint).items() if n.startswith("model/"))
    written = sum(path.stat().st_size for path in checkpoint.glob("*.distcp"))
    assert written < 2.5 * weights, "two moments in a byte each, not in four"


def tensors(checkpoint: Path) -> dict[str, Any]:
    found: dict[str, Any] = files.read_manifest(checkpoint)["tensors"]
    return found
