"""`fullshard prove`: a healthy recipe is proven, one that cannot be resumed is caught by step, and nothing is left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from fullshard.cli import app
from fullshard.prove import runs
from tests.prove import on_ranks
from tests.ranks import RankPool
from tests.small import model_folder, recipe, token_file

RESUMED = ["killed after step 3, resumed from 2", "killed after step 5, resumed from 4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prove")
    model_folder(path / "model", num_hidden_layers=1)
    token_file(path / "train.jsonl", records=64)
    return path


@pytest.fixture
def started(ranks: RankPool, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs are made on the pool's ranks; gives the names of those that were."""
    names: list[str] = []
    monkeypatch.setattr(runs, "start_ranks", lambda reading: on_ranks.start_in(ranks, names))
    return names


def ask(folder: Path, *words: str, **sections: Any) -> Result:
    settings = recipe(folder, **{"data": {"shuffle": True}, **sections})
    (folder / "recipe.yaml").write_text(yaml.safe_dump(settings))
    result = CliRunner().invoke(app, ["prove", str(folder / "recipe.yaml"), *words], catch_exceptions=False)
    assert not (folder / "runs").exists() or "--keep" in words, "the runs are removed, and the folder that held them"
    return result


def cases_of(result: Result) -> dict[str, dict[str, Any]]:
    """The cases of a JSON answer, by title."""
    return {case["title"]: case for case in json.loads(result.stdout)["cases"]}


def test_a_healthy_recipe_is_proven_and_nothing_is_left(folder: Path, started: list[str]) -> None:
    """With dropout and in bf16: still resumed bit by bit; the other cases are compared without them."""
    model = {"path": str(folder / "model"), "overrides": {"attention_dropout": 0.1}}
    result = ask(folder, precision="bf16", model=model)
    lines = result.stdout.splitlines()
    assert (result.exit_code, result.stderr) == (0, ""), result.stdout
    assert "Proving run: 6 steps of 16 samples on 1 rank, cpu" in lines
    assert "Resume is EXACT" in lines
    said = " ".join(result.stdout.split())
    assert "are compared in fp32 and without dropout, in micro-batches of 2:" in said
    for title in RESUMED:
        assert f"{title} same bitwise bitwise exact" in said
    rows = [line.split() for line in lines if line.endswith("equal") or line.endswith("equal  ")]
    assert [row[-4] for row in rows] == ["same"] * 3
    assert started == ["straight", "killed", "killed", "killed", "reference", "split", "world", "strategy"]


def test_hidden_state_is_caught_at_the_step_after_the_checkpoint(folder: Path, started: list[str]) -> None:
    result = ask(folder, "--cases", "resume", objective={"kind": f"{on_ranks.__name__}.Counting"})
    said = " ".join(result.stdout.split())
    assert result.exit_code == 3
    assert "2 cases of 2 not proven" in said
    assert f"{RESUMED[0]} step 3 has loss " in said
    assert "after step 4, " in said
    assert "tensors differ, most " in said
    assert "not deterministic" not in said
    assert "EXACT" not in said
    assert started == ["straight", "killed", "killed", "killed"]


def test_a_difference_before_any_kill_is_reported_as_non_deterministic(folder: Path, started: list[str]) -> None:
    result = ask(folder, "--cases", "resume", "--json", objective={"kind": f"{on_ranks.__name__}.Clock"})
    case = cases_of(result)[RESUMED[0]]
    assert result.exit_code == 3
    assert (case["losses"]["step"], case["samples"]["equal"], case["verdict"]) == (1, True, "drift")
    assert "two runs of this recipe differ" in case["remark"]


def test_a_loss_that_depends_on_the_split_and_a_run_that_fails(folder: Path, started: list[str]) -> None:
    result = ask(folder, "--cases", "split,world", "--json", objective={"kind": f"{on_ranks.__name__}.Lopsided"})
    split, world = cases_of(result).values()
    assert result.exit_code == 3
    assert (split["title"], split["verdict"]) == ("micro-batches of 2 instead of 4", "drift")
    assert (split["losses"]["step"], split["samples"]["equal"]) == (1, True)
    assert (world["title"], world["verdict"]) == ("2 ranks instead of 1, from step 2", "not run")
    assert "two ranks are too many. Use one." in world["failure"]
    assert started == ["straight", "split", "world"]


def test_when_the_recipe_does_not_run_its_last_lines_are_shown(folder: Path, started: list[str]) -> None:
    words = ["--cases", "resume", "topology.devices=2"]
    result = ask(folder, *words, objective={"kind": f"{on_ranks.__name__}.Lopsided"})
    assert result.exit_code == 2
    assert "The run `straight` ended with exit code 2" in result.stderr
    assert "    Error: two ranks are too many. Use one." in result.stderr
    assert started == ["straight"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cases", "resum"], "--cases resum: 'resum' is not a case (did you mean 'resume'?)"),
        (["data.train=nowhere.jsonl"], "nowhere.jsonl"),
        (["--dry-run"], "--dry-run"),
    ],
)
def test_mistakes_are_reported_before_anything_starts(
    folder: Path, words: list[str], said: str, started: list[str]
) -> None:
    result = ask(folder, *words)
    assert result.exit_code == 2
    assert said in result.stderr
    assert started == []


def test_a_rank_of_a_launcher_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    result = ask(folder)
    assert result.exit_code == 2
    assert "starts, kills and restarts ranks by itself" in result.stderr


@pytest.mark.slow
def test_with_real_ranks_that_are_really_killed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    result = ask(folder, "--cases", "resume", "--keep", "--json")
    answer = json.loads(result.stdout)
    assert result.exit_code == 0, result.stdout
    assert [case["verdict"] for case in answer["cases"]] == ["exact", "exact"]
    kept = Path(answer["folder"])
    assert kept.parent == folder / "runs"
    words = [(kept / f"start-{number}" / "launcher.txt").read_text() for number in (1, 2, 3, 4)]
    assert ["was ended by SIGKILL" in text for text in words] == [False, True, True, False]
    said = [(kept / f"start-{number}" / "rank-0.txt").read_text() for number in (1, 2, 3, 4)]
    assert [f"killed/checkpoint-{step}" in text for text, step in zip(said[2:], (2, 4), strict=True)] == [True, True]
    assert "Resuming from" not in said[0] + said[1]
