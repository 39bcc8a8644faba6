"""The page of language models: its recipe and settings decode, its tables list what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import fullshard
from fullshard.config import families
from fullshard.config.part import decode, kinds
from fullshard.contracts.data import Encoder
from fullshard.families.language.models.hf import Hf
from tests.docs.pages import blocks, prose

FOLDER = Path(fullshard.__file__).parent / "families" / "language"
PAGE = (FOLDER / "README.md").read_text()
[RECIPE] = blocks("yaml", PAGE)


def settings() -> list[str]:
    """What a sentence gives as `key: value`, in the form of the command line."""
    return [span.replace(": ", "=", 1) for span in re.findall(r"`([a-z_.]+: [^`]+)`", prose(PAGE))]


def rows(head: str) -> list[list[str]]:
    body = PAGE.partition(f"| {head} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in body]


@pytest.mark.parametrize("setting", settings())
def test_every_setting_decodes(setting: str) -> None:
    fullshard.read(yaml.safe_load(RECIPE), setting)


def test_there_are_settings() -> None:
    assert len(settings()) >= 8


def test_every_recipe_is_listed() -> None:
    listed = {row[0].strip("`") for row in rows("recipe")}
    assert listed == {path.stem for path in (FOLDER / "recipes").glob("*.yaml")}
    assert listed <= set(families.recipes())


def test_the_keys_of_a_model_exist() -> None:
    named = {name for row in rows("key of `model`") for name in re.findall(r"`([a-z_]+)`", row[0])}
    assert named <= {field.alias or name for name, field in Hf.model_fields.items()}


def test_records_are_encoded_as_the_table_says() -> None:
    texts = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    texts["conversations"] = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    values = texts | {"input_ids": [1, 2]}
    for having, encoder, _ in rows("a record has"):
        for option in re.findall(r"`(\w+)`(?: and `(\w+)`)?", having):
            record = {name: values.get(name, "some text") for name in option if name}
            accepting = [kind for kind in kinds(Encoder) if decode(Encoder, {"kind": kind}).accepts(record)]
            assert encoder.strip("`") in accepting, record
