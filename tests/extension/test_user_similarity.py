"""A user's own loss over embeddings, in a file of their own: with chunks, Matryoshka, a learned number and two ranks it
trains as the built-in loss of the same formula does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extension.with_parts import steps_with, train_with
from tests.families.embedding import cases, texts
from tests.ranks import RankPool
from tests.small import curve

SOFTMAX = """
import math
import torch
from torch.nn.functional import normalize
from fullshard import SimilarityLoss

class Softmax(SimilarityLoss):
    temperature: float = 0.05

    def learned(self):
        return {"log_scale": -math.log(self.temperature)}

    def loss(self, embedded):
        documents = torch.cat([embedded.positives, embedded.negatives.flatten(0, 1)])
        there = torch.cat([embedded.real, (embedded.has_negative & embedded.real[:, None]).flatten()])
        cosines = normalize(embedded.queries, dim=-1) @ normalize(documents, dim=-1).T
        scores = embedded.scalars["log_scale"].exp() * cosines
        terms = scores.masked_fill(~there, -1e9).logsumexp(-1) - scores.diagonal()
        return (terms * embedded.real)[embedded.own].sum()
"""
SAME: list[dict[str, Any]] = [
    {"kind": "my_similarity.Softmax", "temperature": 0.2},
    {"kind": "infonce", "temperature": 0.2, "learn_temperature": True, "mask_labels": False, "mask_equal": False},
]
"""The user's loss, and the built-in one of the same formula."""
CUT: dict[str, Any] = {"matryoshka": [16, 4], "cache": {"chunk": 3}}


@pytest.fixture
def parts(tmp_path: Path) -> str:
    """The user's folder."""
    (tmp_path / "my_similarity.py").write_text(SOFTMAX)
    return str(tmp_path)


def test_gradients_of_a_users_loss(ranks: RankPool, parts: str, tmp_path: Path) -> None:
    model = cases.encoder_folder(tmp_path / "model", dropout=0.2)
    ours, theirs = ranks.run(steps_with, parts, model, [{"loss": loss, **CUT} for loss in SAME], world=2)[0]
    assert ours[0] == pytest.approx(theirs[0], rel=1e-6)
    assert "learned_by_objective.moved" in ours[1]
    assert ours[1].keys() == theirs[1].keys()
    largest = max(float(gradient.abs().max()) for gradient in theirs[1].values())
    for name, gradient in theirs[1].items():
        assert float((ours[1][name] - gradient).abs().max()) < 1e-5 * largest, name


def test_a_whole_run_with_a_users_loss(ranks: RankPool, parts: str, tmp_path: Path) -> None:
    texts.encoder(tmp_path / "model")
    texts.pairs(tmp_path / "train.jsonl", records=19)  # with 8 samples a step, the third holds 3
    found = []
    for loss in SAME:
        sections: dict[str, Any] = {
            "objective": {"loss": loss, **CUT},
            "duration": {"steps": 3},
            "data": {"validation": str(tmp_path / "train.jsonl")},
            "evaluate": {"parts": ["loss"]},
        }
        records = ranks.run(train_with, parts, texts.recipe(tmp_path, name=loss["kind"], **sections), world=2)[0]
        validated = [(record["loss"], 1.0) for record in records if record["kind"] == "validation"]
        found.append(torch.tensor([*curve(records, "loss", "grad_norm"), *validated]).double())
    assert found[0].shape == (4, 2)
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=0)
