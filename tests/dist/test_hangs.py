"""Real ranks that hang in every way: the words name the rank, the place and the collective, and the run ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fullshard.faults import beat
from tests.dist.hung_runs import ENDS, hangs, settings
from tests.small import model_folder, token_file

ROOT = Path(__file__).parents[2]
SAYS = {
    "data": r"Rank 1 is in the data loader \(hanging_parts\.py:\d+ read\)",
    "gil": r"Rank 1 is in native code that holds the GIL, called at hanging_parts\.py:\d+ hold_the_gil, while comp",
    "stop": r"Rank 1 is stopped \(process \d+, by SIGSTOP or a debugger\) while computing step",
    "slow": r"Rank 1 is in the data loader \(hanging_parts\.py:\d+ read\)",
    "mismatch": r"Rank 1 has waited in the all-reduce called at hanging_parts\.py:\d+ misbehave for \d+ s",
}
WAITS = {
    "data": r"Rank 0 has waited in the all-reduce called at fullshard/step\.py:\d+ train_step for \d+ s",
    "slow": r"Rank 0 has waited in the all-reduce called at fullshard/step\.py:\d+ train_step for \d+ s",
}
GATHERS = r"Rank 0 has waited in the all-gather of unit \(root\) in the forward pass for \d+ s"
DIFFERENT = (
    r"The ranks are in different collectives.* rank 0: all-gather of unit \(root\) at hanging_parts\.py:\d+ loss; "
    r"rank 1: all-reduce at hanging_parts\.py:\d+ misbehave\."
)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    path = tmp_path_factory.mktemp("hangs")
    command = [sys.executable, "-m", "tests.dist.hung_runs", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, dict[str, Any]] = json.loads((path / "ends.json").read_text())
    return found


@pytest.mark.parametrize("kind", SAYS)
def test_the_command_names_rank_place_and_collective_while_it_hangs(ends: dict[str, dict[str, Any]], kind: str) -> None:
    said = ends[kind]["said"]
    assert ends[kind]["code"] == 1, said
    assert said.startswith("The run stands still at step 3: no rank has moved for "), said
    assert re.search(SAYS[kind], said), said
    assert re.search(WAITS.get(kind, GATHERS), said), said
    assert re.search(DIFFERENT if kind == "mismatch" else r"Rank 1 keeps the others waiting\.", said), said
    assert "It ends by itself after" in said
    if kind == "stop":
        assert re.search(r"`kill -CONT \d+` lets rank 1 continue\.", said), said


@pytest.mark.parametrize("kind", ENDS)
def test_the_run_ends_with_the_words_on_the_console_and_in_the_crash_folder(
    ends: dict[str, dict[str, Any]], kind: str
) -> None:
    end = ends[f"{kind}-ends"]
    assert all(code not in (None, 0, 2, 3, 75) for code in end["codes"]), end
    assert end["log"].count("The run hangs at step 3") == 1, end["log"]
    for words in (end["log"], end["after"]):
        assert re.search(SAYS[kind], words), words
        assert re.search(WAITS.get(kind, GATHERS), words), words
    assert "The ranks end. The same command continues from the last checkpoint." in end["log"]
    assert {"autopsy.txt", "rank-0.stacks.txt", "rank-0.flight.json"} <= set(end["crash"])
    assert ("rank-1.stacks.txt" in end["crash"]) == (kind != "stop"), "a stopped process writes nothing"
    assert ("rank-1.flight.json" in end["crash"]) == (kind in ("data", "mismatch"))


def test_a_killed_rank_is_named(ends: dict[str, dict[str, Any]]) -> None:
    assert ends["kill"]["code"] == 1
    assert re.search(
        r"Rank 1 was last computing step 3, .*; its process \d+ ended without a word", ends["kill"]["said"]
    )
    assert "Rank 0 lost another rank." in ends["kill"]["said"]


def test_a_slow_source_is_not_ended(ends: dict[str, dict[str, Any]]) -> None:
    assert ends["slow"]["codes"] == [0, 0], ends["slow"]["log"]
    assert "is not running: it has finished, at step 6." in ends["slow"]["after"]


def test_a_run_that_moves_is_left_alone(ends: dict[str, dict[str, Any]]) -> None:
    assert ends["healthy"]["code"] == 0
    assert re.search(r"runs: it is at step \d+, and all 2 ranks move; the last sign of life", ends["healthy"]["said"])
    assert "is not running: it was stopped by a signal and saved, at step" in ends["healthy"]["after"]


def test_ctrl_backslash_asks_and_the_launcher_reports_the_hang(tmp_path: Path) -> None:
    """Through the command itself, with data from a worker process; afterwards the same command finishes the run."""
    model_folder(tmp_path / "model")
    token_file(tmp_path / "train.jsonl", records=90)
    recipe = settings(tmp_path, "data")
    recipe["topology"] |= {"devices": 2, "timeout_s": 30}
    recipe["data"]["workers"] = 1
    recipe["duration"]["steps"] = 24  # a worker reads some steps ahead
    file, run = tmp_path / "data.yaml", tmp_path / "runs" / "data"
    file.write_text(json.dumps(recipe))
    command = [sys.executable, "-m", "fullshard", "train", str(file)]
    hanging = os.environ | {"HANG": "data:1", "HANG_LOG": str(run / "metrics.jsonl")}
    with subprocess.Popen(command, cwd=ROOT, env=hanging, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not hangs(run, "data"):
            time.sleep(0.2)
        processes = [reading.facts["process"] for reading in beat.read_all(run / "watch").values()]
        process.send_signal(signal.SIGQUIT)
        said = process.communicate(timeout=400)[1]
    assert process.returncode == 1, said
    by_hand, _, at_end = said.partition("The run hangs at step")
    where = r"Rank 1 is in the data loader \(hanging_parts\.py:\d+ read, in a worker process\)"
    assert "Where the ranks are (SIGQUIT):" in by_hand, said
    for words in (by_hand, at_end):
        assert re.search(where, words), said
        assert re.search(WAITS["data"], words), said
    assert at_end.rstrip().endswith(f"Crash folder: {run / 'crash-1'}"), said
    assert not any(Path(f"/proc/{number}").exists() for number in processes)
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert again.returncode == 0, again.stderr
    assert "Resuming from" in again.stdout
