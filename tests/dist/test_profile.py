"""`fullshard train --profile`: on real ranks the losses are the same bit by bit, and the tables add up."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.profile.option import with_steps
from fullshard.profile.recorder import VARIABLE
from tests.ranks import RankPool
from tests.small import curve, model_folder, recipe, token_file, train


def profiled(settings: dict[str, Any], steps: int) -> list[dict[str, Any]]:
    """One rank of a run that profiles; sent to the rank pool by name."""
    os.environ[VARIABLE] = str(steps)
    try:
        return train(settings)
    finally:
        os.environ.pop(VARIABLE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profile")
    model_folder(path / "model")
    token_file(path / "train.jsonl", records=64)
    return path


def settings(folder: Path, name: str, steps: int = 9, **sections: Any) -> dict[str, Any]:
    return recipe(folder, name=name, duration={"steps": steps}, **sections)


def test_losses_are_the_same_and_the_tables_add_up(ranks: RankPool, folder: Path) -> None:
    plain = ranks.run(train, settings(folder, "plain"), world=2)[0]
    watched = ranks.run(profiled, settings(folder, "watched"), 3, world=2)[0]
    assert curve(watched, "loss", "grad_norm") == curve(plain, "loss", "grad_norm")
    place = folder / "runs" / "watched" / "profile"
    assert sorted(path.name for path in place.iterdir()) == [
        "rank-0.json.gz",
        "rank-1.json.gz",
        "table.json",
        "table.txt",
    ]
    found = json.loads((place / "table.json").read_text())
    assert (found["steps"], found["first_step"], found["rank"], found["device"]) == (3, 5, 0, "CPU")
    wall = found["seconds_per_step"]
    assert 0 < sum(found["phases"].values()) <= wall * 1.01
    assert sum(found["kinds"].values()) == pytest.approx(wall, rel=1e-2)
    for phase in ("data", "forward", "backward", "optimizer", "clip and checks"):
        assert found["phases"][phase] > 0, phase
    for kind in ("matrix products", "attention", "elementwise", "optimizer", "communication"):
        assert found["kinds"][kind] > 0, kind
    log = (folder / "runs" / "watched" / "log.txt").read_text()
    assert "Profile of steps 5 to 7 on rank 0" in log
    assert (place / "table.txt").read_text().splitlines()[0] in log
    with gzip.open(place / "rank-1.json.gz", "rt") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"ProfilerStep#1", "fullshard::compute"} <= names
    assert not (folder / "runs" / "plain" / "profile").exists()


@pytest.mark.parametrize(("steps", "said"), [(6, "Profile of steps 5 to 6 "), (3, "Nothing was profiled")])
def test_a_run_that_ends_before_the_profile_does(ranks: RankPool, folder: Path, steps: int, said: str) -> None:
    ranks.run(profiled, settings(folder, f"short-{steps}", steps), 5, world=1)
    assert said in (folder / "runs" / f"short-{steps}" / "log.txt").read_text()


def test_the_option(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_steps(["r.yaml", "--profile"]) == ["r.yaml", "--profile=5"]
    assert with_steps(["--profile", "r.yaml", "seed=1"]) == ["--profile=5", "r.yaml", "seed=1"]
    assert with_steps(["r.yaml", "--profile", "7", "seed=1"]) == ["r.yaml", "--profile", "7", "seed=1"]
    monkeypatch.chdir(folder)
    (folder / "r.json").write_text(json.dumps(settings(folder, "named", 7, topology={"device": "cpu", "devices": 1})))
    (folder / "r.json").rename(folder / "r.yaml")
    result = CliRunner().invoke(app, ["train", "r.yaml", "--profile", "2", "seed=1"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert json.loads((folder / "runs" / "named" / "profile" / "table.json").read_text())["steps"] == 2
    assert VARIABLE not in os.environ
