"""The batch file of Slurm: its text, and what its last lines do. tests/submit runs it on a real Slurm."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fullshard.errors import SetupError
from fullshard.recipes.read import read
from fullshard.submit.batch_file import BatchFile
from fullshard.submit.engine import Request

HERE = Path(__file__).parent
DIRECTIVES = ("--job-name=my-model", "--nodes=4", "--time=4:00:00", "--comment=a b")


def batch_file(folder: Path, **changes: Any) -> BatchFile:
    reading = read({"name": "my-model", "model": {"architecture": "qwen3", "size": "tiny"}, "data": {"train": "x.txt"}})
    return BatchFile(Request(reading, folder, recipe_text=""), **{"directives": DIRECTIVES, "lead": 300, **changes})


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("one_task_per_node.sbatch", {"before": ("module load cuda",), "srun": ("--container-image=a b",)}),
        ("one_task_per_rank.sbatch", {"per_node": 8}),
        ("no_requeue.sbatch", {"requeue": False}),
    ],
)
def test_the_text(name: str, changes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "activate").touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "bin" / "python"))
    monkeypatch.setenv("PYTHONPATH", "/my/parts")
    text = batch_file(Path("/runs/my model/submit-1"), **changes).text().replace(str(tmp_path), "/home/me")
    assert text == (HERE / name).read_text()
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ('--comment=it\'s "me"', '--comment="it\'s \\"me\\""'),
        ("--comment=a#b", '--comment="a#b"'),
        ("--comment=a\\b", r'--comment="a\\b"'),
        ("--constraint=a100|h100", "--constraint=a100|h100"),
    ],
)
def test_an_option_reaches_sbatch_as_it_was_typed(option: str, line: str) -> None:
    assert f"#SBATCH {line}\n" in batch_file(Path("/runs"), directives=(option,)).text()


def test_an_option_cannot_bring_lines_of_its_own() -> None:
    with pytest.raises(SetupError, match="--comment: a batch file has no option of several lines"):
        batch_file(Path("/runs"), directives=("--comment=a\nrm -rf b",)).text()


def test_a_percent_in_the_path_of_the_output_is_not_a_pattern() -> None:
    assert '--output="/100%% of it/log-%j.txt"' in batch_file(Path("/100% of it")).text()


@pytest.fixture
def job(tmp_path: Path) -> Any:
    """Runs the batch file with stand-ins for Slurm's commands; says how it ended and whether it asked for a requeue."""
    (tmp_path / "run" / "submit-1").mkdir(parents=True)
    text = batch_file(tmp_path / "run" / "submit-1").text()
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, line in {
        "srun": 'if [ -n "$STEP" ]; then echo x >> "$METRICS"; fi; exit "$CODE"',
        "squeue": 'echo "$STATE"',
        "scontrol": f'case "$1" in show) echo node1;; requeue) touch {tmp_path}/requeued;; esac',
    }.items():
        (commands / name).write_text(f"#!/bin/bash\n{line}\n")
        (commands / name).chmod(0o755)

    def run(code: int, *, state: str = "RUNNING", step: bool = True) -> tuple[int, bool, str]:
        (tmp_path / "requeued").unlink(missing_ok=True)
        environ = {"PATH": f"{commands}:{os.environ['PATH']}", "SLURM_JOB_ID": "42", "SLURM_JOB_NUM_NODES": "2"}
        environ |= {"CODE": str(code), "STATE": state, "STEP": "yes" if step else ""}
        environ |= {"METRICS": str(tmp_path / "run" / "metrics.jsonl")}
        done = subprocess.run(["bash"], input=text, env=environ, text=True, capture_output=True, check=False)
        return done.returncode, (tmp_path / "requeued").exists(), done.stdout

    return run


@pytest.mark.parametrize("code", [0, 1, 2, 3, 137, 143])
def test_every_code_but_75_is_final(job: Any, code: int) -> None:
    assert job(code)[:2] == (code, False)


def test_75_requeues_unless_slurm_ends_the_job(job: Any) -> None:
    assert job(75)[:2] == (75, True)
    assert job(75, state="COMPLETING")[:2] == (75, False)


def test_three_starts_without_a_step_are_the_last(job: Any) -> None:
    assert [job(75, step=step)[1] for step in (False, False, True, False, False)] == [True] * 5
    code, requeued, said = job(75, step=False)
    assert (code, requeued) == (75, False)
    assert "not requeued: 3 starts in a row completed no step" in said
    assert job(75, step=False)[1], "submitted again it may try again"
