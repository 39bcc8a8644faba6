"""Every command line of the documents, with fullshard in place of its script, is understood and trains two steps."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.log.metrics import read as read_metrics
from tests.rows.command_lines import LINES, Line
from tests.rows.rows import FILES, ROOT
from tests.slow import only_first

FIRST_LINES = list({line.script: line for line in reversed(LINES)}.values())
"""One line for each script, which only puts the recipe before its words."""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the lines name."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "examples" / "embedding" / "examples", tmp_path / "examples")
    shutil.copy(FILES / "minimal.yaml", tmp_path / "my_fsdp_config.yaml")
    return tmp_path


def line_name(line: Line) -> str:
    return f"{line.document} {' '.join(line.ours())}"


@pytest.mark.parametrize("line", LINES, ids=line_name)
def test_a_line_dry_runs(line: Line, local: Path, project: Path) -> None:
    words = ["train", *line.ours(), *line.smaller(local), "--dry-run"]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "2 = " in result.output.partition("steps")[2], result.output


@pytest.mark.parametrize("line", only_first(LINES), ids=line_name)
def test_a_line_trains_two_steps(line: Line, local: Path, project: Path) -> None:
    words = [*line.ours(), *line.smaller(local), "output=out", "name=two"]
    trains(["-m", "fullshard", "train", *words], project)


@pytest.mark.slow
@pytest.mark.parametrize("line", FIRST_LINES, ids=line_name)
def test_the_documents_own_script_trains_two_steps(line: Line, local: Path, project: Path) -> None:
    """The whole line, without the launcher's number of processes, in the folder of examples/ that has the script."""
    start = ["-m", line.script] if "-m" in line.words else [line.script]
    shutil.copytree(line.folder, project, dirs_exist_ok=True)
    small = line.smaller(local, by_script=True)
    trains([*start, *line.after_the_script, *small, f"output={project}/out", "name=two"], project)


def trains(command: list[str], folder: Path) -> None:
    """Runs a command that leaves out/two; a second stage needs the first."""
    if "stage2" in command:
        trains([word.replace("stage2", "stage1") for word in command], folder)
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    runs = list((folder / "out" / "two").rglob("metrics.jsonl"))
    assert runs
    for path in runs:
        assert max(record["step"] for record in read_metrics(path) if record["kind"] == "train") == 2
