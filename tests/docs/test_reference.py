"""The reference that the site generates names every recipe key and every command. It needs no MkDocs."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest
import typer

from fullshard.cli import app
from fullshard.commands.schema import schema
from fullshard.recipe import Recipe
from tests.docs.pages import ROOT


@pytest.fixture(scope="module")
def reference() -> Any:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "hooks" / "reference.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_key_has_a_row(reference: Any) -> None:
    page, whole = reference.recipe_page(), schema(Recipe)
    definitions = {"": whole, **whole["$defs"]}
    rows = set(re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE))
    for definition in definitions.values():
        for shape in definition.get("anyOf", [definition]):
            for key, value in shape.get("properties", {}).items():
                if key != "kind":
                    assert key in rows
                elif "const" in value:
                    assert re.search(rf"^### [\w.]+: {value['const']}\b", page, flags=re.MULTILINE)


def test_a_row_says_what_the_field_says(reference: Any) -> None:
    page = reference.recipe_page()
    assert "| `sequence_length` | whole number ≥ 2 | `1024` | The longest sample, in tokens. |" in page
    assert re.search(r"^\| `train` \| \[data\.train\]\(#source\) \| required \|", page, flags=re.MULTILINE)


def test_links_to_sections_lead_to_one(reference: Any) -> None:
    page = reference.recipe_page()
    targets = set(re.findall(r"\]\(#(\w+)\)", page))
    places = re.findall(r'<span id="(\w+)">', page)
    assert len(places) == len(set(places))
    assert targets <= set(places)


def test_every_command_and_option_is_there(reference: Any) -> None:
    page = reference.commands_page()
    whole: Any = typer.main.get_command(app)
    for name, command in whole.commands.items():
        assert f"### `fullshard {name}`" in page
        for parameter in command.params:
            if not getattr(parameter, "hidden", False):
                assert max(parameter.opts, key=len) in page or parameter.metavar in page, (name, parameter.opts)
    for name in whole.commands["recipes"].commands:
        assert f"#### `fullshard recipes {name}`" in page
