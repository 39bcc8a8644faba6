from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

import fullshard
from fullshard.commands.recipes import sentence
from fullshard.config import families
from fullshard.config.part import plain
from fullshard.config.section import without_effect
from fullshard.dialects import presets
from fullshard.dialects.foreign_keys import NO_EFFECT
from fullshard.errors import RecipeError
from fullshard.formatting.yaml_text import parse, parse_value, render, shown
from fullshard.recipe import Batch
from fullshard.recipes.read import hand_on, read, read_recipe, run_facts, save_resolved

OWN_PARTS = """
from typing import Any, ClassVar
from pydantic import Field
from fullshard.contracts.model import Family
from fullshard.config.part import Section
from fullshard.contracts.schedule import Schedule

class Lora(Section):
    r: int = 16
    dropout: float = 0.0

class Small(Family):
    path: str = "small"
    lora: Lora | None = None
    config: dict[str, Any] = Field(default_factory=dict)

    def build(self, *, processor):
        pass

class Stairs(Schedule):
    height: float = 0.5

    def after_warmup(self, step, total):
        return self.height

class Flat(Schedule):
    rate: float = 1.0

class Whole(Schedule):
    def factor(self, step, total):
        return 1.0
"""


@pytest.fixture(autouse=True)
def _own_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_parts.py").write_text(OWN_PARTS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _forget_own_parts() -> Any:
    yield
    sys.modules.pop("own_parts", None)


MINIMAL: dict[str, Any] = {"model": {"kind": "own_parts.Small"}, "data": {"train": "text.jsonl"}}


def written(text: str, name: str = "r.yaml") -> str:
    Path(name).write_text(text)
    return name


RECIPE = """\
model:
  kind: own_parts.Small
data:
  train: text.jsonl
optimizer:
  lr: 1e-4
"""


def error_of(*arguments: Any, **keywords: Any) -> str:
    with pytest.raises(RecipeError) as error:
        read(*arguments, **keywords)
    return str(error.value)


# YAML


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E5", 1e5),
        ("-.5", -0.5),
        ("1_000", 1000),
        ("0x10", 16),
        ("true", True),
        ("False", False),
        ("yes", True),
        ("on", True),
        ("no", False),
        ("off", False),
        ("null", None),
        ("", None),
        ("[1, 2]", [1, 2]),
        ("{a: 1}", {"a": 1}),
        ("'7'", "7"),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("1.2.3", "1.2.3"),
        ("a: b", "a: b"),
        ("*x", "*x"),
        ("0,2", "0,2"),
    ],
)
def test_values_mean_what_they_look_like(text: str, value: Any) -> None:
    found = parse_value(text, where="key")
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("value", ["1e-4", "12:30", "2024-01-01", "010", "yes", "null", "1.", "", "a: b", "- a", "äöü"])
def test_text_stays_text_through_a_file(value: str) -> None:
    assert parse(render({"key": value}), name="x").values == {"key": value}


@pytest.mark.parametrize("value", [1e-5, 0.1, 3, True, None, [1, {"a": 2.5}], {}])
def test_the_yaml_we_write_is_read_the_same_by_other_parsers(value: Any) -> None:
    assert yaml.safe_load(render({"key": value})) == {"key": value}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "batch:\n  per_device: 1\n  per_device: 2\n",
            "r.yaml, line 3: the key batch.per_device appears twice, first in line 2",
        ),
        ("a:\n\tb: 1\n", "r.yaml, line 2, column 1: found a tab, at `b: 1`. Indent with spaces"),
        ("a: b: c\n", "r.yaml, line 1, column 5: found a second colon"),
        ("- 1\n", "r.yaml, line 1: found a list where a mapping of keys is needed"),
        ("word\n", "found the text 'word' where a mapping"),
        ("# nothing\n", "r.yaml is empty"),
        ("a: 1\n---\nb: 2\n", "line 2, column 1: found a second document"),
        ("a: !!python/name:os.system x\n", "remove the word that starts with `!`"),
        ("a: [1, 2\nb: 3\n", "line 2"),
        ("a: 'x\nb: 1\n", "unexpected end of stream"),
    ],
)
def test_a_file_that_is_not_a_recipe_is_an_error_with_line_and_reason(text: str, words: str) -> None:
    message = error_of(written(text))
    assert words in message
    assert "r.yaml" in message
    assert "found found" not in message


