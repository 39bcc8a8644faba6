"""The engine and the tools ask parts through their contracts: nothing outside families depends on a part's kind."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.arch.package import FILES, PACKAGE

OUTSIDE = [path for path in FILES if path.relative_to(PACKAGE).parts[0] != "families"]
SETTINGS = ("model", "objective", "optimizer", "schedule")
"""Sections of a recipe that are parts."""


def sniffing(tree: ast.AST) -> Iterator[str]:
    """Comparisons of `x.kind()`, and getattr or hasattr of a part of a recipe."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            # `"." in part.kind()` asks who wrote a part, not which one it is.
            equal = isinstance(node.ops[0], ast.Eq | ast.NotEq)
            for side in (node.left, *(node.comparators if equal else ())):
                called = side.func if isinstance(side, ast.Call) else None
                if isinstance(called, ast.Attribute) and called.attr == "kind":
                    yield ast.unparse(node)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            of = node.args[0]
            if isinstance(of, ast.Attribute) and of.attr in SETTINGS and ast.unparse(of.value).endswith("recipe"):
                yield ast.unparse(node)


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_code_outside_families_checks_a_parts_kind(path: Path) -> None:
    assert list(sniffing(ast.parse(path.read_text(encoding="utf-8")))) == []


def test_the_check_finds_the_known_forms_of_sniffing() -> None:
    assert list(sniffing(ast.parse('recipe.optimizer.kind() == "adamw_8bit"')))
    assert list(sniffing(ast.parse('getattr(self.recipe.model, "lora", None)')))
    assert not list(sniffing(ast.parse("print(recipe.optimizer.kind())")))
