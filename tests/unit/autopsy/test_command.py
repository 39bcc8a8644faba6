"""What `fullshard autopsy` says about runs that cannot be asked: gone, finished, never there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fullshard.autopsy import command
from fullshard.cli import app
from fullshard.explain import crash
from fullshard.faults import evidence
from fullshard.faults.beat import FOLDER, Beat


def call(run: Path | str, *options: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["autopsy", str(run), *options])
    return done.exit_code, done.output


def ended(run: Path, *, rank: int = 0, how: str | None = None, **facts: Any) -> None:
    """The heartbeat of a rank whose process has ended."""
    (run / FOLDER).mkdir(parents=True, exist_ok=True)
    pulse = Beat(run / FOLDER, rank=rank, world=2, timeout_s=600)
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pulse.describe(units=["(root)"], process=process.pid, born="1", **facts)
    pulse.enter("compute", 6)
    if how:
        pulse.close(how)


@pytest.fixture
def pulse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Beat:
    """The heartbeat of a rank that runs: this process, which nobody asks with a signal."""
    (tmp_path / FOLDER).mkdir()
    monkeypatch.setattr(command, "_LOOK_S", 0.0)
    monkeypatch.setattr(evidence, "ask", lambda *_, wait_s: 0.0)
    return Beat(tmp_path / FOLDER, rank=0, world=1, timeout_s=600)


def test_a_run_that_is_not_there(tmp_path: Path) -> None:
    code, said = call(tmp_path / "none")
    assert code == 2
    assert said.startswith(f"Error: {tmp_path}/none: there is no such run folder")
    assert "Traceback" not in said


def test_a_step_that_takes_longer_than_the_look_is_no_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pulse: Beat
) -> None:
    pulse.enter("data", 6)
    assert call(tmp_path)[0] == 1

    def answers(*_: Any, wait_s: float) -> float:
        pulse.enter("compute")
        return 0.0

    monkeypatch.setattr(evidence, "ask", answers)
    code, said = call(tmp_path)
    assert code == 0
    assert f"{tmp_path} runs: it is at step 7, and its rank moves" in said


@pytest.mark.parametrize(("steps", "end"), [(1, "It does not end by itself: "), (2, "It ends by itself after 10 min ")])
def test_the_first_step_may_take_as_long_as_it_needs(tmp_path: Path, pulse: Beat, steps: int, end: str) -> None:
    for step in range(steps):
        pulse.enter("data", step)
        pulse.enter("compute")
    code, said = call(tmp_path)
    assert code == 1
    assert end in said


def test_a_name_is_looked_up_in_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    code, said = call("mine")
    assert code == 2
    assert "runs/mine is not running and has left neither a heartbeat nor a crash folder." in said


@pytest.mark.parametrize(
    ("stopped", "said"),
    [("done", "it has finished, at step 7."), ("signal", "it was stopped by a signal and saved, at step 7.")],
)
def test_a_run_that_ended_well(tmp_path: Path, stopped: str, said: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"event": "finished", "step": 7, "stopped": stopped}) + "\n")
    assert call(tmp_path) == (0, f"{tmp_path} is not running: {said}\n")


def test_a_killed_rank_and_its_victim(tmp_path: Path) -> None:
    ended(tmp_path, rank=0, how="failed")
    ended(tmp_path, rank=1)
    crash.write(RuntimeError("Connection closed by peer"), folder=tmp_path, rank=0, world=2)
    code, said = call(tmp_path)
    assert code == 1
    assert "Rank 0 was last computing step 7; it ended with an error." in said
    assert "Rank 1 was last computing step 7; its process" in said
    assert "ended without a word: it was killed." in said
    assert "Rank 0 lost another rank." in said
    assert said.endswith(f"Crash folder: {tmp_path}/crash-1\n")


def test_a_rank_that_its_timer_ended_is_placed(tmp_path: Path) -> None:
    ended(tmp_path, rank=0)
    stack = (
        'Timeout (0:10:10)!\nThread 0x00007f01 (most recent call first):\n  File "/home/me/my_op.py", line 9 in run\n'
    )
    (tmp_path / FOLDER / "rank-0.stacks.txt").write_text(stack)
    assert "its watchdog ended it in native code that held the GIL, called at my_op.py:9 run." in call(tmp_path)[1]


def test_json_is_for_machines(tmp_path: Path) -> None:
    ended(tmp_path, rank=1, how="failed")
    code, said = call(tmp_path, "--json")
    assert code == 1
    [rank] = json.loads(said)["ranks"]
    assert (rank["rank"], rank["state"], rank["step"], rank["waits_in"]) == (1, "failed", 6, None)
