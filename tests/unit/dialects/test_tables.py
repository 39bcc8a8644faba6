"""The tables name keys and values that exist, know every key of the libraries that are installed, and disagree with
nothing in the recipe."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from pathlib import Path
from typing import Any

import pytest

from fullshard.config.section import Section
from fullshard.dialects import readers, rows, words
from fullshard.dialects.tables import dialects
from fullshard.dialects.translate import translate
from fullshard.recipe import Batch, Duration, Recipe
from fullshard.recipes.read import read_recipe
from tests.unit.test_messages import BASE, keys

KEYS = {path for path, _ in keys(Recipe)}
SAMPLE = {"int": 3, "float": 0.5, "switch": True, "word": "true", "text": "some/name"}


@pytest.mark.parametrize("name", dialects())
def test_every_key_that_a_table_names_exists(name: str) -> None:
    for row in dialects()[name].rows:
        if row.key and not row.key.startswith(("--", "RECIPE")):
            assert row.key in KEYS, row
    assert set(dialects()[name].always) <= KEYS


@pytest.mark.parametrize("name", dialects())
def test_what_a_reader_returns_are_keys_that_exist(name: str) -> None:
    """Whatever the value: a reader that cannot read one may fail, one that returns settings names keys of ours."""
    tried = 0
    for row in dialects()[name].rows:
        for value in (*SAMPLE.values(), {"type": "AdamW", "device": "cpu", "enabled": True}, ["q_proj"]):
            try:
                found = row.read(value, rows.File())
            except (TypeError, ValueError, AttributeError, KeyError):
                continue
            for key in found.settings:
                assert key in KEYS or key.startswith(("--", "RECIPE")), (row.theirs, key)
                tried += 1
    assert tried > 10


@pytest.mark.parametrize("name", dialects())
def test_no_key_is_in_a_table_twice(name: str) -> None:
    spellings = [spelling for row in dialects()[name].rows for spelling in row.theirs]
    assert sorted(set(spellings)) == sorted(spellings)


@pytest.mark.parametrize("name", dialects())
def test_a_key_without_effect_or_refused_says_why(name: str) -> None:
    for row in dialects()[name].rows:
        if row.verdict in ("no effect", "refused"):
            assert len(row.why) > 5, row.theirs
        assert not row.why.endswith("."), row.theirs


@pytest.mark.parametrize("name", [name for name, dialect in dialects().items() if not dialect.launches])
def test_what_a_trainer_does_by_default_is_a_recipe(name: str) -> None:
    done = translate(dialects()[name], {})
    settings = {key: value for key, value in done.settings.items() if key not in ("model.kind", "objective.kind")}
    read_recipe(BASE, *(f"{key}={rows.shown(value)}" for key, value in settings.items()))


def test_every_value_that_means_the_same_is_accepted() -> None:
    for key, values in words.SAME.items():
        for ours, theirs in values.items():
            if key == "model.attention":
                continue  # a GPU's kernel
            recipe = read_recipe(BASE, f"{key}={ours}")
            for word in theirs.split(", "):
                assert read_recipe(BASE, f"{key}={word}") == recipe, (key, word)
    for key, values in {**words.SAME, **words.NEAR}.items():
        spellings = [word for theirs in values.values() for word in theirs.split(", ")]
        assert len(set(spellings)) == len(spellings), key


def test_keys_that_exclude_each_other_are_those_of_the_recipe() -> None:
    sections: dict[str, type[Section]] = {"duration": Duration, "batch": Batch}
    ours = {tuple(f"{name}.{key}" for key in group) for name, cls in sections.items() for group in cls.exclusive}
    assert set(readers.EXCLUSIVE) == ours


def test_every_field_of_training_arguments_has_a_row() -> None:
    from transformers import TrainingArguments

    table = dialects()["hf_trainer"]
    missing = [f.name for f in dataclasses.fields(TrainingArguments) if table.row(f.name) is None]
    assert missing == ["fsdp_config"]  # a section, whose keys have rows
    assert not [row for row in table.rows if row.theirs[0].startswith("fsdp_config.") and not row.theirs]


def test_every_default_of_training_arguments_that_matters_is_theirs() -> None:
    from transformers import TrainingArguments

    fields = {f.name: f.default for f in dataclasses.fields(TrainingArguments)}
    for row in dialects()["hf_trainer"].rows:
        if row.default is not rows.UNSET and row.theirs[0] in fields:
            assert fields[row.theirs[0]] == row.default, row.theirs


def test_every_key_of_accelerate_has_a_row() -> None:
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    table = dialects()["accelerate"]
    missing = [f.name for f in dataclasses.fields(ClusterConfig) if table.row(f.name) is None]
    assert sorted(missing) == sorted(table.sections)
    parser: argparse.ArgumentParser = launch_command_parser()
    flags = {action.dest for action in parser._actions if action.dest.startswith("fsdp_")}
    assert not [flag for flag in flags if table.row(f"fsdp_config.{flag}") is None]
    parallel = {action.dest for action in parser._actions if action.dest.startswith("parallelism_config_")}
    assert not [flag for flag in parallel if table.row(f"parallelism_config.{flag}") is None]


def test_adding_a_dialect_is_adding_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found, recognised, read, answered in error messages, and documented."""
    (tmp_path / "my_trainer.py").write_text(
        "from fullshard.dialects.rows import Dialect, to, unused\n"
        "DIALECT = Dialect(name='my trainer', title='My trainer', marks=('my_rate',), rows=(\n"
        "    to('optimizer.lr', 'my_rate'), to('model.path', 'my_model'), to('data.train', 'my_data'),\n"
        "    unused('my_colour', 'it is always blue'),\n))\n"
    )
    tables: Any = importlib.import_module("fullshard.dialects.tables")
    from fullshard.dialects import files, foreign_keys, report

    monkeypatch.setattr(tables, "__path__", [*tables.__path__, str(tmp_path)])
    dialects.cache_clear()
    foreign_keys.spellings.cache_clear()
    try:
        file = tmp_path / "train.yaml"
        file.write_text("my_rate: 1e-3\nmy_model: m\nmy_data: d.jsonl\nmy_colour: red\n")
        done = files.translated(file)
        assert done is not None
        assert done.settings == {"optimizer.lr": 1e-3, "model.path": "m", "data.train": "d.jsonl"}
        assert read_recipe(str(file)).optimizer.lr == 1e-3
        assert "Here it is optimizer.lr" in str(foreign_keys.of_key("my_rate", 1e-3))
        assert "| `my_rate` | `optimizer.lr` |" in report.markdown(done.dialect)
    finally:
        dialects.cache_clear()
        foreign_keys.spellings.cache_clear()
