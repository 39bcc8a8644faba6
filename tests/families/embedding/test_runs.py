"""Whole embedding runs: the same losses on any ranks, splits, layouts and caches, and those of a plain PyTorch loop; an
interrupted run goes on bit by bit; half precision stays near; adapters alone are trained."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from fullshard.checkpoint import folder as files
from fullshard.checkpoint.reader import open_tensors
from tests.families.embedding import texts
from tests.ranks import RankPool
from tests.slow import one_in
from tests.small import curve, train

STEPS, GLOBAL, LR = 6, 8, 1e-3
LEARNED: dict[str, Any] = {  # no lower temperature: what fp32 rounds is divided by it
    "kind": "infonce",
    "temperature": 0.2,
    "learn_temperature": True,
}
SCALAR = "learned_by_objective.moved"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    texts.encoder(path / "model")
    texts.pairs(path / "train.jsonl")
    return path


def run(ranks: RankPool, folder: Path, name: str, *, world: int = 2, **sections: Any) -> list[dict[str, Any]]:
    objective = {"loss": LEARNED} | sections.pop("objective", {})
    settings = texts.recipe(folder, name=name, **{"optimizer": {"lr": LR}} | sections, objective=objective)
    return ranks.run(train, settings, world=world)[0]  # type: ignore[no-any-return]


def plain_loop(folder: Path) -> torch.Tensor:
    """Loss and gradient norm of each step, without fullshard: one text at a time, the mean over its tokens, and InfoNCE
    over all positives and negatives of the step but those equal to the query's own positive."""
    from transformers import BertModel

    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    model, tokenizer = BertModel.from_pretrained(folder / "model", add_pooling_layer=False), texts.tokenizer()
    log_scale = nn.Parameter(torch.tensor(math.log(1 / LEARNED["temperature"])))
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in (*model.parameters(), log_scale) if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)

    def embed(text: str) -> torch.Tensor:
        hidden = model(input_ids=torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state[0]
        return normalize(hidden.mean(0), dim=0)

    results = []
    for step in range(STEPS):
        batch = rows[step * GLOBAL : (step + 1) * GLOBAL]
        documents = [row["positive"] for row in batch] + [n for row in batch for n in row.get("negatives", [])]
        vectors = torch.stack([embed(text) for text in documents])
        terms = []
        for index, row in enumerate(batch):
            kept = [at for at, text in enumerate(documents) if at == index or text != row["positive"]]
            scores = log_scale.exp() * (vectors[kept] @ embed(row["query"]))
            terms.append(cross_entropy(scores[None], torch.tensor([kept.index(index)])))
        loss = torch.stack(terms).mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_([*decay, *rest], 1.0)
        for group in optimizer.param_groups:
            group["lr"] = LR * (1 - step / STEPS)
        optimizer.step()
        optimizer.zero_grad()
        results.append((loss.item(), norm.item()))
    return torch.tensor(results).double()


@pytest.fixture(scope="module")
def reference(folder: Path) -> torch.Tensor:
    return plain_loop(folder)


CACHE_3: dict[str, Any] = {"cache": {"chunk": 3}}
PADDED: dict[str, Any] = {"pack": False}
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {  # world, per_device, the rest
    "one rank, one micro-batch": (1, 8, {}),
    "one rank, four micro-batches": (1, 2, {}),
    "one rank, padded": (1, 4, {"data": PADDED}),
    "one rank, chunks by tokens": (1, 8, {"objective": {"cache": {"tokens": 30}}}),
    "two ranks, two micro-batches": (2, 2, {}),
    "two ranks, grad_op, cache, padded": (
        2,
        4,
        {"sharding": {"strategy": "grad_op"}, "objective": CACHE_3, "data": PADDED},
    ),
    "two ranks, replicated": (2, 4, {"sharding": {"strategy": "none"}}),
    "two ranks, recomputed, cache": (2, 2, {"sharding": {"activation_checkpointing": "full"}, "objective": CACHE_3}),
    "four ranks": (4, 2, {}),
    "four ranks, cache": (4, 2, {"objective": {"cache": 4}}),
}


@pytest.mark.parametrize("case", one_in(3, CASES))
def test_same_losses_everywhere(ranks: RankPool, folder: Path, reference: torch.Tensor, case: str) -> None:
    world, per_device, sections = CASES[case]
    batch = {"per_device": per_device, "global": GLOBAL}
    records = run(ranks, folder, case.replace(" ", "-").replace(",", ""), world=world, batch=batch, **sections)
    found = torch.tensor(curve(records, "loss", "grad_norm")).double()
    torch.testing.assert_close(found[:, 0], reference[:, 0], rtol=1e-6, atol=0)
    torch.testing.assert_close(found[:, 1], reference[:, 1], rtol=1e-5, atol=0)
    shares = [share for (share,) in curve(records, "padding")]
    # Chunks hold texts of like lengths, which leaves little to pad either way.
    padded = sections.get("data") == PADDED and "objective" not in sections
    assert min(shares) > 0.35 if padded else sum(shares) / STEPS < 0.2


@pytest.mark.parametrize("kind", ["MPNetModel", "BloomModel"])
def test_rows_are_shared_only_where_that_is_proven(ranks: RankPool, folder: Path, kind: str) -> None:
    """MPNet's attention knows no positions of its own, Bloom takes no mask of more axes; and nothing fits beside the
    first two texts."""
    path = folder / kind
    texts.encoder(path / "model", kind, **({"n_layer": 1, "n_head": 2} if kind == "BloomModel" else {}))
    rows = texts.pairs(path / "train.jsonl")
    rows[0] = {"query": "ban bar bas", "positive": "bat bak bap"}
    (path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    short: dict[str, Any] = {"batch": {"per_device": 1, "global": 8}, "duration": {"steps": 2}}
    found = [run(ranks, path, f"pack-{pack}", world=1, data={"pack": pack}, **short) for pack in (True, False)]
    assert curve(found[0], "loss", "padding") == curve(found[1], "loss", "padding")


def test_a_resumed_run_equals_the_straight_one_bit_by_bit(ranks: RankPool, folder: Path) -> None:
    sections: dict[str, Any] = {
        "model": {"overrides": {"hidden_dropout_prob": 0.2}},
        "objective": {"loss": LEARNED, "matryoshka": [16, 4], **CACHE_3},
        "data": {"shuffle": True},
        "optimizer": {"lr": 1e-2},
        "checkpoint": {"every_steps": 2, "keep": None},
    }
    straight, resumed = (texts.recipe(folder, name=end, **sections) for end in ("straight", "resumed"))
    expected = curve(ranks.run(train, straight, world=2)[0], "step", "loss", "grad_norm", "lr")
    start = folder / "runs" / "straight" / "checkpoint-2"
    found = curve(ranks.run(train, resumed, resume=str(start), world=2)[0], "step", "loss", "grad_norm", "lr")
    assert found == expected[2:]
    ends = [open_tensors(folder / "runs" / end / files.name_of(STEPS)) for end in ("straight", "resumed")]
    assert ends[0].names() == ends[1].names()
    assert f"model/{SCALAR}" in ends[0].names()
    for name in ends[0].names():
        assert torch.equal(ends[0].whole(name), ends[1].whole(name)), name


@pytest.mark.parametrize(("precision", "far"), [("bf16", 0.03), ("fp16", 0.002)])
def test_half_precision_stays_close(
    ranks: RankPool, folder: Path, reference: torch.Tensor, precision: str, far: float
) -> None:
    records = run(
        ranks, folder, precision, world=2 if precision == "fp16" else 1, precision=precision, objective=CACHE_3
    )
    found = torch.tensor(curve(records, "loss")).double()[:, 0]
    distance = (found / reference[:, 0] - 1).abs().max()
    assert 1e-6 < distance < far
    if precision == "fp16":
        assert curve(records, "loss_scale", "skipped_steps")[4] == (2**16, 0), "scaled, and hardly a step overflowed"


def test_adapters_and_the_learned_scalar_are_all_that_is_trained(ranks: RankPool, folder: Path) -> None:
    run(ranks, folder, "lora", model={"lora": 4}, optimizer={"lr": 1e-2})
    saved = open_tensors(folder / "runs" / "lora" / "last").section("model")
    layers = ["attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"]
    layers += ["intermediate.dense", "output.dense"]
    adapted = {
        f"encoder.layer.{block}.{layer}.lora_{end}.default.weight"
        for block in (0, 1)
        for layer in layers
        for end in "AB"
    }
    assert saved.names() == {*adapted, SCALAR}
    still = {name for name in saved.names() if not saved.whole(name).abs().sum() > 0}
    assert still == set(), "each of them has moved from its first value of zero, or was drawn"
