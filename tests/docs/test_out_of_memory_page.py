"""docs/out-of-memory.md: its command is understood, its settings are keys, and its sentences are those of the code."""

from __future__ import annotations

import shlex

import yaml
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.faults.micro_batch import USUAL
from fullshard.recipe import Batch
from tests.docs.pages import ROOT, blocks

PAGE = (ROOT / "docs" / "out-of-memory.md").read_text(encoding="utf-8")


def test_the_command_is_understood() -> None:
    [command] = [line for block in blocks("bash", PAGE) for line in block.splitlines()]
    result = CliRunner().invoke(app, [*shlex.split(command)[1:], "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "per_device: auto" in result.output


def test_the_settings_are_those_of_the_section() -> None:
    [block] = blocks("yaml", PAGE)
    assert Batch(**yaml.safe_load(block)["batch"]).on_oom == "split"
    assert Batch().on_oom == "stop"
    assert Batch().per_device == USUAL
    assert f"the largest number up to {USUAL}" in PAGE.replace("\n", " ")
