"""Paths that compile: blocks on a CPU, and 8-bit AdamW; each on two real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.ranks import RankPool
from tests.small import curve, model_folder, recipe, token_file, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compiled")
    model_folder(path / "model", num_hidden_layers=2)
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


def test_8bit_adamw_trains_saves_and_resumes(ranks: RankPool, folder: Path) -> None:
    """Its states are quantised in blocks, so it stays near AdamW, not on it; resume is exact all the same."""
    changes = {"optimizer": {"kind": "adamw_8bit", "lr": 1e-2}}
    exact = ranks.run(train, recipe(folder, name="exact"), world=2)[0]
    straight = ranks.run(train, recipe(folder, name="straight", **changes), world=2)[0]
    interrupted = recipe(folder, name="resumed", schedule={"kind": "constant"}, **changes)
    reference = ranks.run(train, recipe(folder, name="whole", schedule={"kind": "constant"}, **changes), world=2)[0]
    ranks.run(train, {**interrupted, "duration": {"steps": 3}}, world=2)
    resumed = ranks.run(train, interrupted, world=2)[0]
    assert curve(resumed, "loss", "grad_norm") == curve(reference, "loss", "grad_norm")
    ours, theirs = torch.tensor(curve(straight, "loss")), torch.tensor(curve(exact, "loss"))
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=0)
    assert ours[-1] < ours[0]
