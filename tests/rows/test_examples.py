"""The scripts of examples/ start what they say."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fullshard.cli import app
from tests.rows.command_lines import FOLDERS
from tests.rows.rows import ROOT
from tests.shrunk_recipes import shrunk

EXAMPLES = ROOT / "examples"
SCENARIOS = sorted(EXAMPLES.rglob("*.sh"))
RECIPES = {"embedding": "embedding-8b", "desktop": "desktop", "staged": "llm"}
ONE_RANK = ("--devices", "1", "--nodes", "1")


def small(recipe: str, local: Path) -> list[str]:
    """The settings that make a recipe small, each key once."""
    settings = dict(setting.split("=", 1) for setting in shrunk(recipe, local))
    if recipe == "desktop":  # the scripts name their data
        del settings["data.train.episodes"]
    if recipe == "embedding-8b":  # the file does not say how records are encoded
        settings["data.encode"] = f"{{kind: pairs, image_root: {settings.pop('data.encode.image_root')}}}"
    return [f"{key}={value}" for key, value in settings.items()]


@pytest.fixture
def words_of(tmp_path: Path) -> Callable[..., list[str]]:
    """Runs a script with a `fullshard` that writes down its arguments; gives them."""
    (tmp_path / "fullshard").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "fullshard").chmod(0o755)

    def run(script: Path, *more: str, **variables: str) -> list[str]:
        environ = {**variables, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        done = subprocess.run(["bash", str(script), *more], env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


NODE = {"NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}


@pytest.mark.parametrize("script", SCENARIOS, ids=lambda script: str(script.relative_to(EXAMPLES)))
def test_a_scenario_dry_runs(
    script: Path, local: Path, words_of: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With settings appended that make it small."""
    name = script.relative_to(EXAMPLES).parts[0]
    monkeypatch.chdir(EXAMPLES / name)
    more = [*ONE_RANK, *small(RECIPES[name], local), "--dry-run"]
    words = words_of(script, *more, DATASET=str(local / "desktop.jsonl"), **NODE)
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "3 = " in result.output


@pytest.mark.parametrize("script", [path for path in SCENARIOS if "MASTER_ADDR" in path.read_text()], ids=str)
def test_a_scenario_on_several_machines_says_what_it_needs(script: Path) -> None:
    done = subprocess.run(["bash", str(script)], env={"DATASET": "x"}, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "the number of this machine, from 0" in done.stderr


def test_every_document_has_its_folder() -> None:
    for name in FOLDERS.values():
        assert list((EXAMPLES / name).rglob("*.py"))


def test_the_check_script_says_whether_all_is_ready(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    script = str(EXAMPLES / "audio" / "verify_fp16_setup.py")
    monkeypatch.setattr(sys, "argv", [script, "--quick", *small("paper_r64", local)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(script, run_name="__main__")
    said = capsys.readouterr().out
    assert ended.value.code == 0, said
    assert "Setup is CORRECT" in said
    assert "Ready to train with:\n  fullshard train paper_r64 " in said


@pytest.mark.slow
def test_the_function_returns_result_and_model(local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = runpy.run_path(str(EXAMPLES / "staged" / "src" / "nemo" / "ModularModelstage1_NTPtraining.py"))
    settings = [*small("llm", local), "topology.devices=1", "precision=fp32"]
    trainer, model = module["train_production_mode"]("model_config_1.7B", "stage1", 8, "bf16-mixed", *settings)
    assert (trainer.step, trainer.stopped) == (3, "done")
    assert sum(parameter.numel() for parameter in model.parameters()) > 0
