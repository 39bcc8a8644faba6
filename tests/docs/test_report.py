"""docs/report.md: its commands work as written, and it says what the code does."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.report.page import POINTS
from tests.docs.pages import ROOT, blocks
from tests.report.run_folders import finished, train_record, write_run

PAGE = (ROOT / "docs" / "report.md").read_text()
LINES = [line.partition("  #")[0].strip() for block in blocks("bash", PAGE) for line in block.splitlines()]


@pytest.mark.parametrize("line", LINES)
def test_commands(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that serve or train are read; the others run."""
    words = shlex.split(line)[1:]
    whole: Any = typer.main.get_command(app)
    given = whole.commands[words[0]].make_context(words[0], words[1:]).params
    if words[0] == "train":
        assert (given["on_finish"], list(given["settings"])) == ("report", [])
    elif not given["serve"]:
        monkeypatch.chdir(tmp_path)
        for name in ("my-model", "second"):
            write_run(tmp_path / "runs" / name, records=[train_record(1), finished(1)])
        assert CliRunner().invoke(app, words).exit_code == 0
        assert len(list(tmp_path.rglob("*.html"))) == 1


def test_numbers() -> None:
    assert f"more than {POINTS} logged steps" in PAGE
