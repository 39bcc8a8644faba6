"""docs/slurm.md: its commands run, its output is what they print, its options exist. tests/submit has a real Slurm."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.submit.slurm import Slurm
from tests.docs.pages import ROOT, blocks
from tests.small import model_folder, token_file

PAGE = (ROOT / "docs" / "slurm.md").read_text()
COMMANDS = [
    line.partition("  #")[0].strip()
    for block in blocks("bash", PAGE)
    for line in block.splitlines()
    if line.startswith("fullshard ")
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    model_folder(tmp_path / "model", num_hidden_layers=1)
    token_file(tmp_path / "train.jsonl", records=8)
    (tmp_path / "recipe.yaml").write_text(
        "{name: my-model, model: {path: model}, data: {train: train.jsonl, sequence_length: 64}}"
    )
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/sh\necho 42\n")
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command: str, folder: Path) -> None:
    done: Any = CliRunner().invoke(app, shlex.split(command)[1:], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    if "--dry-run" not in command and "--help-on" not in command:
        assert done.stdout.replace(str(folder), "/home/me") == blocks("text", PAGE)[0]


def test_options_exist() -> None:
    table = re.findall(r"^\| `--(no-)?([\w-]+)", PAGE, flags=re.MULTILINE)
    assert {name.replace("-", "_") for _, name in table} == Slurm.model_fields.keys() - {"passed"}
    passed = PAGE.partition("need no `--sbatch`:")[2].partition("and so on")[0]
    assert set(re.findall(r"`--([\w-]+)", passed)) <= Slurm.own_options.keys()
