"""`fullshard evaluate`: the numbers of training at that step, bit for bit on as many ranks and within rounding on
others; of an exported model; of averaged weights; and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.log.metrics import FILE, read
from tests.families.embedding import texts
from tests.ranks import RankPool
from tests.small import model_folder, recipe, token_file, train

STEPS = 4
EVERY: dict[str, Any] = {
    "duration": {"steps": STEPS},
    "batch": {"per_device": 2, "global": 8},
    "evaluate": {"every_steps": 2, "parts": ["loss"], "per_device": 3},
    "checkpoint": {"every_steps": 2, "every_epochs": None, "best": {"metric": "loss"}, "keep": 9},
}


def command(*words: str) -> tuple[int, str, str]:
    """The command on one rank of the pool, which was started by a launcher."""
    done = CliRunner().invoke(app, [*words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


def evaluate(ranks: RankPool, *words: Any, world: int) -> dict[str, Any]:
    """What rank 0 prints with --json; the other ranks print nothing."""
    (code, said, printed), *others = ranks.run(command, "evaluate", *map(str, words), "--json", world=world)
    assert code == 0, printed
    assert [other[:2] for other in others] == [(0, "")] * (world - 1)
    return json.loads(said)  # type: ignore[no-any-return]


def refused(ranks: RankPool, *words: Any) -> str:
    [(code, _, printed)] = ranks.run(command, "evaluate", *map(str, words), world=1)
    assert code == 2
    return printed  # type: ignore[no-any-return]


def in_training(run: Path) -> dict[int, dict[str, float]]:
    """The numbers of each validation, by step."""
    records = [record for record in read(run / FILE) if record["kind"] == "validation"]
    return {r["step"]: {k: v for k, v in r.items() if k not in ("kind", "step", "epoch", "time")} for r in records}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("evaluate")
    model_folder(path / "model", num_hidden_layers=2)
    token_file(path / "train.jsonl", records=24)
    token_file(path / "held_out.jsonl", records=7, seed=5)
    return path


@pytest.fixture(scope="module")
def run(ranks: RankPool, folder: Path) -> Path:
    """On two ranks, packed, with averaged weights validated beside the trained ones."""
    data = {"validation": str(folder / "held_out.jsonl"), "pack": True, "sequence_length": 32}
    settings = {**EVERY, "data": data, "ema": {"decay": 0.5, "evaluate": "both"}}
    ranks.run(train, recipe(folder, name="lm", **settings), world=2)
    return folder / "runs" / "lm"


def near(found: dict[str, float], expected: dict[str, float]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-6), name


def test_the_numbers_are_those_of_training(ranks: RankPool, folder: Path, run: Path) -> None:
    expected = in_training(run)
    assert {"loss", "perplexity", "accuracy", "ema_loss"} <= expected[2].keys()
    assert expected[2] != expected[4]
    for step in (2, 4):
        found = evaluate(ranks, run, "--checkpoint", step, world=2)
        assert (found["numbers"], found["step"], found["ranks"]) == (expected[step], step, 2)
    best = min(expected, key=lambda step: expected[step]["loss"])
    for world in (1, 3):  # three do not divide a step of training
        alone = evaluate(ranks, run, world=world)
        assert alone["step"] == best
        near(alone["numbers"], expected[best])
    assert evaluate(ranks, run / "last", "--weights", "ema", world=2)["numbers"]["loss"] == expected[4]["ema_loss"]


def test_evaluates_other_data_and_the_exported_model(ranks: RankPool, folder: Path, run: Path) -> None:
    """The training data need not be there for other data, and a model needs no run."""
    expected = in_training(run)[4]
    held = folder / "held_out.jsonl"
    hidden = (folder / "train.jsonl").rename(folder / "hidden")
    try:
        found = evaluate(ranks, run / "checkpoint-4", "--data", held, world=2)["numbers"]
    finally:
        hidden.rename(folder / "train.jsonl")
    assert found == expected
    other = evaluate(ranks, run / "checkpoint-4", "--data", folder / "train.jsonl", world=1)["numbers"]
    assert other["loss"] != pytest.approx(expected["loss"], rel=1e-3)
    settings = ["data.sequence_length=32", "precision=fp32", "topology.device=cpu", f"data.cache={folder / 'cache'}"]
    averaged = {name: expected[f"ema_{name}"] for name in ("loss", "accuracy", "perplexity")}
    near(evaluate(ranks, run / "model", "--data", held, *settings, world=1)["numbers"], averaged)


def test_evaluates_embeddings_with_adapters(ranks: RankPool, tmp_path: Path) -> None:
    """Every evaluation of the recipe, after the first steps of adapters."""
    texts.encoder(tmp_path / "model", num_hidden_layers=1)
    texts.pairs(tmp_path / "train.jsonl", records=16)
    texts.pairs(tmp_path / "held_out.jsonl", records=9, seed=7)
    parts = {"every_steps": 2, "parts": ["loss", {"kind": "retrieval", "at": [1, 3]}]}
    sections = {**EVERY, "evaluate": parts, "data": {"validation": str(tmp_path / "held_out.jsonl")}}
    sections["checkpoint"] = {**EVERY["checkpoint"], "best": None}
    settings = texts.recipe(tmp_path, name="adapted", model={"lora": 2}, **sections)
    ranks.run(train, settings, world=2)
    run = tmp_path / "runs" / "adapted"
    expected = in_training(run)[4]
    assert {"loss", "recall@1", "ndcg@3"} <= expected.keys()
    assert evaluate(ranks, run, world=2)["numbers"] == expected
    held = ["--data", tmp_path / "held_out.jsonl", "data.sequence_length=24", "topology.device=cpu", "precision=fp32"]
    found = evaluate(ranks, run / "model", *held, f"data.cache={tmp_path}", "evaluate.per_device=9", world=1)["numbers"]
    # Its loss depends on what is in a batch; where queries find their documents does not.
    assert found["recall@1"] == expected["recall@1"]


def test_mistakes_are_user_errors(ranks: RankPool, folder: Path, run: Path, tmp_path: Path) -> None:
    assert "Give latest, best, or a step: 2, 4" in refused(ranks, run, "--checkpoint", "3")
    assert "has no validation data of its own" in refused(ranks, folder / "model")
    assert "neither a run" in refused(ranks, tmp_path)
    assert "--weights mode: allowed are ema, model (did you mean" in refused(ranks, run, "--weights", "mode")
    assert "is not a run" in refused(ranks, folder / "model", "--checkpoint", "best")
    assert "data.sequence_lenght" in refused(ranks, run, "data.sequence_lenght=3")
    (folder / "train.jsonl").rename(folder / "hidden")
    try:
        assert "no such file" in refused(ranks, run)
    finally:
        (folder / "hidden").rename(folder / "train.jsonl")
