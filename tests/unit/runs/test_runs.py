"""`fullshard runs`: the state of every kind of run, what differs between recipes, and folders that are damaged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.faults import beat
from fullshard.runs import folder as reading
from fullshard.runs.differences import differences
from fullshard.runs.folder import Run, read_run
from fullshard.runs.table import table
from tests import small


def listed(*words: Any, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["runs", *map(str, words)])
    assert result.exit_code == code, result.output
    return result.output


def rows(place: Path) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(listed(place, "--json"))["runs"]}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two finished runs, with other rates and lengths."""
    path = tmp_path_factory.mktemp("runs")
    small.model_folder(path / "model")
    small.token_file(path / "train.jsonl", records=24)
    alone = {"topology": {"device": "cpu", "devices": 1}}
    for name, lr, steps in (("slow", 1e-3, 2), ("fast", 1e-2, 3)):
        judged = {"data": {"holdout": 0.2}, "evaluate": {"parts": ["loss"]}, "checkpoint": {"best": "loss"}}
        chosen = small.recipe(path, name=name, optimizer={"lr": lr}, duration={"steps": steps}, **alone, **judged)
        small.train(chosen)
    return path / "runs"


@pytest.fixture
def place(real: Path, tmp_path: Path) -> Path:
    """A copy of one of them, to be changed."""
    shutil.copytree(real / "slow", tmp_path / "runs" / "slow", symlinks=True)
    return tmp_path / "runs"


