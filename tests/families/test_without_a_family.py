"""Deleting a family's folder and its tests leaves the rest working, as copies of the repository show."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = ("fullshard", "tests", "docs", "README.md", "CONTRIBUTING.md", "LICENSE", "pyproject.toml")
QUICK = {
    "language": [
        "tests/families/language/unit/test_causal_lm.py",
        "tests/families/language/unit/test_linear_cross_entropy.py",
    ],
    "embedding": ["tests/families/embedding/unit/test_dense.py", "tests/families/embedding/unit/test_row_layout.py"],
    "diffusion": ["tests/families/diffusion/unit/test_digits.py", "tests/families/diffusion/unit/test_keyed_noise.py"],
    "audio": ["tests/families/audio/unit/test_sounds.py", "tests/families/audio/unit/test_pronunciation.py"],
    "reasoning": ["tests/families/reasoning/unit/test_encoder.py"],
    "vision": ["tests/families/vision/unit/test_image_chat.py", "tests/families/vision/desktop/test_formats.py"],
}
"""A few tests of each family that take seconds."""
ENGINE = ["tests/unit/schedules", "tests/unit/sinks", "tests/unit/checkpoint/test_folder.py"]
IMPORT_EVERYTHING = """
import importlib, pkgutil, fullshard
for module in pkgutil.walk_packages(fullshard.__path__, "fullshard."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", QUICK)
def test_the_rest_works_without(family: str, tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    for name in CODE:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=ignored)
        else:
            shutil.copy(source, tmp_path / name)
    shutil.rmtree(tmp_path / "fullshard" / "families" / family)
    shutil.rmtree(tmp_path / "tests" / "families" / family)

    def run(*words: str) -> str:
        ran = subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, f"{words}\n{ran.stdout[-5000:]}{ran.stderr[-5000:]}"
        return ran.stdout

    run("-W", "ignore", "-c", IMPORT_EVERYTHING)
    others = sorted(QUICK.keys() - {family})
    gone = {path.stem for path in (ROOT / "fullshard" / "families" / family / "recipes").glob("*.yaml")}
    listed = {line.split()[0] for line in run("-m", "fullshard", "recipes", "list").splitlines() if line.strip()}
    assert gone
    assert not gone & listed
    for other in others:
        assert {
            path.stem for path in (tmp_path / "fullshard" / "families" / other / "recipes").glob("*.yaml")
        } <= listed
    run("-m", "fullshard", "--help")
    run("-m", "fullshard", "recipes", "schema")
    run("-m", "pytest", "-p", "no:cacheprovider", *ENGINE, *(path for other in others for path in QUICK[other]))
