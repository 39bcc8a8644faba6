"""Every key of every table with values that it does not take: a nonsense word, a list, a negative number, null.

Nothing is taken for on, off or some number: it is refused, or the report says that it has no effect.
"""

from __future__ import annotations

import contextlib
import functools
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.dialects.command_line import read_words
from fullshard.dialects.kinds import ANYTHING, OF_KEYS, PRECISIONS, SWITCH, BadValue
from fullshard.dialects.rows import Dialect, File, Row, Said, kind_of, nested
from fullshard.dialects.tables import dialects
from fullshard.dialects.translate import translate
from fullshard.dist.precision import SPELLINGS
from fullshard.errors import RecipeError
from fullshard.formatting.yaml_text import shown
from fullshard.recipe import Recipe
from fullshard.recipes.read import read
from tests.unit.test_messages import BASE, keys

NONSENSE = "qzx"
VALUES: list[Any] = [
    *(NONSENSE, "", "auto", "1", True, False, -1, -7, 0, 0.5, 1.5, 3, float("nan")),
    *([], {}, [1, 2], [None], [NONSENSE], [{}], {"a": 1}, {"type": NONSENSE}, {"params": [1]}),
]
OPEN = (
    *("optimizer.kind", "schedule.kind", "data.encode.mode", "data.encode.column_mapping", "model.pooling"),
    *("model.lora", "log.sinks", "model.size", "--preset", "--resume", "RECIPE"),
)
"""Keys that take a name: of a class, a part, a column, a file. The recipe knows which exist."""
SOURCES = ("data.train", "data.validation")
"""A section of them is a part, which the recipe reads."""
KINDS = dict(keys(Recipe))
each_dialect = pytest.mark.parametrize("dialect", dialects().values(), ids=list(dialects()))


def said_of(dialect: Dialect, key: str, value: Any) -> Said | None:
    """What is said about one key; None for an error, or where a section is meant."""
    try:
        done = translate(dialect, nested({key: value}))
    except RecipeError:
        return None
    return next((said for said in done.said if said.key == key), None)


@functools.cache
def problem_of(settings: str) -> str:
    """Why settings do not make a recipe; empty if they do."""
    values: dict[str, Any] = json.loads(settings)
    sections = {key: kind for path in values for key, kind in KINDS.get(path, {}).items()}
    if "model.path" in values or sections.get("model") == "sentence_transformer":
        sections["model"] = "sentence_transformer"
    base = {**BASE, **({"model": {"path": "m"}} if sections.get("model") == "sentence_transformer" else {})}
    with contextlib.suppress(RecipeError):
        read(base, *(f"{key}.kind={kind}" for key, kind in sections.items()), *_overrides(values))
        return ""
    try:
        read(base, *_overrides(values))
    except RecipeError as error:
        return str(error)
    return ""


