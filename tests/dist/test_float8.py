"""`precision: float8` on real ranks, emulated on the CPU: whole runs, resumed runs, adapters, checkpoints, exports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fullshard.checkpoint import folder as files
from fullshard.checkpoint.reader import open_tensors
from tests.near import apart
from tests.ranks import RankPool
from tests.small import curve, model_folder, recipe, token_file, train

EIGHT, GATHERED = "float8-emulated", "float8-gather-emulated"
STEPS, MIDDLE = 6, 3
SAME = 1e-5
"""Relative to the loss, of runs that round the same numbers."""
NEAR_BF16 = 0.02
"""Relative to the loss: 4 bits of each factor in a model of width 32."""
LORA: dict[str, Any] = {"lora": {"r": 16, "targets": "all-linear"}}
Run = Callable[..., tuple[list[float], Path]]


@pytest.fixture(scope="module")
def run(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Trains once for each name: the losses, and the run folder. A micro-batch is one row, so that a step has the same
    micro-batches, and each the same scales, on any number of ranks."""
    folder, done = tmp_path_factory.mktemp("float8"), dict[str, tuple[list[float], Path]]()
    model_folder(folder / "model")
    token_file(folder / "train.jsonl", records=90)

    def trained(name: str, precision: str, *, world: int, resume: str = "auto", **changes: Any) -> Any:
        if name not in done:
            model = {"path": str(folder / "model"), **changes.pop("model", {})}
            shape = {"batch": {"per_device": 1, "global": 8}, "checkpoint": {"every_steps": MIDDLE, "best": None}}
            settings = recipe(folder, name=name, precision=precision, model=model, **shape, **changes)
            records = ranks.run(train, settings, resume, world=world)[0]
            done[name] = [loss for (loss,) in curve(records, "loss")], folder / "runs" / name
        return done[name]

    return trained


def furthest(found: list[float], expected: list[float]) -> float:
    assert len(found) == len(expected) == STEPS
    return max(abs(a / b - 1) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("precision", [EIGHT, GATHERED])
def test_one_rank_two_ranks_and_a_resumed_run_train_the_same(run: Run, precision: str) -> None:
    one, two = (run(f"{precision}-{world}", precision, world=world) for world in (1, 2))
    assert furthest(two[0], one[0]) < SAME
    middle = str(two[1] / files.name_of(MIDDLE))
    _, resumed = run(f"{precision}-resumed", precision, world=2, resume=middle)
    ours, theirs = (open_tensors(each / files.name_of(STEPS)) for each in (resumed, two[1]))
    assert ours.names() == theirs.names()
    for name in theirs.names():
        assert torch.equal(ours.whole(name), theirs.whole(name)), name


@pytest.mark.parametrize("precision", [EIGHT, GATHERED])
def test_losses_are_near_those_of_bf16(run: Run, precision: str) -> None:
    half, eight = run("bf16", "bf16", world=1)[0], run(f"{precision}-1", precision, world=1)[0]
    assert 1e-5 < furthest(eight, half) < NEAR_BF16


@pytest.mark.parametrize("precision", [EIGHT, GATHERED])
def test_checkpoints_and_exports_are_those_of_fp32_weights(run: Run, precision: str) -> None:
    folder, plain = (run(name, word, world=1)[1] for name, word in ((f"{precision}-1", precision), ("bf16", "bf16")))
    found, expected = (open_tensors(each / files.name_of(STEPS)) for each in (folder, plain))
    assert found.names() == expected.names()
    exported = load_file(folder / "model" / "model.safetensors")
    assert exported.keys() == load_file(plain / "model" / "model.safetensors").keys()
    for name, tensor in exported.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, found.whole(f"model/{name}"))
        assert tensor.unique().numel() > min(256, tensor.numel() // 4), "stored in 8 bits"
    for shard in (folder / files.name_of(STEPS)).iterdir():
        assert b"torchao" not in shard.read_bytes(), shard.name


def test_the_header_names_what_is_rounded_and_what_is_left_out(run: Run) -> None:
    text = " ".join((run(f"{EIGHT}-1", EIGHT, world=1)[1] / "log.txt").read_text().split())
    assert "3 x q_proj, 3 x k_proj" in text
    assert "lm_head (not in a block)" in text


def test_adapters_train_beside_a_base_in_float8(run: Run) -> None:
    losses = {
        (precision, world): run(f"lora-{precision}-{world}", precision, world=world, model=LORA)[0]
        for precision, world in (("bf16", 1), (EIGHT, 1), (EIGHT, 2))
    }
    assert furthest(losses[EIGHT, 2], losses[EIGHT, 1]) < SAME
    assert 1e-5 < furthest(losses[EIGHT, 1], losses["bf16", 1]) < NEAR_BF16
    folder = run(f"lora-{EIGHT}-1", EIGHT, world=1)[1]
    text = " ".join((folder / "log.txt").read_text().split())
    assert "lora_A (adapter), 21 x lora_B (adapter)" in text
    moved = load_file(folder / "model" / "adapter_model.safetensors")
    assert all(tensor.dtype == torch.float32 for tensor in moved.values())
    assert any(apart(tensor, torch.zeros_like(tensor)) for name, tensor in moved.items() if "lora_B" in name)


@pytest.mark.slow  # compiling takes a minute
def test_compiled_blocks_round_as_well(run: Run) -> None:
    """A compiled block keeps some numbers in fp32 that are rounded to bf16 between the kernels of a plain one."""
    compiled = run("compiled", EIGHT, world=1, sharding={"compile": True})[0]
    assert furthest(compiled, run(f"{EIGHT}-1", EIGHT, world=1)[0]) < NEAR_BF16


def test_a_run_recomputes_the_same_numbers(run: Run) -> None:
    again = run("recomputed", EIGHT, world=1, sharding={"activation_checkpointing": "full"})[0]
    assert again == run(f"{EIGHT}-1", EIGHT, world=1)[0]
