"""`fullshard check` as a command: what it prints, in which order, for people and for machines, and what it leaves."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.contracts.launcher import Ranks
from fullshard.dist import world
from fullshard.launch.local import Local
from tests import small
from tests.check.healthy_recipe import Workspace, files_in
from tests.ranks import RankPool

SECTIONS = ["Environment", "Recipe", "Model", "Data"]
TALKATIVE = """
print("noise of a module")
from fullshard.families.language.objectives.causal_lm import CausalLM

class Talkative(CausalLM):
    def loss(self, model, batch, aux):
        print("noise of a rank")
        return super().loss(model, batch, aux)
"""


def titles(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line[0].isspace() and len(line.split()) == 1]


def shell(workspace: Workspace, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, inside the folder."""
    command = [sys.executable, *words]
    variables = {**os.environ, "PYTHONPATH": os.getcwd(), **environ}
    return subprocess.run(command, cwd=workspace.folder, env=variables, capture_output=True, text=True, check=False)


STORED = "torch.float32 (trained); compute torch.float32, reduce torch.float32"


def test_sections_come_in_order_and_the_verdict_last(workspace: Workspace) -> None:
    result = workspace.run("check", "--quick")
    lines = result.stdout.splitlines()
    assert (result.exit_code, result.stderr) == (0, "")
    assert titles(result.stdout) == SECTIONS
    assert lines[-4:] == [
        "Setup is CORRECT; --quick skipped the trial of the model",
        f"Model dtype: {STORED}; the files hold torch.float32",
        "Ready to train with:",
        f"  fullshard train {workspace.folder}/recipe.yaml",
    ]
    marked = [line for line in lines if line.startswith("  ") and not line.startswith("    ")][:-1]
    assert marked
    assert all(line.startswith("  ✓ ") for line in marked)


def test_a_section_without_findings_has_no_heading(workspace: Workspace) -> None:
    workspace.set("data", train=str(workspace.folder / "missing.jsonl"))
    assert titles(workspace.run("check", "--quick").stdout) == ["Environment", "Recipe", "Data"]


def test_findings_are_marked_with_where_and_what_to_do(workspace: Workspace) -> None:
    workspace.set("optimizer", lr=10)
    workspace.set("model", freeze=["nothing.*"])
    result = workspace.run("check", "--quick")
    said = " ".join(result.stdout.split())
    assert result.exit_code == 2
    assert "! learning rate optimizer.lr = 10: adamw would move" in said
    assert "usual rates are up to 0.1. Use 3e-4 for training from scratch" in said
    assert "✗ model model.freeze[0] = 'nothing.*' matches no parameter" in said
    assert said.endswith("1 problem, 1 warning. Nothing was trained, and no files were left behind.")
    assert "Setup is CORRECT" not in said


def test_all_mistakes_are_found_at_once(workspace: Workspace) -> None:
    workspace.set("model", freeze=["nothing.*"])
    workspace.set("model", attention="varlen")
    workspace.write_records({"input_ids": [1, 2]}, {"input_ids": "words"})
    workspace.recipe["output"] = "/proc/runs"
    workspace.set("checkpoint", export="best")
    report = json.loads(workspace.run("check", "--quick", "--json").stdout)
    bad = {(f["section"], f["check"]) for f in report["findings"] if f["level"] == "error"}
    assert bad >= {("environment", "attention"), ("environment", "output"), ("recipe", "conflict"), ("model", "model")}
    assert ("data", "data") in bad


def test_the_command_keeps_settings_and_options_and_runs(workspace: Workspace) -> None:
    given = ["--devices", "1", "--units", "optimizer.lr=1e-3", "--output", "some where", "--name", "other"]
    kept = ["--devices", "1", "--output", "some where", "optimizer.lr=1e-3", "name=other"]
    result = workspace.run("check", "--quick", *given, "--json")
    command = json.loads(result.stdout)["command"]
    assert command == shlex.join(["fullshard", "train", f"{workspace.folder}/recipe.yaml", *kept])
    dry = CliRunner().invoke(app, [*shlex.split(command)[1:], "--dry-run"], catch_exceptions=False)
    assert dry.exit_code == 0
    assert "lr: 0.001" in dry.stdout
    assert "output: some where" in dry.stdout