def test_a_file_that_is_not_utf8_is_an_error() -> None:
    Path("r.yaml").write_bytes(b"a: \xff\xfe")
    assert "byte 3 is not UTF-8" in error_of("r.yaml")


# Finding the recipe


def test_a_missing_file_suggests_near_names() -> None:
    written(RECIPE, "train.yaml")
    message = error_of("trian.yaml")
    assert message.startswith("trian.yaml is neither a file nor a built-in recipe. Did you mean train.yaml?")
    assert ", ".join(families.recipes()) in message


def test_only_recipes_are_suggested() -> None:
    written("site_name: docs\nname: docs\n", "mkdocs.yml")
    written("repos: []\n", "pre-commit.yaml")
    Path("trial.yaml").write_bytes(b"model: \xff\xfe\ndata: x\n")
    assert "Did you mean" not in error_of("nope")
    assert "Did you mean" not in error_of("trian.yaml")
    written(RECIPE, "mine.yaml")
    assert "Did you mean mine.yaml?" in error_of("nope")


def test_a_folder_points_at_the_recipe_inside() -> None:
    Path("runs").mkdir()
    assert "runs is a folder" in error_of("runs")
    written(RECIPE, "runs/recipe.resolved.yaml")
    assert "Use runs/recipe.resolved.yaml." in error_of("runs")


def test_the_users_file_is_read_and_never_written() -> None:
    name = written(RECIPE)
    before = (Path(name).read_bytes(), Path(name).stat().st_mtime_ns)
    read(name, "optimizer.lr=3e-4", preset="single_node_fsdp")
    assert (Path(name).read_bytes(), Path(name).stat().st_mtime_ns) == before


# Precedence


def test_command_line_over_recipe_over_preset_over_default() -> None:
    Path("r.yaml").write_text(RECIPE + "topology: {devices: 4}\n")
    reading = read("r.yaml", "optimizer.lr=3e-4", "topology.nodes=2", preset="multi_node_fsdp")
    recipe = reading.recipe
    assert (recipe.optimizer.lr, recipe.topology.nodes, recipe.topology.devices) == (3e-4, 2, 4)
    assert recipe.sharding.cpu_offload
    assert recipe.seed == 0
    assert "optimizer.lr: 3e-4 (command line) over 1e-4 (recipe)" in reading.overridden
    assert "topology.nodes: 2 (command line) over 4 (preset multi_node_fsdp)" in reading.overridden
    assert "topology.devices: 4 (recipe) over 8 (preset multi_node_fsdp)" in reading.overridden
    assert "sharding.cpu_offload: true (preset multi_node_fsdp) over false (default)" in reading.overridden


def test_a_section_that_is_removed_is_reported_with_its_origin() -> None:
    reading = read("embedding", "data.validation=null")
    assert any(
        line.startswith("data.validation: null (command line) over {kind: docstrings") and line.endswith("(recipe)")
        for line in reading.overridden
    ), reading.overridden


def test_setting_a_default_is_not_reported_as_an_override() -> None:
    assert read(written(RECIPE), "optimizer.lr=1e-4", "seed=0").overridden == ()


def test_round_numbers_are_shown_as_people_write_them() -> None:
    reading = read("quickstart", "topology.timeout_s=60")
    assert "topology.timeout_s: 60 (command line) over 600 (default)" in reading.overridden
    for text in ("600", "10", "1800", "12.5", "-90", "3e-4", "-1.5e-10", "1e3", "1e6", "1e20", "2.0", "0.0", "0.1"):
        assert shown(float(text)) == text


def test_an_unknown_preset_lists_the_known() -> None:
    message = error_of(MINIMAL, preset="multi_node_fspd")
    assert "did you mean 'multi_node_fsdp'?" in message
    assert "large_scale_fsdp" in message


@pytest.mark.parametrize(
    ("given", "override", "kept", "dropped"),
    [
        (
            {"duration": {"epochs": 3}},
            "duration.steps=10",
            {"epochs": None, "steps": 10},
            "duration.epochs: 3 (recipe)",
        ),
        (
            {"batch": {"global": 64}},
            "batch.accumulate=2",
            {"accumulate": 2, "global": None},
            "batch.global: 64 (recipe)",
        ),
    ],
)
def test_one_of_two_keys_that_exclude_each_other_replaces_the_other(
    given: dict[str, Any], override: str, kept: dict[str, Any], dropped: str
) -> None:
    reading = read({**MINIMAL, **given}, override)
    assert plain(getattr(reading.recipe, next(iter(given)))).items() >= kept.items()
    assert any(line.startswith(dropped) for line in reading.overridden)


