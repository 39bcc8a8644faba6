"""docs/plan.md: its commands run as written, on a small model without data."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.plan.hardware import GPUS
from tests.docs.pages import ROOT, blocks
from tests.plan.test_command import settings

PAGE = (ROOT / "docs" / "plan.md").read_text()


def test_the_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(settings(batch={"per_device": 1})))
    lines = "".join(blocks("bash", PAGE)).splitlines()
    assert len(lines) == 6
    for line in lines:
        done = CliRunner().invoke(app, shlex.split(line)[1:], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        # Without a GPU nothing says how much memory a rank may take.
        assert ("Measured on a CPU" if "--measure" in line else "It fits") in done.output
    assert (tmp_path / "step.svg").exists()


def test_every_gpu_is_listed() -> None:
    named = re.findall(r"`(\w[\w-]*)`", PAGE[PAGE.index("`--gpu` takes") : PAGE.index("or the memory of any other")])
    assert sorted(named) == sorted(GPUS)
