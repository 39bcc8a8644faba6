"""docs/speed.md and docs/runs.md: commands are understood, and the thresholds and states are those of the code."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import typer

from fullshard.cli import app
from fullshard.faults import stragglers
from fullshard.profile import verdict
from fullshard.profile.kinds import KINDS
from fullshard.profile.recorder import STEPS
from fullshard.runs.folder import STATES
from tests.docs.pages import ROOT, blocks

SPEED, RUNS = ((ROOT / "docs" / name).read_text() for name in ("speed.md", "runs.md"))
COMMANDS = [
    line.partition(" #")[0].split() for page in (SPEED, RUNS) for b in blocks("bash", page) for line in b.splitlines()
]


@pytest.mark.parametrize("words", COMMANDS, ids=shlex.join)
def test_commands_are_understood(words: list[str]) -> None:
    whole: Any = typer.main.get_command(app)
    given = whole.commands[words[1]].make_context(words[1], words[2:]).params
    if words[1] == "train":
        assert given["profile"] == (10 if "10" in words else STEPS)
        assert list(given["settings"]) == [word for word in words if "=" in word]
    else:
        assert given["folder"] == ("FOLDER" if "FOLDER" in words else "runs")
        assert given["as_json"] == ("--json" in words)


def test_thresholds_are_those_of_the_code() -> None:
    table = SPEED.partition("| limit |")[2].partition("\n\n")[0]
    stated = [int(number) / 100 for number in re.findall(r"(\d+)%", table)]
    assert stated == [
        verdict.DATA,
        verdict.HOST,
        verdict.IDLE,
        verdict.HOST_CPU,
        verdict.UPDATE,
        verdict.MFU,
    ]
    assert f"{stragglers.WARM_UP} steps of warm-up and {stragglers.STEPS} measured ones" in SPEED


def test_kinds_and_states_are_those_of_the_code() -> None:
    shown = re.search(r"  kind of work.*?```", SPEED, re.DOTALL)
    assert shown
    assert re.findall(r"^  (\w[\w ]*?)  +[\d.,]+ ", shown[0], re.MULTILINE) == list(KINDS)
    assert set(re.findall(r"^\| ([a-z][a-z ]+) \|", RUNS, re.MULTILINE)) - {"state"} == set(STATES)