def _overrides(values: dict[str, Any]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


@each_dialect
def test_a_nonsense_word_is_never_taken_for_on_or_off(dialect: Dialect) -> None:
    for key in dialect.spellings:
        said = said_of(dialect, key, NONSENSE)
        if said is None or said.verdict == "refused":
            continue
        kept = NONSENSE in shown(said.settings)  # a name, a path
        reported = not said.settings and said.why
        assert kept or reported, said


@each_dialect
def test_a_value_is_refused_or_makes_a_recipe(dialect: Dialect) -> None:
    checked = 0
    for key in dialect.spellings:
        for value in VALUES:
            said = said_of(dialect, key, value)
            if said is None or said.verdict == "refused" or not said.settings or set(said.settings) & set(OPEN):
                continue
            if isinstance(value, dict) and set(said.settings) & set(SOURCES):
                continue
            problem = problem_of(json.dumps(said.settings))
            assert not problem, (key, value, said.settings, problem)
            checked += 1
    assert checked > 15


@each_dialect
def test_null_is_the_same_as_leaving_the_key_out(dialect: Dialect) -> None:
    nothing = translate(dialect, {}).settings
    for key in dialect.spellings:
        assert translate(dialect, nested({key: None})).settings == nothing, key


@each_dialect
def test_a_switch_has_the_spellings_of_yaml_and_argparse(dialect: Dialect) -> None:
    for key, row in dialect.spellings.items():
        if not takes_a_switch(row):
            continue
        for value, spellings in {True: ("true", "True", "yes", "on", "1", 1), False: ("False", "no", "off", 0)}.items():
            expected = row.read(value, File())
            assert expected.verdict != "refused", key
            for spelling in spellings:
                assert row.read(spelling, File()) == expected, (key, spelling)
        assert row.read(7, File()).verdict == "refused"


def takes_a_switch(row: Row) -> bool:
    return set(SWITCH.readers) <= set(row.takes.readers) and len(row.takes.readers) == 1


def test_there_are_switches_in_the_tables() -> None:
    counts = {name: sum(map(takes_a_switch, dialect.rows)) for name, dialect in dialects().items()}
    assert counts["hf_trainer"] > 5
    assert counts["training_yaml"] > 5


@each_dialect
def test_a_row_says_what_it_takes(dialect: Dialect) -> None:
    for row in dialect.rows:
        if row.verdict == "renamed" and not row.ours.startswith(("--", "RECIPE")):
            assert row.takes is not ANYTHING, row.theirs


@pytest.mark.parametrize("key", OF_KEYS)
def test_a_key_takes_here_what_it_takes_in_a_recipe(key: str) -> None:
    """Both ways: what the tables let through is a value of the recipe, and they refuse only what it refuses."""
    for value in (NONSENSE, -1, 0, 0.5, 1, 1.5, 2, 3.0, True, [1, 2], [0.9, 0.99], ["a"], {"a": 1}):
        try:
            found = kind_of(key).read(value)
        except BadValue:
            found = None
        accepted = not problem_of(json.dumps({key: found if found is not None else value}))
        open_word = key in (*OPEN, *SOURCES)
        if found is not None:
            assert accepted or open_word, (key, value)
        else:
            assert not accepted or isinstance(value, (bool, list, dict)) or open_word, (key, value)  # 1 for true


def test_the_precisions_are_those_of_the_recipe() -> None:
    assert set(PRECISIONS) == {word for words in SPELLINGS.values() for word in words}


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        (
            "num_train_epochs: 1\nuse_peft: maybe\nlora_r: 8\nbf16: perhaps\n",
            ["use_peft: it must be true or false, not 'maybe'", "bf16: it must be true or false, not 'perhaps'"],
        ),
        (
            "num_train_epochs: fast\nlearning_rate: [1, 2]\nper_device_train_batch_size: 0\nlora_r: -3\n",
            [
                "num_train_epochs: it must be a number above 0, not 'fast'",
                "learning_rate: it must be a number above 0, not [1, 2]",
                "per_device_train_batch_size: it must be a whole number of at least 1, not 0",
                "lora_r: it must be a whole number of at least 1, not -3",
            ],
        ),
        (
            "base_model: m\nmicro_batch_size: 1\ngradient_checkpointing: sometimes\nbf16: half\n",
            [
                "gradient_checkpointing: it must be true or false, offload or offload_disk, not 'sometimes'",
                "bf16: it must be true or false, auto or full, not 'half'",
            ],
        ),
        (
            "zero_optimization: {stage: 5}\nbf16: {enabled: maybe}\noptimizer: {type: AdamW, params: {lr: fast}}\n",
            [
                "zero_optimization.stage: it must be 0, 1, 2 or 3, not 5",
                "bf16: it must be true or false or auto, not 'maybe'",
                "optimizer: optimizer.lr: it must be a number above 0, not 'fast'",
            ],
        ),
    ],
)
def test_the_error_names_file_key_value_and_what_is_allowed(tmp_path: Path, text: str, messages: list[str]) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(text)
    done = CliRunner().invoke(app, ["import", str(file)])
    for message in messages:
        key, _, why = message.partition(": ")
        lines = [line for line in done.output.splitlines() if line.split()[:2] == ["refused", f"{key}:"]]
        assert [line for line in lines if line.endswith(why)]
    launches = "zero" in text
    with pytest.raises(RecipeError) as caught:
        read("quickstart" if launches else str(file), launch_file=str(file) if launches else None)
    for message in messages:
        assert f"{file} (" in str(caught.value)
        assert f"), {message}." in str(caught.value)


def test_a_value_that_is_refused_is_left_out_of_what_the_other_keys_mean() -> None:
    found = translate(dialects()["training_yaml"], {"use_lora": "maybe", "lora_r": 8, "model_name": "m"})
    assert [said.key for said in found.refused] == ["use_lora"]
    assert not [key for key in found.settings if key.startswith("model.lora")]


@pytest.mark.parametrize("line", ["--use-lora maybe", "--fp16 maybe", "--lr fast", "--batch-size 0", "--packing qzx"])
def test_a_flag_with_a_nonsense_word_is_an_error(line: str) -> None:
    with pytest.raises(RecipeError, match=f"{line}: it must be .*, not "):
        read_words(line.split(), sections=list(Recipe.model_fields), options=())


def test_a_reader_that_fails_is_a_bug_and_shows() -> None:
    """Only BadValue is a user's mistake."""

    def broken(value: Any, file: File) -> dict[str, Any]:
        raise KeyError("our own")

    with pytest.raises(KeyError):
        Row(("key",), "optimizer.lr", reader=broken).read(1, File())
