"""How large the house may be: modules at the top, lines of files and of functions."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import fullshard
from fullshard.config.part import Section
from fullshard.recipe import Recipe
from tests.arch.package import FILES, PACKAGE, functions, lines, tree

SOURCES = [path for path in FILES if path.name != "__init__.py"]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_is_short_and_says_what_it_is_for(path: Path) -> None:
    assert lines(path) <= 420
    assert ast.get_docstring(tree(path)), "a file opens with its job and what it must not know"
    for name, length in functions(path):
        assert length <= 80, f"{name} has {length} lines"


def test_nine_functions_in_ten_have_at_most_20_lines() -> None:
    every = sorted(length for path in SOURCES for _, length in functions(path))
    assert every[int(len(every) * 0.9)] <= 20


def test_the_top_has_at_most_9_modules() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= 9


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
