"""benchmarks/plan.py: its list is long and differs, its recipes are valid, and it predicts without a GPU."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fullshard.recipes.read import read_recipe

FILE = Path(__file__).parents[2] / "benchmarks" / "plan.py"


def module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plan_benchmark", FILE)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_the_list_differs_in_everything_that_changes_memory(tmp_path: Path) -> None:
    benchmark = module()
    recipes = [read_recipe(benchmark.recipe(name, tmp_path)) for name in benchmark.RUNS]
    assert len(recipes) >= 20
    assert {recipe.sharding.activation_checkpointing for recipe in recipes} == {"none", "selective", "full"}
    assert {recipe.sharding.compile for recipe in recipes} == {None, False}
    assert {recipe.batch.per_device for recipe in recipes} >= {1, 2, 4, 8, 16}
    assert {recipe.data.sequence_length for recipe in recipes} >= {512, 2048, 4096, 8192}
    assert {recipe.data.pack for recipe in recipes} == {True, False}
    assert any(recipe.sharding.cpu_offload for recipe in recipes)


@pytest.mark.slow
def test_it_predicts_without_a_gpu() -> None:
    command = [sys.executable, str(FILE), "--dry", "--only", "16 x 512"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "| 1.7B, 16 x 512 | 37." in done.stdout
