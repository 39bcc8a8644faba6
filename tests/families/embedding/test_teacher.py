"""Distillation: the teacher's similarities of the whole step, over ranks, against one plain process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard.config.part import decode
from fullshard.contracts.objective import Objective
from fullshard.errors import RecipeError
from tests.families.embedding import cases, texts
from tests.small import curve, train


def settings(teacher: Path | None, cache: int | None = None) -> dict[str, Any]:
    family = {"kind": "sentence_transformer", "path": str(teacher)} if teacher else None
    return {"kind": "contrastive", "loss": {"kind": "distillation", "alpha": 0.7}, "teacher": family, "cache": cache}


def apart(student: Path, teacher: Path, cache: int | None) -> float:
    """The largest distance of a gradient from the plain one."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    objective: Any = decode(Objective, settings(teacher, cache), where="objective")
    sharded, plain = cases.build({"kind": "sentence_transformer", "path": str(student)}, objective, packed=False)
    taught, alone = cases.build({"kind": "sentence_transformer", "path": str(teacher)}, objective, packed=False)
    aux = {"teacher": taught.eval()}
    mine = cases.batches(rank, world, 2)
    total = torch.tensor(float(cases.SAMPLES))
    torch.manual_seed(100 + rank)
    objective.backward(sharded, cases.one_by_one(sharded, mine), total, aux, lambda loss: loss)
    ours = cases.gradients(sharded)
    _, theirs = cases.reference(plain, objective, world, 2, teacher=alone.eval())
    largest = max(float(gradient.abs().max()) for gradient in theirs.values())
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours) / largest


@pytest.mark.parametrize("cache", [None, 3])
def test_gradients_of_distillation_equal_those_of_one_plain_process(ranks: Any, tmp_path: Path, cache: Any) -> None:
    student = cases.encoder_folder(tmp_path / "student", dropout=0.2)
    teacher = cases.encoder_folder(tmp_path / "teacher", seed=9)
    for found in ranks.run(apart, student, teacher, cache, world=2):
        assert found < 1e-5


def test_a_teacher_goes_with_distillation_alone(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="objective.teacher and objective.loss: distillation need each other"):
        decode(Objective, settings(None), where="objective")
    wrong = settings(tmp_path) | {"loss": "infonce"}
    with pytest.raises(RecipeError, match="objective.teacher and objective.loss: distillation need each other"):
        decode(Objective, wrong, where="objective")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("taught")
    texts.encoder(path / "model")
    texts.encoder(path / "teacher", hidden_size=24)  # its embeddings may be wider
    texts.pairs(path / "train.jsonl")
    return path


def test_whole_runs_learn_from_a_sharded_teacher(ranks: Any, folder: Path) -> None:
    """The same losses on one rank and on two, and a loss that falls."""
    found = []
    for world in (1, 2):
        taught = texts.recipe(folder, name=f"on-{world}", objective=settings(folder / "teacher", cache=4))
        found.append(curve(ranks.run(train, taught, world=world)[0], "loss"))
    one, two = (torch.tensor(each).double() for each in found)
    apart = ((one - two) / one).abs()
    # Adam moves a weight whose gradient is nothing but rounding by the whole learning rate, in either direction.
    assert float(apart[0]) <= 1e-6, apart
    assert float(apart.max()) <= 1e-5, apart
    assert found[0][-1] < found[0][0]


def test_a_teacher_with_another_tokenizer_is_refused(ranks: Any, folder: Path, tmp_path: Path) -> None:
    other = texts.decoder(tmp_path / "other")
    with pytest.raises(AssertionError, match="its tokenizer is not that of model.path"):
        ranks.run(train, texts.recipe(folder, name="other", objective=settings(other)), world=1)
