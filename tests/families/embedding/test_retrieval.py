"""Retrieval and Spearman: the numbers of sentence-transformers' own evaluator and of scipy, on any number of ranks."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard.checkpoint import folder as files
from tests.families.embedding import texts
from tests.ranks import RankPool
from tests.small import train

HELD_OUT = 27  # with 4 samples a rank, no number of ranks divides the last batch
DIMS = [16, 8, 3]
NAMES = ["recall@1", "recall@3", "recall@10", "mrr@10", "ndcg@10"]
RETRIEVAL: dict[str, Any] = {"kind": "retrieval", "at": [1, 3, 10]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("retrieval")
    texts.encoder(path / "model", num_hidden_layers=1)
    texts.pairs(path / "train.jsonl", records=16)
    held_out(path / "held_out.jsonl")
    return path


def held_out(path: Path) -> list[dict[str, Any]]:
    """Queries with several positives, positives of several queries, negatives that are a positive elsewhere, and
    pairs that are there twice."""
    rows = texts.pairs(path, records=HELD_OUT, seed=7)
    draw = random.Random(1)
    for index, row in enumerate(rows):
        row["label"] = draw.choice([0.0, 0.5, 0.5, 1.0, draw.random()])
        if index % 4 == 3:
            row["query"] = rows[index - 2]["query"]
        if index % 5 == 4:
            row["positive"] = rows[index - 1]["positive"]
        if index % 6 == 5:
            row["negatives"] = [rows[index - 3]["positive"], rows[index - 3]["positive"], row["query"]]
    for twice in range(10):
        rows[-1 - twice] |= {"query": rows[twice]["query"], "positive": rows[twice]["positive"]}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "held_out.jsonl").read_text().splitlines()]


def by_sentence_transformers(model: Path, rows: list[dict[str, Any]], dim: int) -> dict[str, float]:
    """The same search by its evaluator: each text once."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

    documents = [row["positive"] for row in rows] + [n for row in rows for n in row.get("negatives", [])]
    relevant: dict[str, set[str]] = {}
    for row in rows:
        relevant.setdefault(row["query"], set()).add(row["positive"])
    evaluator = InformationRetrievalEvaluator(
        {query: query for query in relevant},
        {document: document for document in documents},
        relevant,
        precision_recall_at_k=[1, 3, 10],
        write_csv=False,
        truncate_dim=dim,
    )
    loaded = SentenceTransformer(str(model), device="cpu", local_files_only=True)
    found = evaluator(loaded)
    assert len(relevant) < len(rows)
    assert len(set(documents)) < len(documents)
    return {name: found[f"cosine_{name}"] for name in NAMES}


def run(ranks: RankPool, folder: Path, name: str, *, world: int = 1, **sections: Any) -> list[dict[str, Any]]:
    """Two steps, evaluated before, between and after; gives the validation records."""
    base: dict[str, Any] = {
        "data": {"validation": str(folder / "held_out.jsonl")},
        "batch": {"per_device": 2, "global": 8},
        "duration": {"steps": 2},
        "optimizer": {"lr": 2e-2},
        "evaluate": {"parts": [RETRIEVAL], "at_start": True, "every_steps": 1, "per_device": 4},
    }
    settings = texts.recipe(folder, name=name, **base | sections)
    records = ranks.run(train, settings, world=world)[0]
    return [record for record in records if record["kind"] == "validation"]


def suffix(name: str, dim: int) -> str:
    return name if dim == DIMS[0] else f"{name}/{dim}"


@pytest.fixture(scope="module")
def one_rank(ranks: RankPool, folder: Path) -> list[dict[str, Any]]:
    return run(ranks, folder, "world-1", objective={"matryoshka": DIMS})


@pytest.fixture(scope="module")
def expected(one_rank: list[dict[str, Any]], folder: Path) -> list[dict[str, float]]:
    """Numbers of the model before and after two steps, by the evaluator, at every dimension."""
    start = folder / "start"
    write_start(folder / "model", start)
    return [
        {
            suffix(name, dim): number
            for dim in DIMS
            for name, number in by_sentence_transformers(model, rows_of(folder), dim).items()
        }
        for model in (start, folder / "runs" / "world-1" / "model")
    ]