def test_two_keys_that_exclude_each_other_in_one_place_are_an_error() -> None:
    assert "exclude each other" in error_of({**MINIMAL, "duration": {"epochs": 1, "steps": 2}})
    assert "exactly one" in error_of(MINIMAL, "duration.epochs=null", "duration.steps=null")


def test_a_change_of_kind_keeps_shared_keys_and_reports_dropped_ones() -> None:
    reading = read({**MINIMAL, "schedule": {"kind": "step", "warmup": 10, "gamma": 0.3}}, "schedule=linear")
    assert plain(reading.recipe.schedule) == {"kind": "linear", "warmup": 10, "floor": 0.0}
    assert any(line.startswith("schedule.gamma: 0.3 (recipe) is dropped") for line in reading.overridden)


def test_a_path_replaces_a_source_of_another_kind() -> None:
    recipe = read_recipe({**MINIMAL, "data": {"train": {"kind": "python_reference"}}}, "data.train=a.jsonl")
    assert plain(recipe.data.train).items() >= {"kind": "files", "path": "a.jsonl"}.items()


# Overrides


@pytest.mark.parametrize("key", ["batch.per_device", "batch.per-device", "--batch.per-device"])
def test_hyphens_and_underscores_are_the_same(key: str) -> None:
    assert read_recipe({**MINIMAL, "batch": {"per-device": 2}}, f"{key}=4").batch.per_device == 4


@pytest.mark.parametrize("word", ["true", "True", "yes", "on"])
def test_true_in_every_spelling(word: str) -> None:
    assert read_recipe(MINIMAL, f"sharding.cpu_offload={word}").sharding.cpu_offload is True
    assert read_recipe({**MINIMAL, "sharding": {"cpu_offload": word}}).sharding.cpu_offload is True


@pytest.mark.parametrize("word", ["false", "False", "no", "off"])
def test_false_in_every_spelling(word: str) -> None:
    assert read_recipe(MINIMAL, f"sharding.compile={word}").sharding.compile is False


def test_scientific_notation_is_a_number_in_file_and_on_the_command_line() -> None:
    assert read_recipe(written(RECIPE)).optimizer.lr == 1e-4
    assert read_recipe(written(RECIPE), "optimizer.lr=5E-5").optimizer.lr == 5e-5


def test_null_and_lists() -> None:
    recipe = read_recipe(MINIMAL, "checkpoint.best=null", "topology.devices=[0, 2]", "topology.device=cuda")
    assert recipe.checkpoint.best is None
    assert recipe.topology.devices == [0, 2]
    assert read_recipe(MINIMAL, "topology.devices=0,2").topology.devices == [0, 2]
    assert read_recipe(MINIMAL, "topology.devices='2'", "topology.device=gpu").topology.devices == 2
    for devices in (0, -1, []):
        assert "topology.devices must be at least 1" in error_of(MINIMAL, f"topology.devices={devices}")
    assert "topology.devices names a GPU twice: [0, 0]" in error_of(MINIMAL, "topology.devices=[0, 0]")
    assert "'a,b' is not a count, a list of ids (0,2) or auto" in error_of(MINIMAL, "topology.devices=a,b")


def test_a_key_inside_a_short_form() -> None:
    recipe = read_recipe({**MINIMAL, "data": {"train": "a.jsonl"}, "sharding": "hybrid"}, "sharding.cpu_offload=true")
    assert (recipe.sharding.strategy, recipe.sharding.cpu_offload) == ("hybrid", True)
    assert read_recipe({**MINIMAL, "schedule": "linear"}, "schedule.warmup=5").schedule.warmup == 5


def test_a_model_named_by_one_word_takes_adapter_settings() -> None:
    model = plain(read_recipe({"model": "some/name", "data": {"train": "a.jsonl"}}, "model.lora.r=8").model)
    assert (model["kind"], model["path"], model["lora"]["r"]) == ("hf", "some/name", 8)


