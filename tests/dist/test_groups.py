"""Parameter groups of a run: what they do to weights is what torch.optim does with groups made by hand; freezing by a
group is model.freeze; a resumed run continues with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from tests.near import assert_near
from tests.ranks import RankPool
from tests.small import curve, model_folder, recipe, token_file, train

STEPS, GLOBAL, LR = 4, 8, 1e-2
GROUPS: list[dict[str, Any]] = [
    {"match": "model.embed_tokens.*", "freeze": True},
    {"match": "model.layers.0.*", "lr": 2e-3, "recompute": "full"},
    {"match": ["*.q_proj.*", "*.k_proj.*"], "weight_decay": 0.5},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("groups")
    model_folder(path / "model")
    token_file(path / "train.jsonl", records=32)
    return path


def settings_of(folder: Path, name: str, **sections: Any) -> dict[str, Any]:
    return recipe(folder, name=name, batch={"per_device": 4, "global": GLOBAL}, duration={"steps": STEPS}, **sections)


def weights_of(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(folder / "runs" / name / "model" / "model.safetensors")


def by_hand(folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The loss of each step and the weights after the last, without fullshard."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    model.model.embed_tokens.weight.requires_grad_(False)
    groups: dict[tuple[float, float], list[Any]] = {}
    for name, p in model.named_parameters():
        first = name.startswith("model.layers.0.")
        more = not first and ("q_proj" in name or "k_proj" in name)
        if p.requires_grad:
            decay = (0.5 if more else 0.1) if p.dim() >= 2 else 0.0
            groups.setdefault((2e-3 if first else LR, decay), []).append(p)
    rates = [lr for lr, _ in groups]
    optimizer = torch.optim.AdamW(
        [{"params": members, "lr": lr, "weight_decay": decay} for (lr, decay), members in groups.items()],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    rows = [json.loads(line)["input_ids"] for line in (folder / "train.jsonl").read_text().splitlines()]
    losses = []
    for step in range(STEPS):
        batch = rows[step * GLOBAL : (step + 1) * GLOBAL]
        longest = max(map(len, batch))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in batch])
        targets = torch.tensor([row[1:] + [-100] * (longest - len(row) + 1) for row in batch])
        loss = cross_entropy(model(input_ids=ids).logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        for group, lr in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = lr * (1 - step / STEPS)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def test_groups_are_those_of_torch_made_by_hand_and_survive_a_resume(ranks: RankPool, folder: Path) -> None:
    optimizer = {"lr": LR, "weight_decay": 0.1, "groups": GROUPS}
    checkpoint = {"every_steps": 2, "keep": None}
    settings = settings_of(folder, "groups", optimizer=optimizer, checkpoint=checkpoint)
    records = ranks.run(train, settings, world=2)[0]
    losses, weights = by_hand(folder)
    assert [loss for (loss,) in curve(records, "loss")] == pytest.approx(losses, rel=2e-6)
    for name, tensor in weights_of(folder, "groups").items():
        # Adam turns the rounding of tiny gradients into updates: 5e-5 was seen. Another rate moves weights by 1e-2.
        assert_near(tensor, weights[name], within=1e-3, what=name)
    said = (folder / "runs" / "groups" / "log.txt").read_text()
    assert "model.embed_tokens.*: 1 parameter, frozen" in said
    assert "model.layers.0.*: 11 parameters, lr 0.002, recompute full" in said
    again = settings | {"name": "groups-again"}
    resumed = ranks.run(train, again, resume=str(folder / "runs" / "groups" / "checkpoint-2"), world=2)[0]
    assert curve(resumed, "step", "loss", "lr") == curve(records, "step", "loss", "lr")[2:]
    straight = weights_of(folder, "groups")
    assert all(torch.equal(tensor, straight[name]) for name, tensor in weights_of(folder, "groups-again").items())


def test_freezing_by_a_group_equals_model_freeze(ranks: RankPool, folder: Path) -> None:
    group = [{"match": ["model.layers.1.*", "model.embed_tokens.*"], "freeze": True}]
    by_group = settings_of(folder, "by-group", optimizer={"groups": group})
    by_model = settings_of(folder, "by-model", model={"freeze": group[0]["match"]})
    found, expected = (ranks.run(train, settings, world=1)[0] for settings in (by_group, by_model))
    assert curve(found, "loss", "grad_norm") == curve(expected, "loss", "grad_norm")
    theirs = weights_of(folder, "by-model")
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in weights_of(folder, "by-group").items())
