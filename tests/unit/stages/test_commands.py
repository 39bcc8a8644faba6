"""Stages on the command line, before any rank starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from fullshard.cli import app
from tests.small import model_folder, recipe, token_file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    model_folder(tmp_path / "model")
    token_file(tmp_path / "train.jsonl", records=24)
    whole = recipe(tmp_path, name="mine", duration={"steps": 4})
    whole["stages"] = [{"name": "one"}, {"name": "two", "duration": {"epochs": 3}}]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(whole))
    return tmp_path / "recipe.yaml"


def said(*words: str, code: int) -> str:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == code, done.output
    return done.output


def test_a_stage_that_needs_an_earlier_one_says_so_with_the_command(path: Path) -> None:
    text = said("train", str(path), "--stage", "two", "batch.global=8", code=2)
    assert f"two starts from one, and {path.parent}/runs/mine/one has no checkpoint. Train it first: " in text
    assert f"fullshard train {path} --stage one batch.global=8" in text


def test_an_unknown_stage_and_a_recipe_without_stages(path: Path) -> None:
    assert "--stage too: there is no such stage (did you mean 'two'?). Stages: one, two." in said(
        "train", str(path), "--stage", "too", code=2
    )
    assert "--stage two: quickstart has no stages." in said("train", "quickstart", "--stage", "two", code=2)


def test_a_dry_run_shows_every_stage_and_the_totals(path: Path) -> None:
    lines = said("train", str(path), "--dry-run", code=0).splitlines()
    titles = [line for line in lines if line.startswith("# Stage")]
    assert titles == [
        "# Stage 1 of 2: one",
        f"# Stage 2 of 2: two (starts from {path.parent}/runs/mine/one/last; one has not been trained: its structure "
        "stands in for it)",
    ]
    begin = lines.index("start:")
    assert lines[begin + 1] == f"  from: {path.parent}/runs/mine/one", "what it will start from, not its stand-in"
    assert lines[-1] == "# all stages: 10 steps = 4 (one) + 6 (two)"
    second = said("train", str(path), "--dry-run", "--stage", "stage2", code=0)
    assert "# steps: 6 = 3 epochs" in second
    assert "# Stage 1" not in second


def test_check_looks_at_every_stage_and_one_mistake_fails_it(path: Path) -> None:
    text = said("check", str(path), "--quick", "stages.two.batch.global=7", code=2)
    assert text.index("Stage 1 of 2: one") < text.index("Setup is CORRECT") < text.index("Stage 2 of 2: two")
    assert "batch.global = 7 cannot be split evenly" in text