def test_a_key_inside_something_that_is_null_or_absent() -> None:
    assert plain(read_recipe(MINIMAL, "model.lora.r=8").model)["lora"] == {"r": 8, "dropout": 0.0}
    recipe = read_recipe({**MINIMAL, "checkpoint": {"best": None}}, "checkpoint.best.metric=x")
    assert recipe.checkpoint.best is not None


def test_a_free_mapping_is_merged_key_by_key_and_keeps_its_hyphens() -> None:
    model = {**MINIMAL["model"], "config": {"hidden-size": 4, "layers": {"n": 1}}}
    recipe = read_recipe({**MINIMAL, "model": model}, "model.config.layers.n=2", "model.config.a-b=3")
    assert plain(recipe.model)["config"] == {"hidden-size": 4, "layers": {"n": 2}, "a-b": 3}


def test_a_list_element_by_index() -> None:
    recipe = read_recipe({**MINIMAL, "log": {"sinks": ["tensorboard", "tensorboard"]}}, "log.sinks[1].kind=tensorboard")
    assert len(recipe.log.sinks) == 2
    assert read_recipe({**MINIMAL, "data": {"train": ["a.jsonl", "b.jsonl"]}}, "data.train.path[1]=c.jsonl")
    message = error_of({**MINIMAL, "log": {"sinks": ["tensorboard"]}}, "log.sinks[3].kind=x")
    assert "log.sinks[3].kind: the recipe gives 1 entry at log.sinks" in message
    assert "no list" in error_of(MINIMAL, "precision[0]=x")
    assert "no list" in error_of(MINIMAL, "precision.a[0]=x")


@pytest.mark.parametrize("text", ["lr", "=3", "optimizer..lr=3", "optimizer.lr[=3", "a b=3"])
def test_words_that_are_not_settings_are_refused(text: str) -> None:
    assert text in error_of(MINIMAL, text)


def test_a_list_that_is_not_closed() -> None:
    assert "not complete" in error_of(MINIMAL, "topology.devices=[0, 2")


# Errors of content


def test_unknown_keys_name_line_path_and_the_nearest_key() -> None:
    name = written(RECIPE + "batch:\n  per_divice: 2\nprecison: bf16\n")
    message = error_of(name)
    assert "r.yaml, line 8: batch.per_divice is not a known key (did you mean 'per_device'?)" in message
    assert "r.yaml, line 9: precison is not a known key (did you mean 'precision'?)" in message


def test_an_error_of_the_command_line_says_so() -> None:
    assert error_of(written(RECIPE), "optimizer.lrr=1").startswith("command line: optimizer.lrr is not a known key")
    assert error_of(written(RECIPE), "batch.per_device=zero").startswith("command line: batch.per_device = 'zero'")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("name=1e3", "name = 1e3: it must be text (put it in quotes)."),
        ("topology.devices=1.5", "topology.devices = 1.5: it must be a whole number or auto or a list such as [a, b]."),
        (
            "sharding.strategy=ful",
            "sharding.strategy = 'ful': it must be one of auto, full, grad_op, hybrid, none (did you mean 'full'?).",
        ),
        ("sharding.cpu_offload=maybe", "sharding.cpu_offload = 'maybe': it must be true or false."),
        ("optimizer.lr=fast", "optimizer.lr = 'fast': it must be a number."),
        ("batch.per_device=0", "batch.per_device = 0: it must be at least 1 or auto."),
        ("data.train=null", "data.train = null: it must be a mapping of keys."),
        ("model.lora.r=many", "model.lora.r = 'many': it must be a whole number."),
    ],
)
def test_a_wrong_value_says_found_and_allowed_in_one_line(override: str, message: str) -> None:
    assert error_of(MINIMAL, override) == f"command line: {message}"


def test_a_broken_nested_section_is_reported_once() -> None:
    broken = {"model": {"path": None, "lora": {"rank": 1}}, "data": {"train": "a.jsonl"}}
    assert [line.split(" ")[2] for line in error_of(broken).splitlines()] == ["model.lora.rank"]


def test_several_problems_are_reported_together_in_order() -> None:
    lines = error_of(MINIMAL, "batch.per_device=0", "sed=1", "sharding.strategy=x").splitlines()
    assert [line.split(" ")[2] for line in lines] == ["sed", "batch.per_device", "sharding.strategy"]


def test_a_missing_key() -> None:
    assert "data is missing" in error_of({"model": MINIMAL["model"]})


