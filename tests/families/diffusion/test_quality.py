"""Samples of a short run are digits: a classifier that never saw them reads most of them as the class asked for.

The whole recipe, and the full marks, are in benchmarks/digits.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import fullshard
from benchmarks.digits import make, measure

SHORT = (
    "duration={steps: 300}",
    "data.train.samples=19200",
    "batch={per_device: 64}",
    "model.overrides={sample_size: 8, in_channels: 1, out_channels: 1, patch_size: 2, num_layers: 2, "
    "num_attention_heads: 4, attention_head_dim: 16}",
    "ema=0.95",
    "optimizer.lr=8e-3",
    "schedule={kind: cosine, warmup: 20, floor: 0.05}",
    "topology.devices=1",
    "evaluate.parts=[]",
    "data.validation=null",
    "data.holdout=0",
    "checkpoint={best: null}",
)


@pytest.mark.slow
def test_a_short_run_draws_digits(tmp_path: Path) -> None:
    fullshard.train(fullshard.read("diffusion", *SHORT, f"output={tmp_path}", f"data.cache={tmp_path}/cache"))
    found = measure(*make(tmp_path / "diffusion", each=10, guidance=2, steps=12))
    assert found.classifier >= 0.97
    assert found.recognised >= 0.8
    assert found.diversity >= 0.5
    assert found.nearest >= 1, "nearer to the digits that were trained on than other real digits are"