def unfinished(run: Path) -> None:
    """Takes away what a run says at its end."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines if '"finished"' not in line))


def test_two_real_runs(real: Path) -> None:
    found = rows(real)
    assert list(found) == ["slow", "fast"], "the newest comes last"
    assert [(row["state"], row["step"], row["steps"]) for row in found.values()] == [
        ("finished", 2, 2),
        ("finished", 3, 3),
    ]
    assert [row["differs"] for row in found.values()] == [
        {"duration.steps": 2, "optimizer.lr": 1e-3},
        {"duration.steps": 3, "optimizer.lr": 1e-2},
    ]
    for name, row in found.items():
        records = [json.loads(line) for line in (real / name / "metrics.jsonl").read_text().splitlines()]
        ended = records[-1]
        assert (row["best"], row["best_step"], row["seconds"]) == (ended["best"], ended["best_step"], ended["seconds"])
        assert row["best_by"] == "min loss"
        assert row["loss"] == [record["loss"] for record in records if record["kind"] == "train"][-1]
    text = listed(real)
    assert text.splitlines()[0].split() == ["run", "state", "steps", "best", "loss", "time", "differs"]
    assert "duration.steps=3 optimizer.lr=0.01" in text
    assert listed(real / "fast").splitlines()[1].startswith("fast  finished")


@pytest.mark.parametrize(
    ("stopped", "state", "why"),
    [("done", "finished", ""), ("patience", "finished", "out of patience"), ("signal", "saved after a signal", "")],
)
def test_how_a_run_ended(place: Path, stopped: str, state: str, why: str) -> None:
    metrics = place / "slow" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"stopped": "done"', f'"stopped": "{stopped}"'))
    run = read_run(place / "slow")
    assert (run.state, run.why) == (state, why)


def test_a_run_that_went_on_after_a_signal_and_was_killed_has_died(place: Path) -> None:
    metrics = place / "slow" / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"kind": "train", "step": 9, "loss": 1.5, "seconds": 7.0}\n{"kind": "tr')
    run = read_run(place / "slow")
    assert (run.state, run.step, run.loss, run.seconds) == ("died", 9, 1.5, 7.0)
    assert run.best is not None, "of the last checkpoint"
    assert run.problems == [], "a torn last line is usual"


def test_a_rank_that_lives_makes_a_run_running_and_one_that_is_gone_does_not(place: Path) -> None:
    unfinished(place / "slow")
    (place / "slow" / beat.FOLDER).mkdir()
    pulse = beat.Beat(place / "slow" / beat.FOLDER, rank=0, world=1, timeout_s=600.0)
    assert read_run(place / "slow").state == "running"
    pulse.close("failed")
    assert read_run(place / "slow").state == "died"
    code = (
        "import sys; from pathlib import Path; from fullshard.faults.beat import Beat; "
        "Beat(Path(sys.argv[1]), rank=0, world=1, timeout_s=600.0).flush()"
    )
    subprocess.run([sys.executable, "-c", code, str(place / "slow" / beat.FOLDER)], check=True)
    run = read_run(place / "slow")
    assert (run.state, run.why) == ("died", "without a word")


def test_a_rank_on_another_machine_counts_by_its_heartbeat(place: Path) -> None:
    unfinished(place / "slow")
    (place / "slow" / beat.FOLDER).mkdir()
    pulse = beat.Beat(place / "slow" / beat.FOLDER, rank=0, world=1, timeout_s=600.0)
    pulse.describe(boot="another machine")
    assert read_run(place / "slow").state == "running"
    pulse.describe(timeout_s=-1.0)
    assert read_run(place / "slow").state == "died", "silent for longer than the run waits"
    pulse.close("failed")


@pytest.mark.parametrize(
    ("text", "state", "why"),
    [
        ("fullshard.errors.NumericalError: NaN in the loss", "stopped", "by a numerical guard"),
        ("RuntimeError: boom", "died", "see crash-2"),
    ],
)
def test_a_crash_folder_says_why(place: Path, text: str, state: str, why: str) -> None:
    unfinished(place / "slow")
    for number in (1, 2):
        (place / "slow" / f"crash-{number}").mkdir()
    (place / "slow" / "crash-2" / "rank-0.txt").write_text(text)
    run = read_run(place / "slow")
    assert (run.state, run.why) == (state, why)


def test_a_run_that_prepares_its_data_is_running(place: Path) -> None:
    shutil.rmtree(place / "slow")
    (place / "new").mkdir(parents=True)
    (place / "new" / "recipe.resolved.yaml").write_text("duration: {steps: 5}\n")
    run = read_run(place / "new")
    assert (run.state, run.why, run.steps) == ("stopped", "before step 1", 5)
    from fullshard.checkpoint.folder import claim

    with claim(place / "new"):
        assert read_run(place / "new").state == "running"


def test_steps_of_a_run_in_epochs_come_from_its_header(place: Path) -> None:
    resolved = place / "slow" / "recipe.resolved.yaml"
    resolved.write_text(resolved.read_text().replace("steps: 2", "steps: null"))
    assert read_run(place / "slow").steps == 2


@pytest.mark.parametrize("name", ["recipe.resolved.yaml", "metrics.jsonl", "log.txt", "last/state.json"])
@pytest.mark.parametrize("damage", ["empty", "binary", "other", "folder"])
def test_damaged_files_cost_only_what_they_hold(place: Path, name: str, damage: str) -> None:
    path = place / "slow" / name
    path.unlink()
    if damage == "folder":
        path.mkdir()
    else:
        path.write_bytes({"empty": b"", "binary": b"\xff\x00{[" * 50, "other": b"[1, 2, [3]]\n7\n"}[damage])
    found = rows(place)
    assert list(found) == ["slow"]
    if name == "recipe.resolved.yaml" and damage != "folder":
        assert found["slow"]["problems"] == ["recipe.resolved.yaml cannot be read"]
        assert found["slow"]["state"] == "finished"
    assert "slow" in listed(place)


def test_only_the_end_of_long_metrics_is_read(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = place / "slow" / "metrics.jsonl"
    ends = metrics.read_bytes()
    with metrics.open("wb") as file:
        file.truncate(2**33)  # holes, which take no space
        file.seek(2**33)
        file.write(b"\n" + ends)
    assert read_run(place / "slow").state == "finished"
    monkeypatch.setattr(reading, "TAIL_BYTES", 8)
    assert read_run(place / "slow").step == 0


def test_many_runs_and_folders_of_folders(place: Path) -> None:
    text = yaml.safe_dump({"optimizer": {"lr": 0.1}, "seed": 3})
    for number in range(60):
        folder = place / ("sweep" if number % 2 else ".") / f"run-{number}"
        folder.mkdir(parents=True)
        (folder / "recipe.resolved.yaml").write_text(text.replace("3", str(number)))
    (place / "notes").mkdir()
    found = rows(place)
    assert len(found) == 61
    assert "sweep/run-7" in found
    assert found["sweep/run-7"]["differs"]["seed"] == 7


def test_differences_leave_out_names_and_places() -> None:
    first = {
        "name": "a",
        "output": "x",
        "run": {"command": ["1"]},
        "optimizer": {"lr": 1, "kind": "adamw"},
        "ema": None,
    }
    second = {"name": "b", "output": "y", "run": {}, "optimizer": {"lr": 2, "kind": "adamw"}, "ema": {"decay": 0.9}}
    assert differences([first, second, {}]) == [
        {"optimizer.lr": 1, "ema": None},
        {"optimizer.lr": 2, "ema.decay": 0.9},
        {},
    ]
    assert differences([first]) == [{}]


def test_a_narrow_terminal_gets_differences_under_the_row() -> None:
    run = Run(Path("a"), state="finished", step=5, steps=5, best=0.5, best_by="min loss", best_step=4, seconds=3700.0)
    pairs = [("a\x1b[31m", run, {f"key.number_{n}": n for n in range(9)}), ("b", Run(Path("b")), {})]
    wide, narrow = table(pairs, width=300), table(pairs, width=60)
    assert wide[1].startswith("a    finished    5/5  loss 0.5 at 4")
    assert wide[1].endswith("key.number_5=5 and 3 more")
    assert "1:01:40" in wide[1]
    assert all(len(line) <= 60 for line in narrow)
    assert narrow[3].startswith("    key.number_0=0")


def test_mistakes_are_user_errors(tmp_path: Path) -> None:
    assert "there is no such folder" in listed(tmp_path / "none", code=2)
    assert "holds no run" in listed(tmp_path, code=2)
    assert os.listdir(tmp_path) == []