def test_the_same_key_with_hyphen_and_underscore() -> None:
    assert "batch.per_device appears twice" in error_of({**MINIMAL, "batch": {"per_device": 1, "per-device": 2}})


# Resolved recipes


def test_a_resolved_recipe_is_a_recipe(tmp_path: Path) -> None:
    reading = read(written(RECIPE), "topology.devices=2", "name='1e3'", "model.config={a: 1e-4}")
    save_resolved(reading.recipe, tmp_path / "recipe.resolved.yaml", facts=run_facts(reading))
    again = read(tmp_path / "recipe.resolved.yaml")
    assert again.recipe == reading.recipe
    assert again.overridden == ()
    stored = yaml.safe_load((tmp_path / "recipe.resolved.yaml").read_text())
    assert stored["run"]["versions"]["torch"].startswith("2.")
    assert stored["run"]["command"] == sys.argv
    assert stored["optimizer"]["kind"] == "adamw"
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".part")] == []


def test_a_recipe_handed_to_ranks_keeps_where_it_came_from(tmp_path: Path) -> None:
    reading = read(written(RECIPE), "optimizer.lr=3e-4", preset="multi_node_ddp")
    hand_on(reading, tmp_path / "handed.yaml")
    assert read(tmp_path / "handed.yaml") == reading


@pytest.mark.parametrize("name", sorted(presets.known()))
def test_every_preset_decodes_and_says_what_it_is_for(name: str) -> None:
    assert read_recipe(MINIMAL, preset=name).topology.nodes >= 1
    assert len(sentence(presets.known()[name])) > 40


@pytest.mark.parametrize("name", sorted(families.recipes()))
def test_every_built_in_recipe_decodes_and_says_what_it_is_for(name: str) -> None:
    assert read(name).source == f"built-in recipe {name}"
    assert len(sentence(families.recipes()[name])) > 40


# Keys that are accepted without effect


def test_keys_that_fsdp2_made_meaningless_are_accepted_and_noted(tmp_path: Path) -> None:
    given = {"use_orig_params": True, "limit-all-gathers": False, "backward_prefetch": "BACKWARD_POST"}
    reading = read({**MINIMAL, "sharding": given}, "sharding.strategy=full")
    notes = without_effect(reading.recipe)
    assert [note.split()[0] for note in notes] == [
        "sharding.use_orig_params",
        "sharding.limit_all_gathers",
        "sharding.backward_prefetch",
    ]
    assert notes[2].startswith("sharding.backward_prefetch = BACKWARD_POST is not available: FSDP2 always gathers")
    hand_on(reading, tmp_path / "handed.yaml")
    assert read(tmp_path / "handed.yaml") == reading
    assert without_effect(read_recipe(tmp_path / "handed.yaml")) == notes


def test_keys_without_effect_on_the_command_line() -> None:
    reading = read(MINIMAL, "sharding.use-orig-params=true", "sharding.backward_prefetch=BACKWARD_PRE")
    assert reading.overridden[0] == "sharding.use_orig_params: true (command line) over null (default)"
    assert len(without_effect(reading.recipe)) == 1, "BACKWARD_PRE is what FSDP2 does"
    message = error_of(MINIMAL, "sharding.backward_prefetch=BACKWARD_PRO")
    assert message.startswith(
        "command line: sharding.backward_prefetch = 'BACKWARD_PRO': it must be one of BACKWARD_PRE"
    )
    assert "did you mean 'BACKWARD_PRE'" in message


def test_an_old_resolved_recipe_with_these_keys_as_null_still_loads() -> None:
    keys = dict.fromkeys(NO_EFFECT["sharding"])
    old = read_recipe({**MINIMAL, "sharding": {"strategy": "full", **keys}})
    assert old == read_recipe({**MINIMAL, "sharding": "full"})
    assert not without_effect(old)
    assert not keys.keys() & plain(old)["sharding"].keys()


# What a newcomer runs into


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("optimizer.lr=true", "optimizer.lr = true: it must be a number."),
        ("optimizer.betas=[true, 0.9]", "optimizer.betas[0] = true: it must be a number."),
        ("batch.per_device=true", "batch.per_device = true: it must be a whole number."),
        ("batch.accumulate=false", "batch.accumulate = false: it must be a whole number."),
        ("topology.devices=[0, true]", "topology.devices[1] = true: it must be a whole number."),
        ("duration.epochs=yes", "duration.epochs = true: it must be a number."),
        ("schedule.warmup=true", "schedule.warmup = true: it must be a number."),
    ],
)
def test_true_is_not_accepted_as_a_number(setting: str, message: str) -> None:
    assert error_of(MINIMAL, setting) == f"command line: {message}"