@pytest.mark.parametrize("mistake", [None, "a key", "a file", "a launcher"])
def test_json_is_one_object_and_nothing_else(
    mistake: str | None, workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    workspace.write_module(f"talkative_{str(mistake).replace(' ', '_')}", TALKATIVE)
    workspace.recipe["objective"] = {"kind": f"talkative_{str(mistake).replace(' ', '_')}.Talkative"}
    if mistake == "a key":
        workspace.recipe["modell"] = 1
    elif mistake == "a file":
        workspace.set("data", train="nowhere.jsonl")
    elif mistake == "a launcher":
        monkeypatch.setenv("RANK", "3")
    result = workspace.run("check", "--quick", "--json")
    report = json.loads(result.stdout)
    assert report.keys() == {"correct", "tried", "command", "findings"}
    assert (report["correct"], report["tried"], result.exit_code) == (mistake is None, False, 2 if mistake else 0)
    for finding in report["findings"]:
        assert finding.keys() == {"section", "level", "check", "text", "remedy"}
        assert finding["section"] in ("environment", "recipe", "model", "data")
    assert capfd.readouterr().out == ""


def test_units_are_those_of_the_real_run(workspace: Workspace, ranks: RankPool) -> None:
    workspace.set("model", lora={"r": 2})
    workspace.recipe["precision"] = "bf16"
    report = json.loads(workspace.run("check", "--quick", "--units", "--json", "--devices", "2").stdout)
    table = workspace.run("check", "--quick", "--units", "--devices", "2").stdout
    ranks.run(small.train, {**workspace.recipe, "duration": {"steps": 1}}, world=2)
    written = json.loads((workspace.folder / "runs" / "run" / "units.json").read_text())["units"]
    assert report["units"] == written
    assert "model.layers.0-2 (3 units)" in table
    assert f"{len(written)} units" in table
    assert {unit["compute"] for unit in written} >= {"bfloat16"}


def test_quick_starts_no_rank_and_the_whole_check_does(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    def start(self: Local, command: list[str], ranks: Ranks) -> int:
        started.append((command, ranks))
        return 0

    monkeypatch.setattr(Local, "start", start)
    assert workspace.run("check", "--quick", "--devices", "2").exit_code == 0
    assert started == []
    assert workspace.run("check", "--devices", "2").exit_code == 0
    command, ranks = started[0]
    assert command[:4] == [sys.executable, "-m", "fullshard", "check"]
    assert ranks.per_node == 2
    assert not (workspace.folder / "runs").exists()


def test_nothing_is_tried_after_a_problem(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Local, "start", lambda self, command, ranks: pytest.fail("ranks were started"))
    workspace.set("model", freeze=["*"])
    result = workspace.run("check", "--json")
    assert (result.exit_code, json.loads(result.stdout)["tried"]) == (2, False)


def test_the_whole_check_on_a_plain_terminal(workspace: Workspace) -> None:
    """Two real ranks; no UTF-8; an objective of the user's own that prints."""
    workspace.write_module("talks", TALKATIVE)
    workspace.recipe["objective"] = {"kind": "talks.Talkative"}
    workspace.write()
    before = files_in(workspace.folder)
    done = shell(workspace, "-m", "fullshard", "check", "recipe.yaml", "--devices", "2", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stdout + done.stderr
    assert titles(done.stdout) == [*SECTIONS, "Trial"]
    ending = done.stdout.splitlines()[-4:]
    assert (ending[0], ending[2:]) == (
        "Setup is CORRECT",
        ["Ready to train with:", "  fullshard train recipe.yaml --devices 2"],
    )
    assert ending[1].startswith(f"Model dtype: {STORED}")
    assert "  ok longest batch   4 x 40 tokens forward, backward and update on every rank" in done.stdout
    assert "noise of a rank" in done.stderr
    assert "noise of a rank" not in done.stdout
    assert done.stdout.isascii()
    assert files_in(workspace.folder) == before


def test_under_torchrun_only_rank_0_reports(workspace: Workspace) -> None:
    workspace.write_module("talks", TALKATIVE)
    workspace.recipe["objective"] = {"kind": "talks.Talkative"}
    workspace.write()
    before = files_in(workspace.folder)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = shell(workspace, *launcher, "-m", "fullshard", "check", "recipe.yaml", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert (report["correct"], report["tried"]) == (True, True)
    assert report["command"] == "torchrun --standalone --nproc-per-node 2 -m fullshard train recipe.yaml"
    assert [f for f in report["findings"] if f["level"] != "ok"] == []
    assert any(f["check"] == "hosts" and f["text"].startswith("2 ranks on 1 host") for f in report["findings"])
    assert files_in(workspace.folder) == before


def cut(workspace: Workspace) -> None:
    file = workspace.folder / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def test_train_checks_before_ranks_connect(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[str] = []
    join = world.join

    def meet(**keywords: Any) -> world.World:
        met.append("met")
        return join(**keywords)

    monkeypatch.setattr(world, "join", meet)
    assert workspace.run("train", "duration.steps=1", "checkpoint.at_end=false", "--name", "whole").exit_code == 0
    assert met == ["met"]
    cut(workspace)
    result = workspace.run("train")
    assert (result.exit_code, met) == (2, ["met"])
    assert "weight files: " in result.stderr
    assert "model.safetensors: truncated" in result.stderr
    assert not (workspace.folder / "runs" / "run").exists()


def test_train_on_two_ranks_refuses_before_they_connect(
    workspace: Workspace, capfd: pytest.CaptureFixture[str]
) -> None:
    cut(workspace)
    before = files_in(workspace.folder)
    result = workspace.run("train", "--devices", "2")
    said = result.stderr + capfd.readouterr().err  # the launcher's words, and those of the ranks
    assert result.exit_code == 2
    assert said.count("model.safetensors: truncated") == 1
    assert "Traceback" not in said
    assert files_in(workspace.folder) == before
