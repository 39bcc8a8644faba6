"""Ranks killed in the middle of a save, thirty times in one run: a complete checkpoint always remains, and the result
is the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard.checkpoint.reader import open_tensors
from fullshard.log.metrics import FILE, read
from tests.small import curve

KILLS, STEPS = 30, 20
pytestmark = pytest.mark.timeout(600)  # half a minute on two free cores


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A straight run, and one that was killed in its saves until it was let to its end."""
    path = tmp_path_factory.mktemp("kill")
    command = [sys.executable, "-m", "tests.dist.killed_runs", str(path), str(KILLS), str(STEPS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    return path


@pytest.fixture(scope="module")
def lives(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "lives.json").read_text())["lives"]
    return found


@pytest.mark.slow
def test_thirty_kills_happened_and_most_of_them_during_a_save(lives: list[dict[str, Any]]) -> None:
    kills = [life for life in lives if life["killed"]]
    assert len(kills) == KILLS, lives
    assert sum(life["inside"] for life in kills) > KILLS / 2, lives
    for kind in ("asynchronous", "format", "victims"):
        assert len({str(life[kind]) for life in kills if life["inside"]}) >= 2, kind


@pytest.mark.slow
def test_a_complete_checkpoint_always_remains(lives: list[dict[str, Any]]) -> None:
    first = next(life["number"] for life in lives if life["published"])
    for life in lives[first:]:
        assert life["published"], life
        assert life["problems"] == [], life
        assert life["last"] in life["published"], life
    steps = [int(life["last"].rpartition("-")[2]) for life in lives[first:]]
    assert steps == sorted(steps), "no life goes back behind what an earlier one had saved"


@pytest.mark.slow
def test_a_rank_that_lost_the_other_ends_on_its_own(lives: list[dict[str, Any]]) -> None:
    assert [life for life in lives if life["stuck"]] == []


@pytest.mark.slow
def test_the_killed_run_equals_an_uninterrupted_one(folder: Path) -> None:
    keys = ("step", "loss", "grad_norm", "lr", "samples", "tokens")
    straight, killed = (folder / "runs" / name for name in ("straight", "killed"))
    found = curve(read(killed / FILE), *keys)
    assert [row[0] for row in found] == list(range(1, STEPS + 1)), (folder / "end.txt").read_text()
    assert found == curve(read(straight / FILE), *keys)
    ours, theirs = (open_tensors(run / f"checkpoint-{STEPS}") for run in (killed, straight))
    assert ours.names() == theirs.names()
    for name in theirs.names():
        assert torch.equal(ours.whole(name), theirs.whole(name)), name
    exported = [(run / "model" / "model.safetensors").read_bytes() for run in (killed, straight)]
    assert exported[0] == exported[1]


@pytest.mark.slow
def test_nothing_unfinished_is_left_at_the_end(folder: Path) -> None:
    assert list((folder / "runs" / "killed").glob(".unfinished-*")) == []


MOMENTS = """
import os, signal, sys
from pathlib import Path
from fullshard.checkpoint import folder as files
from fullshard.checkpoint import integrity

run, left = Path(sys.argv[1]), 0

def kill(event, args):
    global left
    if event.startswith(("os.", "open", "shutil.")):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

def save(step, content):
    hidden = files.begin(run, step)
    (hidden / "tensors").write_text(content)
    described = integrity.describe(hidden, {"tensors": integrity.checksum(hidden / "tensors")})
    path = files.publish(run, step, {"step": step, "files": described})
    files.point(run, "last", path)
    files.point(run, "best", path)
    files.tidy(run, keep=1)

def check(where):
    files.recover(run)
    first = files.candidates(run)[0]
    for path in files.published(run):
        found = integrity.file_problems(path, files.read_manifest(path)["files"])
        assert not found, (where, found)
    assert files.pointed(run, "last") == first, (where, os.listdir(run))
    assert files.pointed(run, "best") in files.published(run), where

sys.addaudithook(kill)
moments, step = 0, 1
save(1, "begun")
for again in (False, True):  # a new step, and one that is saved once more
    number, code = 0, 9
    while code == 9:
        number += 1
        target = step if again else step + 1
        child = os.fork()
        if child == 0:
            left = number
            save(target, f"{number}")
            os._exit(0)
        code = os.WTERMSIG(os.waitpid(child, 0)[1])
        check((again, number))
        step = files.step_of(files.candidates(run)[0])
    moments += number - 1
    assert sorted(os.listdir(run)) == ["best", f"checkpoint-{step}", "last"], os.listdir(run)
print(moments)
"""


def test_a_kill_at_any_point_of_publishing_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    """Every call to the file system of a save, in turn, is the last one of a process."""
    command = [sys.executable, "-W", "error", "-c", MOMENTS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 40, "as many kills as two saves have calls"
