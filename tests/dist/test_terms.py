"""A loss of several named terms: each is divided by its own count, on any number of ranks and any split into
micro-batches, as in a plain PyTorch loop in one process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from fullshard.contracts.evaluation import Evaluation, EvaluationInputs, Findings
from fullshard.contracts.objective import Batch, Numbers, Objective, Term, Terms
from tests.near import assert_near
from tests.ranks import RankPool
from tests.small import curve, model_folder, recipe, token_file, train

RECORDS, STEPS, GLOBAL, LR, WEIGHT = 22, 3, 8, 1e-2, 0.1  # the last step has 6 rows


class TwoTerms(Objective):
    """Cross-entropy over tokens, and the squared log-partition of each row's first position over rows."""

    wrong: bool = False
    taken: bool = False
    metric: str | None = None

    def count(self, batch: Batch) -> Mapping[str, int]:
        kept = batch["labels"] != -100
        return {"samples" if self.taken else "token": int(kept.sum()), "first": int(kept[:, 0].sum())}

    def loss(self, model: nn.Module, batch: Batch, aux: dict[str, nn.Module]) -> Terms:
        tokens, first = two_sums(model(input_ids=batch["input_ids"]).logits, batch["labels"])
        named = {"other" if self.wrong else "token": Term(tokens), "first": Term(first, weight=WEIGHT)}
        return Terms.several(named, {self.metric: (first, first)} if self.metric else {})


def two_sums(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return tokens, (logits[:, 0].logsumexp(-1).square() * (labels[:, 0] != -100)).sum()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("terms")
    model_folder(path / "model")
    token_file(path / "train.jsonl", records=RECORDS)
    token_file(path / "validation.jsonl", records=5, seed=3)
    return path


def padded(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    return ids, torch.tensor([row[1:] + [-100] * (longest - len(row) + 1) for row in rows])


def rows_of(path: Path) -> list[list[int]]:
    return [json.loads(line)["input_ids"] for line in path.read_text().splitlines()]


def averages(model: Any, rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss and the average of each term, over all rows at once."""
    ids, labels = padded(rows)
    tokens, first = two_sums(model(input_ids=ids).logits, labels)
    tokens, first = tokens / (labels != -100).sum(), first / len(rows)
    return tokens + WEIGHT * first, tokens, first


@pytest.fixture(scope="module")
def reference(folder: Path) -> tuple[list[tuple[float, ...]], tuple[float, ...], dict[str, torch.Tensor]]:
    """Loss, both averages and the gradient norm of each step; those of validation; the weights at the end."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    matrices, vectors = ([p for p in model.parameters() if (p.dim() >= 2) == wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    found, rows = [], rows_of(folder / "train.jsonl")
    for step in range(STEPS):
        numbers = averages(model, rows[step * GLOBAL : (step + 1) * GLOBAL])
        numbers[0].backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = LR * (1 - step / STEPS)
        optimizer.step()
        optimizer.zero_grad()
        found.append((*(number.item() for number in numbers), norm.item()))
    with torch.no_grad():
        validation = tuple(number.item() for number in averages(model, rows_of(folder / "validation.jsonl")))
    return found, validation, dict(model.named_parameters())


@pytest.mark.parametrize(("world", "per_device"), [(1, 8), (1, 2), (2, 4), (2, 1)])
def test_each_term_is_divided_by_its_own_count(
    ranks: RankPool, folder: Path, reference: Any, world: int, per_device: int
) -> None:
    settings = recipe(
        folder,
        name=f"terms-{world}-{per_device}",
        objective={"kind": f"{__name__}.TwoTerms"},
        data={"validation": str(folder / "validation.jsonl")},
        batch={"per_device": per_device, "global": GLOBAL},
        duration={"steps": STEPS},
        evaluate={"parts": ["loss"]},
    )
    records = ranks.run(train, settings, world=world)[0]
    steps, validation, weights = reference
    found = torch.tensor(curve(records, "loss", "token", "first", "grad_norm"))
    torch.testing.assert_close(found, torch.tensor(steps), rtol=2e-6, atol=0)
    [measured] = [record for record in records if record["kind"] == "validation"]
    assert [measured[name] for name in ("loss", "token", "first")] == pytest.approx(validation, rel=1e-5)
    exported = load_file(folder / "runs" / settings["name"] / "model" / "model.safetensors")
    for name, tensor in exported.items():
        assert_near(tensor, weights[name].detach())


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ({"wrong": True}, r"loss\(\) returns first, other, and count\(\) counts first, token"),
        ({"taken": True}, r"a term is called samples, which every log has already"),
        ({"metric": "tokens"}, r"a metric is called tokens, which every log has already"),
    ],
)
def test_wrong_or_taken_names_of_terms_are_refused(
    ranks: RankPool, folder: Path, mistake: dict[str, Any], said: str
) -> None:
    objective = {"kind": f"{__name__}.TwoTerms", **mistake}
    with pytest.raises(AssertionError, match=said):
        ranks.run(train, recipe(folder, name="mistake", objective=objective), world=1)


class Finds(Evaluation):
    """A user's, which finds a number of this name, and says so before the run or not."""

    name: str
    declared: bool = False

    def gives(self, objective: Objective, model: nn.Module) -> Numbers | None:
        return {self.name: "min"} if self.declared else None

    def run(self, inputs: EvaluationInputs) -> Findings:
        return Findings({self.name: 1.0})


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([{"name": "tokens", "declared": True}], "a number of .*Finds is called tokens, which every log has already"),
        ([{"name": "step"}], "a number of .*Finds is called step, which every log has already"),
        (
            ["loss", {"name": "loss"}],
            "evaluate.parts: loss and evaluate.parts: .*Finds both report a number called 'loss'",
        ),
        (
            [{"name": "wer", "declared": True}, "loss", {"name": "wer", "declared": True, "only_at_end": True}],
            r"evaluate.parts\[0\] \(.*Finds\) and evaluate.parts\[2\] \(.*Finds\) both report a number called 'wer'",
        ),
        ([{"name": "wer"}, {"name": "wer"}], "both report a number called 'wer', and one would overwrite the other"),
    ],
)
def test_no_number_of_an_evaluation_overwrites_another(
    ranks: RankPool, folder: Path, parts: list[Any], said: str
) -> None:
    chosen = [{"kind": f"{__name__}.Finds", **part} if isinstance(part, dict) else part for part in parts]
    settings = recipe(
        folder,
        name="evaluations",
        data={"validation": str(folder / "validation.jsonl")},
        duration={"steps": 1},
        evaluate={"parts": chosen},
        checkpoint={"best": None},
    )
    with pytest.raises(AssertionError, match=said):
        ranks.run(train, settings, world=1)


def validation_of(settings: dict[str, Any]) -> dict[str, float]:
    """The last numbers of a run, as a caller in Python gets them."""
    from fullshard.recipes.read import read
    from fullshard.run import execute

    return execute(read(settings), resume="never").validation


def test_a_result_has_the_numbers_of_the_last_validation_and_of_the_end(ranks: RankPool, folder: Path) -> None:
    finds = {"kind": f"{__name__}.Finds", "name": "wer", "only_at_end": True}
    settings = recipe(
        folder,
        name="result",
        data={"validation": str(folder / "validation.jsonl")},
        duration={"steps": 1},
        evaluate={"parts": ["loss", finds]},
        checkpoint={"best": None},
    )
    [found] = ranks.run(validation_of, settings, world=1)
    assert found["wer"] == 1.0
    assert found["loss"] > 0
