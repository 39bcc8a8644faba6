"""Messages about a recipe: other trainers' keys are answered with ours, and neither Python nor pydantic shows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fullshard.config.part import Part, Section, kinds, part_class
from fullshard.config.section import keys_of, options
from fullshard.data.sources.files import Files
from fullshard.dialects import foreign_keys
from fullshard.dialects.command_line import to_overrides
from fullshard.errors import DataError, RecipeError
from fullshard.formatting.plural import counted
from fullshard.recipe import Recipe
from fullshard.recipes.read import read, read_recipe

BASE: dict[str, Any] = {
    "model": {"architecture": "qwen3", "size": "tiny", "tokenizer": {"train": {"vocab_size": 300}}},
    "data": {"train": "python_reference"},
}
PYTHON = re.compile(
    r"<class|\('|\['|\{'|PosixPath|\b(None|True|False|NoneType|str|int|float|tuple|dict)\b|\^|\\|Traceback|"
    r"Input should|should be|value_error|Value error|ValueError|valid (integer|number|string|boolean)|instance of"
)


def error_of(changes: dict[str, Any], *words: str) -> str:
    overrides = to_overrides(words, sections=list(Recipe.model_fields), options=("--devices", "--resume"))
    with pytest.raises(RecipeError) as caught:
        read({**BASE, **changes}, *overrides)
    return str(caught.value)


def error_of_words(*words: str) -> str:
    with pytest.raises(RecipeError) as caught:
        read(BASE, *to_overrides(words, sections=list(Recipe.model_fields), options=("--devices", "--resume")))
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "setting"),
    [
        ("learning_rate", 2e-5, "optimizer.lr=2e-5"),
        ("num_train_epochs", 3, "duration.epochs=3"),
        ("max_steps", 100, "duration.steps=100"),
        ("micro_batch_size", 4, "batch.per_device=4"),
        ("per_device_train_batch_size", 4, "batch.per_device=4"),
        ("train_micro_batch_size_per_gpu", 4, "batch.per_device=4"),
        ("gradient_accumulation_steps", 8, "batch.accumulate=8"),
        ("global_batch_size", 64, "batch.global=64"),
        ("max_seq_length", 2048, "data.sequence_length=2048"),
        ("sequence_len", 2048, "data.sequence_length=2048"),
        ("lora_r", 16, "model.lora.r=16"),
        ("bf16", True, "precision=bf16"),
        ("mixed_precision", "bf16", "precision=bf16"),
        ("fsdp", "full_shard auto_wrap", "sharding.strategy=full"),
        ("fsdp_sharding_strategy", "SHARD_GRAD_OP", "sharding.strategy=grad_op"),
        ("gradient_checkpointing", True, "sharding.activation_checkpointing=full"),
        ("optim", "adamw_torch_fused", "optimizer.kind=adamw"),
        ("lr_scheduler_type", "constant_with_warmup", "schedule.kind=constant"),
        ("warmup_ratio", 0.03, "schedule.warmup=0.03"),
        ("gradient_clip_val", 1.0, "optimizer.clip=1.0"),
        ("accelerator", "gpu", "topology.device=cuda"),
        ("report_to", "wandb", "log.sinks=[wandb]"),
    ],
)
def test_another_trainers_key_is_answered_with_ours_which_works(key: str, value: Any, setting: str) -> None:
    shown = "true" if value is True else str(value)
    messages = [
        error_of({key: value}),
        error_of({"training": {key: value}}),
        error_of_words(f"{key}={shown}"),
    ]
    flag = to_overrides([f"--{key}", shown], sections=list(Recipe.model_fields), options=())
    read(BASE, *flag)  # as a flag it is taken over
    assert {setting.partition("=")[0] for setting in flag} >= {setting.partition("=")[0]}
    for message in messages:
        assert f"Here it is {setting.partition('=')[0]}: write " in message
        assert setting in message
        written = re.search(r"write (.*) in the recipe, or '?(.*?)'? on the command line", message)
        assert written
        read(BASE, written[2])  # pasted, it is accepted


def test_keys_inside_accelerate_and_deepspeed_sections_are_answered() -> None:
    message = error_of(
        {
            "fsdp_config": {"fsdp_transformer_layer_cls_to_wrap": "Block,Other", "fsdp_offload_params": True},
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
            "bf16": {"enabled": True},
        }
    )
    for words in (
        "write sharding: {wrap: {classes: [Block, Other]}}",
        "sharding.cpu_offload=true",
        "zero_optimization.stage is not a known key. Here it is sharding.strategy: write sharding: {strategy: full}",
        "zero_optimization.offload_optimizer.device is not a known key. Here it is sharding.cpu_offload",
        "bf16.enabled is not a known key. Here it is precision: write precision: bf16",
    ):
        assert words in message


@pytest.mark.parametrize("word", ["FULL_SHARD", "zero3", "ddp", "fsdp", "HYBRID_SHARD", "no_shard"])
def test_another_trainers_strategy_is_read_as_ours_with_a_note(word: str) -> None:
    reading = read(BASE, f"sharding={word}")
    ours = foreign_keys.of_value("sharding.strategy", word)
    assert reading.recipe.sharding.strategy == ours
    assert f"sharding.strategy: {word} is read as {ours}" in reading.overridden


@pytest.mark.parametrize(("word", "ours"), [("3", "full"), ("1", "grad_op"), ("true", "full"), ("deepspeed", "full")])
def test_a_word_that_could_mean_two_things_is_answered_with_ours(word: str, ours: str) -> None:
    """1 is FULL_SHARD for accelerate and the first ZeRO stage for DeepSpeed."""
    assert f"(here {word} is {ours})" in error_of_words(f"sharding.strategy={word}")


def test_a_typo_in_our_key_suggests_our_key() -> None:
    assert "Did you mean --optimizer.KEY?" in error_of_words("--optimzer.lr", "1")
    assert "did you mean 'optimizer'" in error_of({"optimiser": {"lr": 1e-3}})
    assert "did you mean 'every_steps'" in error_of_words("evaluate.steps=100")
    assert "if it is off, leave it out" in error_of_words("fp16=false")


def test_short_forms() -> None:
    assert read_recipe(BASE, "objective=causal_lm").objective.kind() == "causal_lm"
    assert read_recipe(BASE, "optimizer=muon").optimizer.kind() == "muon"
    assert read_recipe(BASE, "schedule=linear").schedule.kind() == "linear"
    assert read_recipe(BASE, "data.train=digits").data.train.kind() == "digits"
    assert read_recipe(BASE, "topology.launcher=local").topology.launcher.kind() == "local"
    with_adapters = read_recipe({**BASE, "model": {**BASE["model"], "lora": True}})
    assert with_adapters.model.lora.r == 16  # type: ignore[attr-defined]
    off = {**BASE, "model": {**BASE["model"], "lora": False}, "ema": False, "checkpoint": {"best": False}}
    assert (read_recipe(off).model.lora, read_recipe(off).ema, read_recipe(off).checkpoint.best) == (None, None, None)  # type: ignore[attr-defined]
    switched_off = read_recipe({**BASE, "model": {**BASE["model"], "lora": {"r": 8}}}, "model.lora=false")
    assert switched_off.model.lora is None  # type: ignore[attr-defined]


def keys(cls: type[Section], where: str = "", depth: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every key path, with the kinds that must be chosen for it."""
    for key, spec in keys_of(cls).items():
        path = f"{where}.{key}" if where else key
        yield path, {}
        for option in options(spec.annotation):
            member = option.section
            if member is None or option.form != "value" or depth > 2:
                continue
            if issubclass(member, Part):
                yield f"{path}.kind", {}
                for kind in kinds(member):
                    for inner, chosen in keys(part_class(member, kind, where=""), path, depth + 1):
                        yield inner, {path: kind, **chosen}
            else:
                yield from keys(member, path, depth + 1)


