"""`fullshard check` as a command: what it prints, in which order, for people and for machines, and what it leaves."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.contracts.launcher import Ranks
from fullshard.dist import world
from fullshard.launch.local import Local
from tests import small
from tests.check.healthy_recipe import Seed, everything, healthy_place, seed_in
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


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return healthy_place(tmp_path_factory.mktemp("healthy"))


@pytest.fixture
def seed(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Seed:
    return seed_in(tmp_path, place, monkeypatch)


def titles(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line[0].isspace() and len(line.split()) == 1]


def shell(seed: Seed, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, inside the folder."""
    command = [sys.executable, *words]
    variables = {**os.environ, "PYTHONPATH": os.getcwd(), **environ}
    return subprocess.run(command, cwd=seed.folder, env=variables, capture_output=True, text=True, check=False)


def test_sections_come_in_order_and_the_verdict_last(seed: Seed) -> None:
    result = seed.ask("check", "--quick")
    lines = result.stdout.splitlines()
    assert (result.exit_code, result.stderr) == (0, "")
    assert titles(result.stdout) == SECTIONS
    assert lines[-2] == "Setup is CORRECT; --quick skipped the trial of the model"
    assert lines[-1] == f"  fullshard train {seed.folder}/recipe.yaml"
    marked = [line for line in lines if line.startswith("  ") and not line.startswith("    ")][:-1]
    assert marked
    assert all(line.startswith("  ✓ ") for line in marked)


def test_findings_are_marked_with_where_and_what_to_do(seed: Seed) -> None:
    seed.set("optimizer", lr=10)
    seed.set("model", freeze=["nothing.*"])
    result = seed.ask("check", "--quick")
    said = " ".join(result.stdout.split())
    assert result.exit_code == 2
    assert "! learning rate optimizer.lr = 10: adamw would move" in said
    assert "usual rates are up to 0.1. Use 3e-4 for training from scratch" in said
    assert "✗ model model.freeze[0] = 'nothing.*' matches none" in said
    assert said.endswith("1 problem, 1 warning. Nothing was trained, and no files were left behind.")
    assert "Setup is CORRECT" not in said


def test_all_mistakes_are_found_at_once(seed: Seed) -> None:
    seed.set("model", freeze=["nothing.*"])
    seed.set("model", attention="flash_attention_2")
    seed.lines({"input_ids": [1, 2]}, {"input_ids": "words"})
    seed.recipe["output"] = "/proc/runs"
    seed.set("checkpoint", export="best")
    told = json.loads(seed.ask("check", "--quick", "--json").stdout)
    bad = {(f["section"], f["check"]) for f in told["findings"] if f["level"] == "error"}
    assert bad >= {("environment", "attention"), ("environment", "output"), ("recipe", "conflict"), ("model", "model")}
    assert ("data", "data") in bad


def test_the_command_keeps_settings_and_options_and_runs(seed: Seed) -> None:
    given = ["--devices", "1", "--units", "optimizer.lr=1e-3", "--output", "some where", "--name", "other"]
    kept = ["--devices", "1", "--output", "some where", "optimizer.lr=1e-3", "name=other"]
    result = seed.ask("check", "--quick", *given, "--json")
    command = json.loads(result.stdout)["command"]
    assert command == shlex.join(["fullshard", "train", f"{seed.folder}/recipe.yaml", *kept])
    dry = CliRunner().invoke(app, [*shlex.split(command)[1:], "--dry-run"], catch_exceptions=False)
    assert dry.exit_code == 0
    assert "lr: 0.001" in dry.stdout
    assert "output: some where" in dry.stdout


