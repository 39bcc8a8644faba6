from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from fullshard.commands.schema import schema
from fullshard.config import families
from fullshard.config.part import plain
from fullshard.formatting.yaml_text import parse
from fullshard.recipe import Recipe
from fullshard.recipes.read import read_recipe

VALIDATOR = jsonschema.Draft202012Validator


@pytest.fixture(scope="module")
def validator() -> Any:
    found = schema(Recipe)
    VALIDATOR.check_schema(found)
    return VALIDATOR(found)


@pytest.mark.parametrize("name", sorted(families.recipes()))
def test_built_in_recipes_match_the_schema_as_written_and_resolved(validator: Any, name: str) -> None:
    validator.validate(parse(families.recipes()[name].read_text(), name=name).values)
    validator.validate({**plain(read_recipe(name)), "run": {"name": name}})


MINIMAL: dict[str, Any] = {"model": "a/model", "data": {"train": ["a.jsonl", "b.jsonl"]}}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sharding": "full"},
        {"sharding": {"wrap": ["Block"]}},
        {"schedule": "linear"},
        {"schedule": {"kind": "step", "gamma": 0.5}},
        {"schedule": {"kind": "my_package.schedules.Mine", "anything": 1}},
        {"model": {"path": "x", "lora": True}},
        {"model": {"path": "x", "lora": 8}},
        {"log": {"sinks": ["tensorboard", {"kind": "wandb"}]}},
        {"checkpoint": {"best": None}},
        {"topology": {"devices": [0, 1]}},
        {"topology": {"devices": "auto"}},
    ],
)
def test_what_decodes_matches_the_schema(validator: Any, changes: dict[str, Any]) -> None:
    validator.validate({**MINIMAL, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"sed": 1},
        {"batch": {"per_divice": 2}},
        {"schedule": {"kind": "cosine", "gamma": 0.5}},
        {"schedule": {"kind": "sine"}},
        {"sharding": {"strategy": "ful"}},
        {"model": {"path": "x", "lora": {"rank": 8}}},
        {"data": {}},
        {"optimizer": {"lr": -1}},
        {"log": {"sinks": [{"project": "x"}]}},
    ],
)
def test_what_does_not_decode_does_not_match_the_schema(validator: Any, changes: dict[str, Any]) -> None:
    assert not validator.is_valid({**MINIMAL, **changes})


def test_descriptions_are_the_docstrings_of_the_fields() -> None:
    found = schema(Recipe)
    assert found["properties"]["seed"]["description"] == "Seed of the data order, new weights and dropout."
    adamw = next(kind for kind in found["$defs"]["Optimizer"]["anyOf"] if "lr" in kind["properties"])
    assert adamw["properties"]["lr"]["description"] == "The base learning rate; the schedule multiplies it."
