"""The scripts of examples/ start what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rows.command_lines import FOLDERS
from tests.rows.rows import ROOT
from tests.shrunk_recipes import local_inputs, shrunk

EXAMPLES = ROOT / "examples"
SCENARIOS = sorted(EXAMPLES.rglob("*.sh"))
RECIPES = {"embedding": "embedding-8b", "desktop": "desktop", "staged": "llm"}
ONE_RANK = ("--devices", "1", "--nodes", "1")


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return local_inputs(tmp_path_factory.mktemp("local") / "inputs")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A search path whose `fullshard` is this tree's."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "fullshard").write_text(f'#!/bin/sh\nexec {sys.executable} -m fullshard "$@"\n')
    (folder / "fullshard").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@pytest.mark.parametrize("script", SCENARIOS, ids=lambda script: str(script.relative_to(EXAMPLES)))
def test_a_scenario_dry_runs(script: Path, local: Path, path: str, tmp_path: Path) -> None:
    """With settings appended that make it small."""
    recipe = RECIPES[script.relative_to(EXAMPLES).parts[0]]
    nodes = {"NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "DATASET": str(local / "desktop.jsonl")}
    done = subprocess.run(
        ["bash", str(script), *ONE_RANK, *shrunk(recipe, local), "--dry-run"],
        cwd=tmp_path,
        env={**os.environ, **nodes, "PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 = " in done.stdout


def test_every_document_has_its_folder() -> None:
    for name in FOLDERS.values():
        assert list((EXAMPLES / name).rglob("*.py"))


def test_the_check_script_says_whether_all_is_ready(local: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "audio" / "verify_fp16_setup.py"), "--quick", *shrunk("paper_r64", local)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Setup is CORRECT" in done.stdout
    assert "Ready to train with:" in done.stdout
