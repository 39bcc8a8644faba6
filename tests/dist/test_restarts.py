"""Ranks that fail are started again, and the run equals one in which nothing failed, bit by bit."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from fullshard.contracts.launcher import Ranks
from fullshard.faults import orphans
from fullshard.launch.local import Local
from fullshard.log.metrics import FILE, last_step, read
from tests.dist.restarted_runs import ROOT, assert_equal_runs, environ, inputs, restarts, settings, train
from tests.near import assert_near
from tests.small import curve

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return inputs(tmp_path_factory.mktemp("restarts"))


@pytest.fixture(scope="module")
def straight(folder: Path) -> Path:
    done, run = train(folder, "straight")
    assert done.returncode == 0, done.stderr
    return run


def test_a_killed_rank_costs_a_restart_and_nothing_else(folder: Path, straight: Path) -> None:
    fault = {"do": "kill", "rank": 1, "step": 4, "attempt": 0}
    done, run = train(folder, "killed", "--restarts", "2", faults=[fault])
    assert done.returncode == 0, done.stderr
    assert (
        "Restart 1 of 2: rank 1 was ended by SIGKILL in step 4. All 2 ranks start again from the newest complete "
        "checkpoint; 1 restart is left.\n" in done.stderr
    )
    assert f"Resuming from {run / 'checkpoint-3'}, whose files are complete." in done.stdout.replace("\n", " ")
    assert_equal_runs(run, straight)
    [noted] = restarts(run)
    assert (noted["step"], noted["restart"], noted["of"], noted["rank"], noted["failed_step"]) == (3, 1, 2, 1, 4)
    assert noted["why"] == "rank 1 was ended by SIGKILL in step 4"
    assert [path.name for path in run.glob("crash-*")] == ["crash-1"]


CHAIN = [
    # What, on which rank, in which step; None: while the rank starts. The drills have the other faults.
    ("start", 1, None),
    ("kill", 0, 2),
    ("start", 0, None),
    ("save", 1, 6),
    ("segfault", 0, 8),
]


@pytest.mark.slow
def test_many_faults_in_a_row(folder: Path, straight: Path) -> None:
    """Also: `--resume never` starts over once, although the first attempt ends before it could."""
    faults = [
        {"do": do, "rank": rank, "attempt": attempt} | ({"step": step} if step else {})
        for attempt, (do, rank, step) in enumerate(CHAIN)
    ]
    short = {"duration": {"steps": 2}, "optimizer": {"lr": 1e-3}, "data": {"shuffle": False}}
    assert train(folder, "chain", sections=short)[0].returncode == 0
    done, run = train(folder, "chain", "--resume", "never", "--restarts", str(len(CHAIN)), faults=faults)
    assert done.returncode == 0, done.stderr
    assert_equal_runs(run, straight)
    assert done.stdout.count("Starting over: the earlier run is kept in") == 1
    found = restarts(run)
    assert [record["restart"] for record in found] == list(range(1, len(CHAIN) + 1))
    assert [(record["rank"], record["failed_step"]) for record in found] == [(rank, step) for _, rank, step in CHAIN]
    # A rank that dies while it starts leaves no folder; every other attempt has its own.
    crashes = sorted(run.glob("crash-*"), key=lambda path: int(path.name[6:]))
    assert len(crashes) >= len([step for _, _, step in CHAIN if step]), crashes
    assert len({(path / "start.txt").read_text() for path in crashes}) == len(crashes)


@pytest.mark.slow
def test_the_same_step_twice_stops_the_run(folder: Path) -> None:
    done, run = train(folder, "twice", "--restarts", "5", faults=[{"do": "forward", "rank": 0, "step": 3}])
    assert done.returncode == 1
    assert done.stderr.count("Restart 1 of 5: rank 0 ended with exit code 1 (RuntimeError: a fault in forward)") == 1
    assert "Restart 2" not in done.stderr
    assert "This is the second failure in step 3 (the first one led to restart 1)" in done.stderr
    assert {path.name for path in run.glob("crash-*")} == {"crash-1", "crash-2"}


@pytest.mark.slow
@pytest.mark.parametrize(("do", "code"), [("mistake", 2), ("guard", 3)])
def test_a_mistake_and_a_guard_are_final(folder: Path, do: str, code: int) -> None:
    done, run = train(folder, do, "--restarts", "5", faults=[{"do": do, "rank": 1, "step": 2}])
    assert done.returncode == code
    assert "Restart" not in done.stderr
    assert restarts(run) == []


@pytest.mark.slow
def test_a_single_rank_is_restarted_too(folder: Path) -> None:
    alone = {"topology": {"device": "cpu", "devices": 1, "restarts": 1}, "duration": {"steps": 3}}
    done, run = train(folder, "alone", sections=alone, faults=[{"do": "kill", "rank": 0, "step": 2, "attempt": 0}])
    assert done.returncode == 0, done.stderr
    assert "The rank starts again from the newest complete checkpoint; 0 restarts are left." in done.stderr
    assert last_step(run / FILE) == 3


@pytest.mark.slow
def test_a_stage_is_restarted_where_it_was(folder: Path) -> None:
    stages = {"stages": [{"name": "first", "duration": {"steps": 3}}, {"name": "second", "duration": {"steps": 4}}]}
    runs = []
    for name, faults in (("plain", []), ("restarted", [{"do": "kill", "rank": 1, "step": 4, "attempt": 0}])):
        done, run = train(folder, name, "--restarts", "1", sections=stages, faults=faults)
        assert done.returncode == 0, done.stderr
        runs.append(run)
    assert done.stderr.count("Restart 1 of 1: rank 1 was ended by SIGKILL in step 4") == 1
    assert_equal_runs(runs[1] / "second", runs[0] / "second", steps=4)
    assert (restarts(runs[1] / "first"), len(restarts(runs[1] / "second"))) == ([], 1)


class Shrinking(Local):
    """A machine on which half of the GPUs fail."""

    def ranks_left(self, ranks: Ranks) -> Ranks:
        return replace(ranks, per_node=ranks.per_node // 2)


@pytest.mark.slow
def test_a_run_continues_on_the_gpus_that_are_left(folder: Path) -> None:
    # Dropout draws other noise on another number of ranks.
    without: dict[str, Any] = {"model": {"overrides": {"attention_dropout": 0.0}}, "duration": {"steps": 6}}
    whole, straight = train(folder, "whole", sections=without)
    assert whole.returncode == 0, whole.stderr
    shrinking = {"device": "cpu", "devices": 2, "launcher": {"kind": "tests.dist.test_restarts.Shrinking"}}
    fault = {"do": "kill", "rank": 1, "step": 4, "attempt": 0}
    done, run = train(folder, "fewer", "--restarts", "2", faults=[fault], sections={**without, "topology": shrinking})
    assert done.returncode == 0, done.stderr
    assert "in step 4. 1 GPU of 2 is left. The rank starts again" in done.stderr
    ours, theirs = ([row[0] for row in curve(read(each / FILE), "loss")] for each in (run, straight))
    assert len(ours) == len(theirs)
    assert ours[:3] == theirs[:3]
    assert_near(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("faults", [[], [{"do": "sleep", "rank": 1, "step": 3}]], ids=["training", "hanging"])
def test_a_killed_launcher_leaves_no_process_behind(folder: Path, faults: list[dict[str, Any]]) -> None:
    name = f"orphans-{len(faults)}"
    file, metrics = folder / f"{name}.yaml", folder / "runs" / name / FILE
    file.write_text(json.dumps(settings(folder, name, duration={"steps": 100_000})))
    command = [sys.executable, "-m", "fullshard", "train", str(file), "--restarts", "3"]
    silent: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
    launcher = subprocess.Popen(command, cwd=ROOT, env=environ(faults), **silent)
    try:
        while not (metrics.exists() and (last_step(metrics) or 0) >= 2):
            assert launcher.poll() is None
            time.sleep(0.1)
        started = psutil.Process(launcher.pid).children(recursive=True)
        assert len(started) >= 4, "two ranks, each with a data worker"
        launcher.kill()
        launcher.wait()
        _, alive = psutil.wait_procs(started, timeout=60)  # on a machine under load everything takes longer
        assert alive == []
        assert orphans.EVERY_S + orphans.GRACE_S < 10
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
