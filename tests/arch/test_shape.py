"""The rules of the house that a machine can check: sizes, layers, public names."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fullshard
from fullshard.config.part import Section
from fullshard.recipe import Recipe

PACKAGE = Path(fullshard.__file__).parent
FILES = sorted(p for p in PACKAGE.rglob("*.py"))
SOURCES = [p for p in FILES if p.name != "__init__.py"]
TOUR = ["recipe.py", "build.py", "loop.py", "step.py", "dist/shard.py", "objectives/causal_lm.py"]


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported(path: Path, *, top_level_only: bool = False) -> set[str]:
    names: set[str] = set()
    nodes = tree(path).body if top_level_only else list(ast.walk(tree(path)))
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_are_short_and_say_what_they_are(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400
    assert ast.get_docstring(tree(path)), "a file opens with its job and what it must not know"
    for node in ast.walk(tree(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= 80, f"{node.name} has {length} lines"


def test_the_tour_is_six_files_and_1300_lines() -> None:
    assert sum(len((PACKAGE / name).read_text().splitlines()) for name in TOUR) <= 1300


def test_collectives_live_in_dist_and_checkpoint_only() -> None:
    for path in SOURCES:
        if path.relative_to(PACKAGE).parts[0] not in ("dist", "checkpoint", "launch"):
            used = {name for name in imported(path) if name.startswith("torch.distributed")}
            assert used <= {"torch.distributed.tensor", "torch.distributed.tensor.DTensor"}, path


LOWER_LAYERS = {
    "models": ("dist", "objectives", "data", "optim", "loop", "step", "build", "run"),
    "hf": ("dist", "objectives", "data", "optim", "loop", "step", "build", "run"),
    "objectives": ("dist", "data", "optim", "checkpoint", "loop", "step", "build", "run", "models"),
    "data": ("dist", "objectives", "optim", "checkpoint", "loop", "step", "build", "run", "models"),
    "optim": ("dist", "objectives", "data", "checkpoint", "loop", "step", "build", "run"),
    "schedules": ("dist", "objectives", "data", "optim", "loop", "step", "build", "run"),
    "sinks": ("dist", "objectives", "data", "optim", "loop", "step", "build", "run"),
    "log": ("dist", "objectives", "data", "optim", "loop", "step", "build", "run", "recipe"),
    "similarity": ("dist", "objectives", "data", "optim", "models", "hf", "checkpoint", "loop", "step", "build", "run"),
    "ops": ("dist", "objectives", "data", "optim", "models", "loop", "step", "build", "run"),
    "launch": ("objectives", "data", "optim", "models", "loop", "step", "build", "run"),
}


@pytest.mark.parametrize("folder", sorted(LOWER_LAYERS))
def test_layers_do_not_look_up(folder: str) -> None:
    for path in (PACKAGE / folder).rglob("*.py"):
        for name in imported(path):
            parts = name.split(".")
            if folder == "objectives" and parts[1:3] in (["dist"], ["dist", "reduce"], ["dist", "turns"]):
                continue  # a loss over all samples of a step gathers them; it does not know how
            if folder == "objectives" and parts[1:3] == ["models", "base"]:
                continue  # the settings of a frozen model beside the trained one
            if parts[0] == "fullshard" and len(parts) > 1:
                assert parts[1] not in LOWER_LAYERS[folder], f"{path} imports {name}"


def test_nothing_below_build_takes_the_recipe() -> None:
    allowed = {
        "build.py",
        "inputs.py",
        "run.py",
        "read.py",
        "header.py",
        "placement.py",
        "spread.py",
        "feed.py",
        "on_ranks.py",
        "saving.py",
        "frozen.py",
        "cli.py",
        "recipe.py",
        "schema.py",
        "layers.py",
        "__init__.py",
    }
    for path in SOURCES:
        if path.name not in allowed and path.parent.name not in ("check", "prove", "export"):
            assert "fullshard.recipe" not in imported(path), path


def test_public_names_are_what_all_says() -> None:
    assert sorted(fullshard.__all__) == fullshard.__all__
    for name in fullshard.__all__:
        assert getattr(fullshard, name) is not None
    with pytest.raises(AttributeError):
        fullshard.no_such_name  # noqa: B018


def test_reading_recipes_and_help_needs_no_torch() -> None:
    modules = "fullshard, fullshard.cli, fullshard.recipes.read, fullshard.recipe"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_core_sections_stay_small() -> None:
    """A brake: which field did you remove?"""
    fields = len(Recipe.model_fields)
    for info in Recipe.model_fields.values():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            fields += len(info.annotation.model_fields)
    assert fields <= 80, fields


def test_every_test_file_is_collected(request: pytest.FixtureRequest) -> None:
    """pytest leaves folders with some names out, without a word; asked only when the whole suite runs."""
    if not request.config.option.file_or_dir:
        collected = {item.path for item in request.session.items}
        assert set(Path(__file__).parents[1].rglob("test_*.py")) <= collected
