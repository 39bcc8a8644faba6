"""What pages name exists: links, files, modules, public names. The site's list of pages is complete."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import yaml

import fullshard
from tests.docs.pages import PAGES, ROOT, anchors, name_of, prose

GENERATED = {"reference/recipe.md", "reference/commands.md"}
"""Pages that docs/hooks writes when the site is built."""


def exists(module: str) -> bool:
    """Whether a dotted name is a module, or a name inside one."""
    try:
        if importlib.util.find_spec(module) is not None:
            return True
    except ModuleNotFoundError:
        pass
    home, _, name = module.rpartition(".")
    return "." in module and exists(home) and hasattr(importlib.import_module(home), name)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^()\s]+)\)", prose(page.read_text())):
        path, _, anchor = target.partition("#")
        if ":" in path:
            continue
        found = (page.parent / path).resolve() if path else page
        if found.is_relative_to(ROOT / "docs") and found.relative_to(ROOT / "docs").as_posix() in GENERATED:
            continue
        assert found.exists(), target
        assert not anchor or anchor in anchors(found.read_text()), target


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_and_modules_exist(page: Path) -> None:
    text = re.sub(r"https?://[^\s)]+", "", page.read_text())
    for path in re.findall(r"\b((?:fullshard|tests|benchmarks|docs)/[\w./-]*\w)", text):
        assert (ROOT / path).exists(), path
    for module in re.findall(r"`(fullshard(?:\.\w+)+)`", text):
        assert module == "fullshard.families" or exists(module), module


def test_the_site_lists_every_page() -> None:
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    listed = set(re.findall(r"'([\w/.-]+\.md)'", str(navigation)))
    written = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert listed >= written | GENERATED
    families = sorted(path.parent.name for path in (ROOT / "fullshard" / "families").glob("*/__init__.py"))
    assert families == sorted(page.parent.name for page in PAGES if page.parent.parent.name == "families")


def test_every_public_name_is_in_the_api_once() -> None:
    named = re.findall(r"^::: fullshard\.(\w+)$", (ROOT / "docs/reference/api.md").read_text(), flags=re.MULTILINE)
    assert sorted(named) == sorted(fullshard.__all__)
