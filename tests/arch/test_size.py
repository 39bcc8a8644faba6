"""Size limits: modules at the top, lines of the engine, of the tour, of files and of functions."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import fullshard
from fullshard.config.part import Section
from fullshard.recipe import Recipe
from tests.arch.package import (
    FILES,
    MODULES,
    PACKAGE,
    family,
    functions,
    in_engine,
    lines,
    modules_imported,
    tree,
    unit,
)

ENGINE, PACKAGE_LINES, TOUR_LINES = 14_000, 38_968, 2_500
"""The most lines that each may have. Lower these as parts shrink, and never raise them."""
FAMILIES = ("diffusion", "embedding", "language")
COUNTED_APART = ("multimodal", "dialects", "stages", "own_loop", "submit", "faults", "autopsy", "drills")
COUNTED_APART += ("kernels", "plan", "card", "runs", "profile", "report", "fast")
"""Packages that grow with what they serve: a tower, another trainer's files, a new way to call the engine, a cluster, a
kind of fault, a kind of processor; a tool that looks at runs or describes what they made."""
SOURCES = [path for path in FILES if path.name != "__init__.py"]
TOUR = ("recipe", "build", "loop", "step", "dist.shard", "families.language.objectives.causal_lm")
"""What a newcomer reads first, with every engine module that build, loop and step import."""


def tour() -> set[str]:
    """The modules of the tour."""
    start = {f"fullshard.{name}" for name in TOUR}
    followed = [MODULES[f"fullshard.{name}"] for name in ("build", "loop", "step")]
    return start | {module for path in followed for module in modules_imported(path) if in_engine(module)}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_is_short_and_says_what_it_is_for(path: Path) -> None:
    assert lines(path) <= 400
    assert ast.get_docstring(tree(path)), "a file opens with its job and what it must not know"
    for name, length in functions(path):
        assert length <= 60, f"{name} has {length} lines"


def test_nine_functions_in_ten_have_at_most_20_lines() -> None:
    every = sorted(length for path in SOURCES for _, length in functions(path))
    assert every[int(len(every) * 0.9)] <= 20


def test_the_top_has_at_most_9_modules() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= 9


def test_the_tour_stays_short() -> None:
    read = {module: lines(MODULES[module]) for module in sorted(tour())}
    assert sum(read.values()) <= TOUR_LINES, read


def test_the_engine_stays_small() -> None:
    assert sum(lines(path) for module, path in MODULES.items() if in_engine(module)) <= ENGINE


def test_the_package_stays_small() -> None:
    """A family that is added counts for itself, and so does a dialect."""
    present = {module for module in MODULES if family(module) in ("", *FAMILIES) and unit(module) not in COUNTED_APART}
    counted = {module: lines(MODULES[module]) for module in present}
    assert sum(counted.values()) <= PACKAGE_LINES


def test_public_names_are_what_all_says() -> None:
    assert sorted(fullshard.__all__) == fullshard.__all__
    for name in fullshard.__all__:
        assert getattr(fullshard, name) is not None
    with pytest.raises(AttributeError):
        fullshard.no_such_name  # noqa: B018


def test_the_core_sections_stay_small() -> None:
    """A brake: which field did you remove?"""
    fields = len(Recipe.model_fields)
    for info in Recipe.model_fields.values():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            fields += len(info.annotation.model_fields)
    assert fields <= 80, fields