@pytest.mark.parametrize("mistake", [None, "a key", "a file", "a launcher"])
def test_json_is_one_object_and_nothing_else(
    mistake: str | None, seed: Seed, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    seed.module(f"talkative_{str(mistake).replace(' ', '_')}", TALKATIVE)
    seed.recipe["objective"] = {"kind": f"talkative_{str(mistake).replace(' ', '_')}.Talkative"}
    if mistake == "a key":
        seed.recipe["modell"] = 1
    elif mistake == "a file":
        seed.set("data", train="nowhere.jsonl")
    elif mistake == "a launcher":
        monkeypatch.setenv("RANK", "3")
    result = seed.ask("check", "--quick", "--json")
    told = json.loads(result.stdout)
    assert told.keys() == {"correct", "tried", "command", "findings"}
    assert (told["correct"], told["tried"], result.exit_code) == (mistake is None, False, 2 if mistake else 0)
    for finding in told["findings"]:
        assert finding.keys() == {"section", "level", "check", "text", "remedy"}
        assert finding["section"] in ("environment", "recipe", "model", "data")
    assert capfd.readouterr().out == ""


def test_units_are_those_of_the_real_run(seed: Seed, ranks: RankPool) -> None:
    seed.set("model", lora={"r": 2})
    seed.recipe["precision"] = "bf16"
    told = json.loads(seed.ask("check", "--quick", "--units", "--json", "--devices", "2").stdout)
    table = seed.ask("check", "--quick", "--units", "--devices", "2").stdout
    ranks.run(small.train, {**seed.recipe, "duration": {"steps": 1}}, world=2)
    written = json.loads((seed.folder / "runs" / "run" / "units.json").read_text())["units"]
    assert told["units"] == written
    assert "model.layers.0-2 (3 units)" in table
    assert f"{len(written)} units" in table
    assert {unit["compute"] for unit in written} >= {"bfloat16"}


def test_quick_starts_no_rank_and_the_whole_check_does(seed: Seed, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    def start(self: Local, command: list[str], ranks: Ranks) -> int:
        started.append((command, ranks))
        return 0

    monkeypatch.setattr(Local, "start", start)
    assert seed.ask("check", "--quick", "--devices", "2").exit_code == 0
    assert started == []
    assert seed.ask("check", "--devices", "2").exit_code == 0
    command, ranks = started[0]
    assert command[:4] == [sys.executable, "-m", "fullshard", "check"]
    assert ranks.per_node == 2
    assert not (seed.folder / "runs").exists()


def test_nothing_is_tried_after_a_problem(seed: Seed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Local, "start", lambda self, command, ranks: pytest.fail("ranks were started"))
    seed.set("model", freeze=["*"])
    result = seed.ask("check", "--json")
    assert (result.exit_code, json.loads(result.stdout)["tried"]) == (2, False)


def test_the_whole_check_on_a_plain_terminal(seed: Seed) -> None:
    """Two real ranks; no UTF-8; an objective of the user's own that prints."""
    seed.module("talks", TALKATIVE)
    seed.recipe["objective"] = {"kind": "talks.Talkative"}
    seed.write()
    before = everything(seed.folder)
    done = shell(seed, "-m", "fullshard", "check", "recipe.yaml", "--devices", "2", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stdout + done.stderr
    assert titles(done.stdout) == [*SECTIONS, "Trial"]
    assert done.stdout.splitlines()[-2:] == ["Setup is CORRECT", "  fullshard train recipe.yaml --devices 2"]
    assert "  ok longest batch   4 x 40 tokens forward, backward and update on every rank" in done.stdout
    assert "noise of a rank" in done.stderr
    assert "noise of a rank" not in done.stdout
    assert done.stdout.isascii()
    assert everything(seed.folder) == before


def test_under_torchrun_rank_0_tells_once(seed: Seed) -> None:
    seed.module("talks", TALKATIVE)
    seed.recipe["objective"] = {"kind": "talks.Talkative"}
    seed.write()
    before = everything(seed.folder)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = shell(seed, *launcher, "-m", "fullshard", "check", "recipe.yaml", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert (told["correct"], told["tried"]) == (True, True)
    assert told["command"] == "torchrun --standalone --nproc-per-node 2 -m fullshard train recipe.yaml"
    assert [f for f in told["findings"] if f["level"] != "ok"] == []
    assert any(f["check"] == "hosts" and f["text"].startswith("2 ranks on 1 host") for f in told["findings"])
    assert everything(seed.folder) == before


def cut(seed: Seed) -> None:
    file = seed.folder / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def test_train_looks_before_ranks_meet(seed: Seed, monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[str] = []
    join = world.join

    def meet(**keywords: Any) -> world.World:
        met.append("met")
        return join(**keywords)

    monkeypatch.setattr(world, "join", meet)
    assert seed.ask("train", "duration.steps=1", "checkpoint.at_end=false", "--name", "whole").exit_code == 0
    assert met == ["met"]
    cut(seed)
    result = seed.ask("train")
    assert (result.exit_code, met) == (2, ["met"])
    assert "weight files: " in result.stderr
    assert "model.safetensors: truncated" in result.stderr
    assert not (seed.folder / "runs" / "run").exists()


def test_train_on_two_ranks_refuses_before_they_meet(seed: Seed, capfd: pytest.CaptureFixture[str]) -> None:
    cut(seed)
    before = everything(seed.folder)
    result = seed.ask("train", "--devices", "2")
    said = result.stderr + capfd.readouterr().err  # the launcher's words, and those of the ranks
    assert result.exit_code == 2
    assert said.count("model.safetensors: truncated") == 1
    assert "Traceback" not in said
    assert everything(seed.folder) == before
