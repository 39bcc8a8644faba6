"""`fullshard prove` of a recipe with stages: each stage, and the hand-over between them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.prove import runs
from tests.prove import on_ranks
from tests.ranks import RankPool
from tests.small import model_folder, recipe, token_file


@pytest.fixture
def path(tmp_path: Path, ranks: RankPool, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(runs, "start_ranks", lambda reading: on_ranks.start_in(ranks, []))
    monkeypatch.setenv("COLUMNS", "140")
    model_folder(tmp_path / "model", num_hidden_layers=1)
    token_file(tmp_path / "train.jsonl", records=64)
    whole = recipe(tmp_path, name="mine", topology={"device": "cpu", "devices": 1})
    frozen = {"model": {"freeze": ["model.embed_tokens.*"]}}
    whole["stages"] = [{"name": "one", **frozen}, {"name": "two", "checkpoint": {"best": None}}]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(whole))
    return tmp_path / "recipe.yaml"


def test_a_stage_is_proven_from_the_proof_of_the_one_before_it(path: Path) -> None:
    done = CliRunner().invoke(app, ["prove", str(path), "--cases", "resume"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    text = " ".join(done.output.split())
    assert "Stage 2 of 2: two (starts from the proof of one)" in text
    first, second = text.split("Stage 2 of 2")
    assert "starts from" not in first
    assert "starts from one: 12 weights, 12 optimizer states, 1 new - - bitwise exact" in second
    assert second.count("bitwise bitwise exact") == 2
    assert not (path.parent / "runs").exists(), "nothing is left"


@pytest.mark.slow
def test_the_hand_over_is_a_case_of_the_json_answer(path: Path) -> None:
    done = CliRunner().invoke(app, ["prove", str(path), "--cases", "resume", "--json"], catch_exceptions=False)
    answer = json.loads(done.stdout)
    assert answer["correct"] is True
    assert [case["case"] for case in answer["stages"]["one"]["cases"]] == ["resume", "resume"]
    start, *rest = answer["stages"]["two"]["cases"]
    assert [case["case"] for case in rest] == ["resume", "resume"]
    assert (start["case"], start["verdict"], start["weights"]["equal"]) == ("start", "exact", True)
