"""examples/own_loop.py: under torchrun and under accelerate launch it is the same run as in one process."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from fullshard.dist import world as worlds

SCRIPT = Path(__file__).parents[2] / "examples" / "own_loop.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
ACCELERATE = (
    *("-m", "accelerate.commands.launch", "--num_processes=2", "--num_machines=1", "--mixed_precision=no"),
    *("--dynamo_backend=no", "--multi_gpu"),  # without it accelerate starts one process on a CPU
)


def launched(launcher: tuple[str, ...], folder: Path, steps: int) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SCRIPT.parents[1]), *sys.path])}
    words = [sys.executable, *launcher, str(SCRIPT), str(folder), str(steps)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not launched(TORCHRUN, tmp_path / "ranks", 6)
    said = launched(ACCELERATE, tmp_path / "ranks", 10)
    saved = sorted(path.name for path in (tmp_path / "ranks").glob("checkpoint-*"))
    assert saved == ["checkpoint-10", "checkpoint-6"]
    assert len(list((tmp_path / "ranks" / "last").glob("*.distcp"))) == 2  # one of each rank
    try:
        runpy.run_path(str(SCRIPT))["main"](str(tmp_path / "one"), 10)
    finally:
        worlds.leave(at_exit=True)
    assert last_norm(capsys.readouterr().out) == last_norm(said)


def last_norm(said: str) -> str:
    """Of the whole gradient at step 10, which all steps before it and all ranks have shaped."""
    found = re.findall(r"^step 10  loss [\d.]+  norm ([\d.]+)$", said, flags=re.MULTILINE)
    assert len(found) == 1
    return found[0]


def test_the_example_is_short() -> None:
    code = [line for line in SCRIPT.read_text().partition("import sys")[2].splitlines() if line.strip()]
    assert len(code) <= 40
