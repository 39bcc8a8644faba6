"""The promise of every run: the same data gives the same losses and gradient norms on any number of ranks, with any
strategy and any split into micro-batches; and they are those of a plain PyTorch loop in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from tests.ranks import RankPool
from tests.slow import one_in
from tests.small import curve, model_folder, recipe, token_file, train

RECORDS, STEPS, GLOBAL, LR = 90, 6, 16, 1e-2  # 90 records: the last window of the epoch holds 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("laws")
    model_folder(path / "model")
    token_file(path / "train.jsonl", records=RECORDS)
    return path


@pytest.fixture(scope="module")
def reference(folder: Path) -> list[tuple[float, float]]:
    return plain_loop(folder, token_rows(folder))


def token_rows(folder: Path) -> list[list[int]]:
    import json

    return [json.loads(line)["input_ids"] for line in (folder / "train.jsonl").read_text().splitlines()]


def plain_loop(folder: Path, rows: list[list[int]]) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step, without fullshard: padded batches, mean over the tokens of the step."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    results = []
    for step in range(STEPS):
        batch = rows[step * GLOBAL : (step + 1) * GLOBAL]
        longest = max(map(len, batch))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in batch])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in batch])
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
        targets = ids[:, 1:].masked_fill(mask[:, 1:] == 0, -100)
        loss = cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=-100)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = LR * (1 - step / STEPS)
        optimizer.step()
        optimizer.zero_grad()
        results.append((loss.item(), norm.item()))
    return results


CASES: list[tuple[int, int, str, int]] = [  # world, nodes, strategy, per_device
    (1, 1, "full", 16),
    (1, 1, "full", 1),
    (1, 1, "none", 4),
    (2, 1, "full", 8),
    (2, 1, "full", 1),
    (2, 1, "grad_op", 2),
    (2, 1, "none", 4),
    (2, 1, "hybrid", 4),
    (2, 1, "auto", 4),
    (4, 1, "full", 4),
    (4, 1, "full", 1),
    (4, 1, "grad_op", 2),
    (4, 1, "none", 2),
    (4, 2, "hybrid", 4),
    (4, 2, "hybrid", 1),
]


@pytest.mark.parametrize(("world", "nodes", "strategy", "per_device"), one_in(4, CASES))
def test_same_losses_and_norms_everywhere(
    ranks: RankPool,
    folder: Path,
    reference: list[tuple[float, float]],
    world: int,
    nodes: int,
    strategy: str,
    per_device: int,
) -> None:
    settings = recipe(
        folder,
        name=f"{world}-{nodes}-{strategy}-{per_device}",
        batch={"per_device": per_device, "global": GLOBAL},
        sharding={"strategy": strategy},
    )
    records = ranks.run(train, settings, world=world, nodes=nodes)[0]
    assert_close(curve(records, "loss", "grad_norm"), reference)


@pytest.mark.parametrize(
    "sharding",
    [
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective"},
        {"cpu_offload": True},
        {"forward_prefetch": True},
        {"wrap": {"whole": True}},
        {"wrap": {"min_params": 2000}},
        {"wrap": ["Qwen3MLP", "Qwen3Attention"]},
    ],
    ids=str,
)
def test_sharding_does_not_change_the_losses(
    ranks: RankPool, folder: Path, reference: list[tuple[float, float]], sharding: dict[str, Any]
) -> None:
    name = "-".join(sharding).replace("_", "") + str(abs(hash(str(sharding))) % 1000)
    settings = recipe(folder, name=name, sharding=sharding)
    records = ranks.run(train, settings, world=2)[0]
    assert_close(curve(records, "loss", "grad_norm"), reference)


def assert_close(found: list[tuple[float, ...]], expected: list[tuple[float, float]]) -> None:
    """Losses and gradient norms, within 1e-6 relative."""
    torch.testing.assert_close(torch.tensor(found).double(), torch.tensor(expected).double(), rtol=1e-6, atol=0)
