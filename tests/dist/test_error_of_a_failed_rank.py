"""What the console ends with when a run of the real command dies, and what its crash folder contains."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.small import model_folder, recipe, token_file

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("last-words")
    model_folder(path / "model")
    token_file(path / "train.jsonl", records=60)
    return path


def die(folder: Path, name: str, *, ranks: int) -> tuple[subprocess.CompletedProcess[str], Path]:
    settings = recipe(
        folder, name=name, objective={"kind": f"tests.dist.failing_objectives.{name}"}, topology={"devices": ranks}
    )
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(settings))
    command = [sys.executable, "-m", "fullshard", "train", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800, check=False)
    return done, folder / "runs" / name / "crash-1"


def test_the_rank_that_failed_is_named_and_its_error_explained(folder: Path) -> None:
    done, crash = die(folder, "MixedDtypes", ranks=2)
    assert done.returncode == 1
    end = done.stderr[done.stderr.index("Rank 1 (process") :]
    assert "ended with exit code 1; its traceback is above. The other ranks were stopped." in end
    assert "Two tensors of one operation have different dtypes (mixed-dtypes)" in end
    assert end.rstrip().endswith(f"Crash folder: {crash}")
    assert done.stderr.count("Traceback (most recent call last)") == 1, "only the rank that failed is traced"
    assert "nn.functional.linear" in done.stderr
    assert "nn.functional.linear" in (crash / "rank-1.txt").read_text()
    kept = {path.name for path in crash.iterdir()}
    assert kept >= {"environment.json", "log.txt", "metrics.jsonl", "recipe.resolved.yaml"}
    assert json.loads((crash / "metrics.jsonl").read_text().splitlines()[-1])["step"] >= 1


def test_a_numerical_stop_is_explained_without_a_traceback(folder: Path) -> None:
    done, crash = die(folder, "NotANumber", ranks=1)
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("Error: At the first update 35 of 35 trained parameters have a gradient that is not")
    assert "(not-finite)" in done.stderr
    assert done.stderr.count(f"Crash folder: {crash}") == 1
    assert (crash / "rank-0.txt").exists()