WRONG = [
    None,
    True,
    -1,
    0,
    1.5,
    float("inf"),
    float("nan"),
    10**30,
    "",
    "x y",
    [],
    ["x"],
    [None],
    {},
    {"x": 1},
    {None: 1},
]
WRONG += [{"kind": ["a"]}, {"kind": "os.path"}]


def test_no_message_about_a_wrong_value_shows_python_or_pydantic() -> None:
    """Every key of the recipe with values of every wrong kind; a mistake is a RecipeError in plain words."""
    tried = 0
    for place, (path, chosen) in enumerate(dict.fromkeys((p, tuple(c.items())) for p, c in keys(Recipe))):
        for value in WRONG[place % 4 :: 4] if path.count(".") > 1 else WRONG:
            settings: dict[str, Any] = {section: dict(values) for section, values in BASE.items()}
            for part, kind in chosen:
                put(settings, part, {"kind": kind})
            put(settings, path, value)
            tried += 1
            said = mistake_in(settings)
            assert not PYTHON.search(said), (path, value, said)
    assert tried > 1500


def mistake_in(settings: dict[str, Any]) -> str:
    """The message about a recipe; empty if it is accepted."""
    try:
        read(settings)
    except RecipeError as error:
        return str(error)
    return ""


def put(settings: dict[str, Any], path: str, value: Any) -> None:
    *outer, last = path.split(".")
    for name in outer:
        inner = settings.get(name)
        settings[name] = dict(inner) if isinstance(inner, dict) else {}
        settings = settings[name]
    settings[last] = value


def test_a_wrong_run_name_is_answered_with_the_allowed_characters() -> None:
    assert "name = 'a b': it must be letters, digits, dots, hyphens and underscores" in error_of_words("name=a b")


def test_a_missing_file_does_not_suggest_hidden_files(tmp_path: Path) -> None:
    for name in (".bashrc", ".ssh.yaml", "notes.txt", "train.jsonl"):
        (tmp_path / name).touch()
    with pytest.raises(DataError, match="Found in .*: notes.txt, train.jsonl") as caught:
        Files(path=str(tmp_path / "zzz")).open()
    assert "bashrc" not in str(caught.value)
    with pytest.raises(RecipeError) as recipe:
        read(str(tmp_path / "zzz.yaml"))
    assert ".ssh" not in str(recipe.value)


def test_numbers_agree_with_their_nouns() -> None:
    assert [counted(number, "step") for number in (0, 1, 2, 2500)] == ["0 steps", "1 step", "2 steps", "2,500 steps"]
    assert [counted(1.0, "epoch"), counted(1.5, "epoch"), counted(3, "batch"), counted(2, "entry")] == [
        "1 epoch",
        "1.5 epochs",
        "3 batches",
        "2 entries",
    ]