@pytest.mark.parametrize("kind", [".nan", ".my_module.Mine"])
def test_a_kind_that_begins_with_a_dot_is_not_known(kind: str) -> None:
    message = error_of(MINIMAL, f"schedule.kind={kind}")
    assert message.startswith("command line: schedule.kind = ")
    assert "Known: constant, cosine" in message


def test_a_pair_has_two_entries() -> None:
    message = "command line: optimizer.betas = [0.9, 0.95, 0.1]: it must be a list of at most 2 entries."
    assert error_of(MINIMAL, "optimizer.betas=[0.9, 0.95, 0.1]") == message


def test_a_warm_up_that_is_not_a_number_is_refused() -> None:
    for value in ("[1]", "soon", "-1"):
        assert "warm-up is a number of steps (0, 100) or a share of the run (0.03)" in error_of(
            MINIMAL, f"schedule.warmup={value}"
        )


def test_a_star_on_the_command_line_needs_quotes() -> None:
    assert error_of(MINIMAL, "model.config=[*, a.*]").endswith("""model.config='["*", a.*]'.""")
    assert read_recipe(MINIMAL, 'data.train=["*"]').data.train.path == ["*"]  # type: ignore[attr-defined]
    assert "not complete" in error_of(MINIMAL, "model.config=[a*")


def test_two_keys_that_exclude_each_other_on_one_command_line() -> None:
    message = error_of(MINIMAL, "duration.epochs=2", "duration.steps=5")
    assert message == "command line: duration.epochs and duration.steps exclude each other. Give one of them."
    assert read_recipe(MINIMAL, "duration.epochs=null", "duration.steps=5").duration.steps == 5


def test_a_longer_word_suggests_the_key_that_it_begins_with() -> None:
    lora = {**MINIMAL, "model": {"kind": "own_parts.Small", "lora": {}}}
    assert "model.lora.dropo is not a known key (did you mean 'dropout'?)" in error_of(lora, "model.lora.dropo=8")
    assert "model.lora.x is not a known key. Known here: dropout, r." in error_of(lora, "model.lora.x=8")


def test_a_part_without_a_method_of_its_contract_is_refused() -> None:
    message = error_of(MINIMAL, "schedule.kind=own_parts.Flat")
    assert "schedule.kind = 'own_parts.Flat': the class has no method after_warmup or factor" in message
    assert "fullshard.contracts.schedule" in message
    assert read_recipe(MINIMAL, "schedule.kind=own_parts.Whole").schedule.factor(0, 1) == 1.0


def test_every_contract_names_methods_that_it_has() -> None:
    contracts = [fullshard.Encoder, fullshard.Evaluation, fullshard.Family, fullshard.Launcher, fullshard.Objective]
    contracts += [fullshard.Optimizer, fullshard.Schedule, fullshard.Sink, fullshard.Source]
    for contract in contracts:
        assert contract.required  # type: ignore[attr-defined]
        for name in " or ".join(contract.required).split(" or "):  # type: ignore[attr-defined]
            assert callable(getattr(contract, name))


def test_a_class_of_this_session_is_not_handed_to_other_ranks(tmp_path: Path) -> None:
    from fullshard.contracts.schedule import Schedule

    class Local(Schedule):
        def after_warmup(self, step: int, total: int) -> float:
            return 1.0

    reading = read(MINIMAL)
    hand_on(reading, tmp_path / "handed.yaml")
    for name in (Local.__qualname__, "Local"):
        Local.__qualname__ = name
        Local.__module__ = "__main__" if name == "Local" else __name__
        mine = dataclasses.replace(reading, recipe=reading.recipe.model_copy(update={"schedule": Local()}))
        with pytest.raises(RecipeError, match=r"schedule.kind = '.*Local': this class exists in this session only"):
            hand_on(mine, tmp_path / "other.yaml")
    assert not (tmp_path / "other.yaml").exists()


def test_keys_that_exclude_each_other_are_refused_in_python_as_well() -> None:
    with pytest.raises(ValidationError, match="exclude each other"):
        Batch.model_validate({"accumulate": 2, "global": 8})
