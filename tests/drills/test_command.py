"""`fullshard prove --faults` as the page shows it: the lines it prints, the JSON, and mistakes in the list."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fullshard.drills.command import refuse_faults
from fullshard.drills.drill import Outcome
from fullshard.drills.kinds import DRILLS, chosen
from fullshard.drills.report import Report
from fullshard.errors import RecipeError
from tests.drills.page import PAGE, ROOT


def prove(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fullshard", *words]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environ, check=False)


def test_the_verdict_names_what_cannot_be_tried(capsys: pytest.CaptureFixture[str]) -> None:
    for as_json in (False, True):
        Report(as_json=as_json).end([Outcome(DRILLS[0])], facts={})
        said = " ".join(capsys.readouterr().out.split())
        assert "Not tried here, since a machine cannot do it to itself: a lost node, a cut network" in said


@pytest.mark.slow  # starts ranks five times
@pytest.mark.timeout(900)
def test_the_command_of_the_page_proves_that_a_run_recovers(tmp_path: Path) -> None:
    [line] = re.findall(r"^fullshard (prove .*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    done = prove(shlex.split(line), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    said = " ".join(done.stdout.split())  # long lines are wrapped
    assert "Breaking quickstart: 2 faults, each in a run of 6 steps on 2 ranks" in said
    assert "recovered a rank is killed (SIGKILL) in the forward pass" in said
    assert "recovered a rank raises an error while it waits for data" in said
    assert said.count("losses and weights equal those of a run without faults, bit by bit") == 2
    assert "fault resumed from weights verdict" in said
    assert "The run recovers from 2 kinds of faults" in said
    assert not list(tmp_path.rglob(".prove-*")), "the runs are removed"


@pytest.mark.slow  # starts ranks three times
@pytest.mark.faults
def test_a_run_that_does_not_recover_is_exit_code_3(tmp_path: Path) -> None:
    """An objective that counts its own micro-batches cannot resume exactly."""
    words = ["prove", "quickstart", "--faults", "--cases", "killed-forward", "--json"]
    done = prove([*words, "objective={kind: tests.prove.on_ranks.Counting}"], tmp_path)
    report = json.loads(done.stdout)
    assert done.returncode == 3, done.stderr
    assert report["recovered"] is False
    assert "step 3 has loss" in report["drills"][0]["problem"]


def test_an_unknown_fault_is_a_mistake(tmp_path: Path) -> None:
    done = prove(["prove", "quickstart", "--faults", "--cases", "killed-forwards"], tmp_path)
    assert done.returncode == 2
    assert "--cases killed-forwards: 'killed-forwards' is not a fault (did you mean 'killed-forward'?)" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_fault_without_its_option_and_no_fault_at_all_are_mistakes() -> None:
    with pytest.raises(RecipeError, match="--cases killed-save: killed-save is a fault. Add --faults to run it."):
        refuse_faults("killed-save")
    refuse_faults("resume,world")
    with pytest.raises(RecipeError, match="'' is not a fault"):
        chosen("")
