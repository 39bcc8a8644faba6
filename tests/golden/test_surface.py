"""Every recipe key, choice, command and option of the stored surface still exists."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fullshard
from tests.golden import make

FOLDER = Path(__file__).parent
MINIMAL: dict[str, Any] = {"model": "a/model", "data": {"train": "a.jsonl"}}
COMPATIBILITY: dict[str, list[Any]] = {
    "sharding.use_orig_params": [True, False],
    "sharding.limit_all_gathers": [True, False],
    "sharding.backward_prefetch": ["BACKWARD_PRE", "BACKWARD_POST", "NONE"],
}
"""Keys that are accepted without effect: the schema need not offer them."""


def keys(whole: dict[str, Any], node: dict[str, Any], path: str = "", above: tuple[str, ...] = ()) -> Iterator[str]:
    """Every key that a schema knows, with the kind it belongs to, and every choice: `model(hf).lora.r`."""
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        if name not in above:  # a loss may hold a loss
            yield from keys(whole, whole["$defs"][name], path, (*above, name))
    for choice in node.get("enum", []):
        yield f"{path}={choice}"
    for branch in node.get("anyOf", []):
        yield from keys(whole, branch, path, above)
    if "items" in node:
        yield from keys(whole, node["items"], f"{path}[]", above)
    properties = node.get("properties", {})
    kind = properties.get("kind", {}).get("const")
    for key, child in properties.items():
        inner = f"{path}({kind}).{key}" if kind else f"{path}.{key}"
        yield inner
        yield from keys(whole, child, inner, above)


def test_every_recipe_key_is_accepted() -> None:
    then, now = json.loads((FOLDER / "schema.json").read_text()), make.schema()
    known, wanted = set(keys(now, now)), set(keys(then, then))
    assert len(wanted) > 300
    gone = {key for key in wanted - known if key.removeprefix(".").partition("=")[0] not in COMPATIBILITY}
    assert not gone


@pytest.mark.parametrize("key", COMPATIBILITY)
def test_a_key_without_effect_is_accepted(key: str) -> None:
    for value in COMPATIBILITY[key]:
        fullshard.read(MINIMAL, f"{key}={json.dumps(value)}")


def test_every_command_and_option_exists() -> None:
    now = make.commands()
    for command, options in json.loads((FOLDER / "commands.json").read_text()).items():
        assert command in now
        assert set(options) <= set(now[command]), command
