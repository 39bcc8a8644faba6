"""Jobs on a real Slurm with two nodes: run, stopped, requeued, resumed, cancelled. Every run that was interrupted ends
like the straight one, bit by bit on the same number of ranks.

No test waits for a time: each run holds in a step until Slurm has been told something.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.log.metrics import FILE, read
from tests.near import assert_near
from tests.small import curve, model_folder, recipe, token_file
from tests.submit import cluster as slurm
from tests.submit.cluster import Cluster, until
from tests.unavailable import unavailable

ROOT = Path(__file__).parents[2]
STEPS = 12
"""A run ends a step or two after it was told to stop."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if lacking := slurm.missing():
        unavailable(f"Slurm is not installed: no {', '.join(lacking)}. Run `make slurm`, as root or with sudo.")
    started = slurm.start(tmp_path_factory.mktemp("slurm"))
    yield started
    started.stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model and the data, in a folder with a space."""
    path = tmp_path_factory.mktemp("on slurm")
    model_folder(path / "model", num_hidden_layers=1)
    token_file(path / "train.jsonl", records=64)
    return path


def settings(folder: Path, name: str, **objective: Any) -> dict[str, Any]:
    run = {"folder_of_test": str(folder / name), "run": str(folder / "runs" / name)}
    return recipe(
        folder,
        name=name,
        objective={"kind": "tests.submit.held_objective.Held", **run, **objective},
        data={"shuffle": True},
        batch={"per_device": 4, "global": 8},
        duration={"steps": STEPS},
        topology={"device": "cpu", "timeout_s": 600},
    )


@pytest.fixture(scope="module")
def straight(folder: Path) -> Path:
    """The run on two ranks that nothing interrupts."""
    (folder / "straight.yaml").write_text(json.dumps(settings(folder, "straight")))
    words = [sys.executable, "-m", "fullshard", "train", str(folder / "straight.yaml"), "--devices", "2"]
    subprocess.run(words, cwd=ROOT, env=_clean(), check=True, capture_output=True, timeout=300)
    return folder / "runs" / "straight"


def _clean() -> dict[str, str]:
    return {**{key: value for key, value in os.environ.items() if key != "PYTHONPATH"}, "PYTHONPATH": str(ROOT)}


@dataclass
class Run:
    """A job that was submitted from the folder of its recipe."""

    cluster: Cluster
    test: Path
    run: Path
    number: str
    said: str

    def held(self, step: int) -> None:
        until(lambda: (self.test / f"held-{step}").exists(), f"not held: {self.log()}")

    def go(self, step: int) -> None:
        (self.test / f"go-{step}").touch()

    def log(self, job: str = "") -> str:
        path = self.run / "submit-1" / f"log-{job or self.number}.txt"
        return path.read_text() if path.exists() else ""

    def heard(self, name: str, *, times: int = 1, job: str = "") -> None:
        line = f"{name}: saving after the step in progress"
        until(lambda: self.log(job).count(line) >= times, f"no {name}: {self.log(job)}")

    def end(self, state: str) -> dict[str, str]:
        return self.cluster.wait(self.number, state)

    def stopped_at(self) -> int:
        """The step of the first save on a signal."""
        return int(self.log().partition("Stopped by a signal at step ")[2].partition(",")[0])

    def curve(self) -> list[tuple[float, ...]]:
        return curve(read(self.run / FILE), "step", "loss", "grad_norm")


@pytest.fixture
def submit(cluster: Cluster, folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    monkeypatch.chdir(folder)
    for key, value in {**cluster.environ, "PYTHONPATH": str(ROOT)}.items():
        monkeypatch.setenv(key, value)

    def submitted(name: str, *options: str, **objective: Any) -> Run:
        (folder / f"{name}.yaml").write_text(json.dumps(settings(folder, name, **objective)))
        (folder / name).mkdir()
        words = ["submit", f"{name}.yaml", "--on", "slurm", "--no-check", *options]
        done = CliRunner().invoke(app, words, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        number = done.output.partition("submitted")[2].split()[1].rstrip(",")
        run = Run(cluster, folder / name, folder / "runs" / name, number, done.output)
        request.addfinalizer(lambda: subprocess.run(["scancel", number], env=cluster.environ, check=False))
        return run

    return submitted


def assert_equal_to(straight: Path, run: Run) -> None:
    """The same losses, norms and weights, bit by bit."""
    assert run.curve() == curve(read(straight / FILE), "step", "loss", "grad_norm")
    theirs, ours = (load_file(path / "model" / "model.safetensors") for path in (straight, run.run))
    assert theirs.keys() == ours.keys()
    assert all(theirs[name].equal(ours[name]) for name in theirs)


def test_usr1_saves_requeues_and_resumes(submit: Any, straight: Path) -> None:
    run = submit("usr1", "--nodes", "2", "--devices", "1", hold=[2])
    run.held(2)
    run.cluster.call("scancel", "--signal=USR1", run.number)
    run.heard("SIGUSR1")
    run.go(2)
    ended = run.end("COMPLETED")
    assert (ended["Restarts"], ended["ExitCode"]) == ("1", "0:0")
    assert "(restarts: 0)" in run.log()
    assert "(restarts: 1)" in run.log()
    assert run.stopped_at() < STEPS
    assert_equal_to(straight, run)


@pytest.mark.slow
def test_a_preempted_job_with_one_task_for_each_rank(submit: Any, straight: Path) -> None:
    """On two nodes. Slurm sends TERM, waits and requeues by itself; the script adds no second requeue."""
    run = submit("preempted", "--tasks", "rank", "--nodes", "2", "--devices", "1", hold=[2])
    run.held(2)
    run.cluster.call("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")
    run.heard("SIGTERM")
    run.go(2)
    assert run.end("COMPLETED")["Restarts"] == "1"
    assert "fullshard: requeued" not in run.log()
    assert_equal_to(straight, run)


@pytest.mark.slow
def test_the_time_limit_saves_requeues_and_resumes(submit: Any, straight: Path) -> None:
    run = submit("limit", "--nodes", "2", "--devices", "1", "--time", "30", "--lead", "120", hold=[2])
    run.held(2)
    # Slurm counts in minutes: from now on 1 to 2 are left, less than the lead.
    hours, minutes, _ = map(int, run.cluster.job(run.number)["RunTime"].split(":"))
    run.cluster.call("scontrol", "update", f"jobid={run.number}", f"timelimit={60 * hours + minutes + 2}")
    run.heard("SIGUSR1")
    run.cluster.call("scontrol", "update", f"jobid={run.number}", "timelimit=30")
    run.go(2)
    assert run.end("COMPLETED")["Restarts"] == "1"
    assert_equal_to(straight, run)


@pytest.mark.slow
def test_scancel_saves_and_the_next_job_continues(submit: Any, straight: Path) -> None:
    run = submit("cancelled", "--nodes", "2", "--devices", "1", hold=[2, 7])
    run.held(2)
    run.cluster.call("scancel", run.number)
    run.heard("SIGTERM")
    run.go(2)
    assert run.end("CANCELLED")["Restarts"] == "0"
    assert run.stopped_at() < 7
    until(lambda: "can continue (state COMPLETING)" in run.log(), run.log())
    again = run.cluster.call("sbatch", "--parsable", str(run.run / "submit-1" / "job.sbatch"))
    run.held(7)
    run.cluster.call("scontrol", "update", f"jobid={again}", "requeue=0")
    run.cluster.call("scancel", "--signal=USR2", again)
    run.heard("SIGUSR2", job=again)
    run.go(7)
    assert run.cluster.wait(again, "FAILED")["ExitCode"] == "75:0"
    last = run.cluster.call("sbatch", "--parsable", str(run.run / "submit-1" / "job.sbatch"))
    run.cluster.wait(last, "COMPLETED")
    assert_equal_to(straight, run)


@pytest.mark.slow
def test_a_requeued_job_resumes_on_fewer_and_on_more_nodes(submit: Any, straight: Path) -> None:
    run = submit("other", "--nodes", "2", "--devices", "1", hold=[2, 7])
    for stops, (step, nodes) in enumerate(((2, "1-1"), (7, "2-2")), start=1):
        run.held(step)
        run.cluster.call("scancel", "--signal=USR1", run.number)
        run.heard("SIGUSR1", times=stops)
        run.go(step)
        run.cluster.wait(run.number, "PENDING")
        run.cluster.call("scontrol", "update", f"jobid={run.number}", f"numnodes={nodes}")
    ended = run.end("COMPLETED")
    assert ended["Restarts"] == "2"
    assert re.findall(r"world +(\d+) rank", run.log()) == ["2", "1", "2"]
    ours, theirs = run.curve(), curve(read(straight / FILE), "step", "loss", "grad_norm")
    assert [step for step, *_ in ours] == [step for step, *_ in theirs]
    assert_near([loss for _, loss, _ in ours], [loss for _, loss, _ in theirs])  # sums in another order


@pytest.mark.slow
@pytest.mark.parametrize("code", [2, 3])
def test_a_mistake_and_a_numerical_guard_are_final(submit: Any, code: int) -> None:
    run = submit(f"final-{code}", "--nodes", "2", "--devices", "1", fail=code)
    ended = run.end("FAILED")
    assert (ended["ExitCode"], ended["Restarts"]) == (f"{code}:0", "0")
    assert "on purpose." in run.log()


@pytest.mark.slow
def test_a_job_that_never_comes_to_a_step_is_not_requeued_for_ever(submit: Any) -> None:
    """Its time limit is shorter than its lead and the start of the ranks together."""
    run = submit("idle", "--devices", "1", hold=[0])
    for _ in range(3):
        run.held(0)
        (run.test / "held-0").unlink()
        run.cluster.call("scancel", "--signal=USR1", run.number)
    assert run.end("FAILED")["Restarts"] == "2"
    assert "not requeued: 3 starts in a row completed no step" in run.log()
