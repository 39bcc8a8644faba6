"""A new family is one folder: the one that CONTRIBUTING.md shows, installed by path, is known to every command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.contributing import commands, write_examples

Run = Callable[..., str]


@pytest.fixture(scope="module")
def fullshard(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs `fullshard ...` in a folder of its own, where the family is installed."""
    folder = tmp_path_factory.mktemp("family")
    names = write_examples(folder / "source", below="Add a family")
    assert {name.split("/")[1] for name in names if name.count("/") == 2} == {
        *("models", "objectives", "encoders", "sources", "evaluations", "commands", "recipes")
    }
    install, *said = commands("Add a family")
    assert said == [
        *("fullshard check trend", "fullshard train trend", "fullshard export runs/trend exported", "fullshard walk 3")
    ]
    pip = [sys.executable, "-m", *install.split()[:-1], "--target", str(folder / "installed"), str(folder / "source")]
    subprocess.run([*pip, "--quiet", "--disable-pip-version-check"], check=True, cwd=folder)
    path = os.pathsep.join([str(folder / "installed"), *filter(None, [os.environ.get("PYTHONPATH")])])

    def run(*words: str) -> str:
        ran = subprocess.run(
            [sys.executable, "-m", "fullshard", *words],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    setattr(run, "folder", folder)  # noqa: B010
    return run


@pytest.fixture(scope="module")
def runs(fullshard: Run) -> Path:
    """A run of six steps, and one that goes on from its third."""
    fullshard("train", "trend")
    fullshard("train", "trend", "name=resumed", "--resume", "runs/trend/checkpoint-3")
    folder: Path = getattr(fullshard, "folder") / "runs"  # noqa: B009
    return folder


def logged(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_help_recipes_and_schema_know_it(fullshard: Run) -> None:
    assert "walk" in fullshard("--help")
    assert "Learns whether a random walk rises or falls." in fullshard("recipes", "list")
    text = fullshard("recipes", "schema")
    for kind in ("trend_net", "direction", "series", "walks", "hit_rate"):
        assert f'"const": "{kind}"' in text
    assert len(fullshard("walk", "3").split()) == 16


def test_it_is_checked(fullshard: Run) -> None:
    assert "fullshard train trend" in fullshard("check", "trend")


def test_it_trains_on_two_ranks_and_resumes_bit_by_bit(runs: Path) -> None:
    keys = ("step", "loss", "grad_norm")
    whole, resumed = (
        [tuple(record[key] for key in keys) for record in logged(runs / name) if record["kind"] == "train"]
        for name in ("trend", "resumed")
    )
    assert [row[0] for row in whole] == [1, 2, 3, 4, 5, 6]
    assert resumed == whole[3:]
    (found,) = [record for record in logged(runs / "trend") if record["kind"] == "validation"]
    assert 0 <= found["hit_rate"] <= 1
    assert (runs / "trend" / "best").exists()


def test_it_is_exported(fullshard: Run, runs: Path) -> None:
    fullshard("export", "runs/trend", "exported")
    ours, theirs = (
        load_file(folder / "trend.safetensors") for folder in (runs.parent / "exported", runs / "trend" / "model")
    )
    assert ours.keys() == theirs.keys() >= {"first.weight", "blocks.1.mix.bias", "head.weight"}
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
