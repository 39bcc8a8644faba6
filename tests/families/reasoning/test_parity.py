"""The reasoning objective gives the losses and gradient norms of a plain PyTorch loop, on any number of ranks and with
any split into micro-batches; each of its two terms is divided by its own count."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, normalize
from transformers import AutoModelForCausalLM

from tests.ranks import RankPool
from tests.small import curve, model_folder, recipe, train

STEPS, GLOBAL, LR, WEIGHT = 3, 8, 1e-3, 0.5
WORDS = ["red", "green", "blue", "seven", "eight", "nine", "because", "so", "then", "odd", "even", "prime"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    path = tmp_path_factory.mktemp("reasoning")
    model_folder(path / "model", vocab_size=len(tokenizer), max_position_embeddings=256)
    tokenizer.save_pretrained(path / "model")
    draw = random.Random(0)
    texts = [[" ".join(draw.choices(WORDS, k=draw.randint(2, 9))) for _ in range(3)] for _ in range(GLOBAL * STEPS)]
    texts[1][2] = texts[0][2]  # an equal answer is not a negative
    records = [dict(zip(("question", "reasoning", "answer"), each, strict=True)) for each in texts]
    (path / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def settings(folder: Path, name: str, **batch: int) -> dict[str, Any]:
    return recipe(
        folder,
        name=name,
        objective={"kind": "reasoning", "contrast": WEIGHT},
        data={"sequence_length": 256},
        batch=batch,
        duration={"steps": STEPS},
        optimizer={"lr": LR},
        schedule={"kind": "constant"},
        checkpoint={"at_end": False, "every_epochs": None, "best": None},
    )


def plain_loop(folder: Path, tokenizer: Any) -> list[tuple[float, float, float, float]]:
    """Loss, both terms and gradient norm of each step, every text in a forward pass of its own."""
    records = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    found = []
    for step in range(STEPS):
        rows = records[step * GLOBAL : (step + 1) * GLOBAL]
        told, count = torch.zeros(()), 0
        for row in rows:
            asked = f"User: {row['question']}\nAssistant:"
            said = f" {row['reasoning']}\n\n{row['answer']}{tokenizer.eos_token}"
            whole = tokenizer(f"{asked}{said}\n", add_special_tokens=False, return_offsets_mapping=True)
            ids = torch.tensor(whole["input_ids"])
            within = [len(asked) <= b < len(asked + said) for b, _ in whole["offset_mapping"]]
            labels = torch.where(torch.tensor(within), ids, -100)[1:]
            logits = model(input_ids=ids[None]).logits[0, :-1]
            told = told + cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
            count += int((labels != -100).sum())
        vectors = []
        for column in ("reasoning", "answer"):
            texts = [tokenizer(row[column], add_special_tokens=False, return_tensors="pt")["input_ids"] for row in rows]
            vectors.append(torch.cat([model.model(input_ids=ids).last_hidden_state.mean(1) for ids in texts]))
        scores = normalize(vectors[0], dim=-1) @ normalize(vectors[1], dim=-1).T / 0.07
        answers = [row["answer"] for row in rows]
        equal = torch.tensor([[i != j and a == b for j, b in enumerate(answers)] for i, a in enumerate(answers)])
        contrastive = cross_entropy(scores.masked_fill(equal, float("-inf")), torch.arange(GLOBAL))
        loss = told / count + WEIGHT * contrastive
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), (told / count).item(), contrastive.item(), norm.item()))
    return found


@pytest.fixture(scope="module")
def expected(folder: Path, tokenizer: Any) -> torch.Tensor:
    return torch.tensor(plain_loop(folder, tokenizer))


@pytest.mark.parametrize(("world", "per_device"), [(1, 8), (1, 2), (2, 4), (2, 1)])
def test_it_is_a_plain_loop_on_any_ranks_and_split(
    ranks: RankPool, folder: Path, expected: torch.Tensor, world: int, per_device: int
) -> None:
    run = settings(folder, f"{world}-{per_device}", per_device=per_device, **{"global": GLOBAL})
    names = ("loss", "cross_entropy", "contrastive", "grad_norm")
    found = torch.tensor(curve(ranks.run(train, run, world=world)[0], *names))
    torch.testing.assert_close(found[:, :3], expected[:, :3], rtol=1e-6, atol=0)
    torch.testing.assert_close(found[:, 3], expected[:, 3], rtol=2e-6, atol=0)
