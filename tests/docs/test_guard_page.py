"""docs/guard.md: its command is understood, its settings are the section, and its numbers are those of the code."""

from __future__ import annotations

import shlex

import yaml
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.faults.guard import Guard
from fullshard.faults.stragglers import SHARE, STEPS
from fullshard.faults.watch import LEFT_OUT
from tests.docs.pages import ROOT, blocks

PAGE = (ROOT / "docs" / "guard.md").read_text(encoding="utf-8")


def test_the_command_runs() -> None:
    [command] = [line for block in blocks("bash", PAGE) for line in block.splitlines()]
    result = CliRunner().invoke(app, [*shlex.split(command)[1:], "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "not_finite: skip" in result.output


def test_the_section_has_every_key_and_its_default() -> None:
    [block] = blocks("yaml", PAGE)
    shown = yaml.safe_load(block)["guard"]
    assert Guard(**shown)
    assert shown.keys() == Guard.model_fields.keys()
    usual = Guard()
    assert {key: shown[key] for key in ("threshold", "window", "limit")} == usual.model_dump(
        include={"threshold", "window", "limit"}
    )
    assert (usual.not_finite, usual.spike) == ("stop", None)
    assert "stop (the default)" in block
    assert "null (the default)" in block


def test_the_numbers_are_those_of_the_code() -> None:
    assert f"Every {STEPS} steps" in PAGE
    assert f"at least {100 * SHARE:.0f}% slower" in PAGE
    assert f"`{LEFT_OUT}`" in PAGE