def write_start(model: Path, folder: Path) -> None:
    """The model before training, as a folder of sentence-transformers."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    SentenceTransformer(modules=[Transformer(str(model)), Pooling(16, "mean"), Normalize()], device="cpu").save(
        str(folder)
    )


@pytest.mark.parametrize("world", [1, 2, 4])
def test_numbers_are_those_of_sentence_transformers(
    ranks: RankPool, folder: Path, one_rank: list[dict[str, Any]], expected: list[dict[str, float]], world: int
) -> None:
    found = one_rank
    if world > 1:
        objective = {"matryoshka": DIMS, "cache": 5 if world == 2 else None}
        found = run(ranks, folder, f"world-{world}", world=world, objective=objective)
    assert [record["step"] for record in found] == [0, 1, 2]
    for record, right in ((found[0], expected[0]), (found[2], expected[1])):
        assert {name: record[name] for name in right} == pytest.approx(right, rel=1e-6)
    assert expected[0] != expected[1]
    assert len({tuple(right[suffix(name, dim)] for name in NAMES) for right in expected for dim in DIMS}) == 6


def test_retrieval_has_its_own_dims(ranks: RankPool, folder: Path, expected: list[dict[str, float]]) -> None:
    evaluate = {"parts": [{**RETRIEVAL, "dims": [3]}], "at_start": True}
    found = run(ranks, folder, "dims", evaluate=evaluate)[0]
    assert {name for name in found if "@" in name} == {*NAMES, *(f"{name}/3" for name in NAMES)}
    assert {name: found[name] for name in found if "@" in name} == pytest.approx(
        {name: number for name, number in expected[0].items() if not name.endswith("/8")}
    )


def test_the_best_model_is_chosen_by_it(ranks: RankPool, folder: Path) -> None:
    metric = "mrr@10/8"
    found = run(
        ranks,
        folder,
        "best",
        objective={"matryoshka": DIMS},
        duration={"steps": 6},
        checkpoint={"best": {"metric": metric, "mode": "max"}, "keep": None},
        evaluate={"parts": [RETRIEVAL], "every_steps": 1},
    )
    values = [(record[metric], record["step"]) for record in found]
    right = max(values, key=lambda pair: (pair[0], -pair[1]))
    assert 0 < right[1] < 6, "neither the first nor the last would be a better test"
    run_folder = folder / "runs" / "best"
    assert (run_folder / "best").resolve().name == files.name_of(right[1])


@pytest.mark.parametrize("world", [1, 2])
def test_spearman_is_that_of_scipy(ranks: RankPool, folder: Path, world: int) -> None:
    from scipy.stats import spearmanr
    from sentence_transformers import SentenceTransformer

    sections = {
        "objective": {"loss": "cosent"},
        "evaluate": {"parts": ["spearman", "loss"], "at_start": True, "per_device": 4},
    }
    found = run(ranks, folder, f"spearman-{world}", world=world, data=labelled(folder), **sections)
    assert [record["step"] for record in found] == [0, 2]
    rows = rows_of(folder)
    model = SentenceTransformer(
        str(folder / "runs" / f"spearman-{world}" / "model"), device="cpu", local_files_only=True
    )
    # Each text once: pairs that are there twice have equal cosines, whatever batch they are encoded in.
    texts_of_all = sorted({row[side] for row in rows for side in ("query", "positive")})
    vectors = dict(zip(texts_of_all, model.encode(texts_of_all, convert_to_tensor=True), strict=True))
    sides = [torch.stack([vectors[row[side]] for row in rows]) for side in ("query", "positive")]
    cosines = torch.nn.functional.cosine_similarity(*sides)
    assert len(cosines.unique()) < len(rows), "no pair is there twice"
    assert float(cosines.unique().diff().min()) > 1e-5, "rounding could change the order"
    right = spearmanr(cosines.numpy(), [row["label"] for row in rows]).statistic
    assert found[1]["spearman"] == pytest.approx(right, rel=1e-6)
    assert found[0]["spearman"] != pytest.approx(right, rel=1e-3)


def labelled(folder: Path) -> dict[str, str]:
    """The held-out records to train on as well: they have labels."""
    return {"train": str(folder / "held_out.jsonl"), "validation": str(folder / "held_out.jsonl")}
