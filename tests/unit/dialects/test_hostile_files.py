"""Files of other trainers as people really have them: wrong types, switches that are off, keys that contradict.

What changes the training is never dropped silently, and a wrong value never ends in a traceback.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from fullshard.dialects import report
from fullshard.dialects.foreign_keys import of_key
from fullshard.dialects.readers import deepspeed
from fullshard.dialects.rows import Dialect, File, nested
from fullshard.dialects.tables import dialects
from fullshard.dialects.translate import Translation, translate
from fullshard.errors import FullshardError, RecipeError

JUNK: list[Any] = [
    *(True, False, 0, -1, 1.5, "x", "", "auto", "1"),
    *([], {}, [1], [None], ["a", {}], [{}], {"a": 1}, {"type": None}, {"type": [1], "params": [1]}),
]


def done(name: str, **values: Any) -> Translation:
    return translate(dialects()[name], nested({key.replace("__", "."): value for key, value in values.items()}))


def verdict(found: Translation, key: str) -> str:
    return next(said.verdict for said in found.said if said.key == key)


@pytest.mark.parametrize("dialect", dialects().values(), ids=list(dialects()))
def test_no_value_of_any_key_ends_in_a_traceback(dialect: Dialect) -> None:
    for key in dialect.spellings:
        for value in JUNK:
            with contextlib.suppress(FullshardError):
                report.table(translate(dialect, nested({key: value})), columns=80)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("hf_trainer", {"use_peft": False, "lora_r": 16, "lora_target_modules": ["q_proj"]}),
        ("llama_factory", {"finetuning_type": "full", "lora_target": "all", "lora_rank": 8, "lora_dropout": 0.1}),
        ("axolotl", {"lora_r": 16, "lora_dropout": 0.1, "lora_target_linear": True}),
    ],
)
def test_settings_of_adapters_train_none_if_their_switch_is_off(name: str, values: dict[str, Any]) -> None:
    found = done(name, **values)
    assert not [key for key in found.settings if key.startswith("model.lora")]
    assert not [said for said in found.said if "lora" in str(said.settings)]


def test_adapters_that_are_refused_do_not_become_a_training_of_the_whole_model() -> None:
    found = done("axolotl", adapter="qlora", load_in_4bit=True, lora_r=32)
    assert verdict(found, "adapter") == "refused"
    assert nested(found.settings)["model"]["lora"] == {"r": 32}


def test_llama_factory_trains_adapters_if_the_file_does_not_say() -> None:
    assert nested(done("llama_factory", lora_rank=32).settings)["model"] == {"lora": {"r": 32, "alpha": 64}}


def test_a_default_does_not_replace_a_value_that_asks_for_nothing() -> None:
    assert done("training_yaml", warmup_ratio=0).settings["schedule.warmup"] == 0
    assert done("axolotl", warmup_steps=0).settings["schedule.warmup"] == 0
    assert done("axolotl").settings["schedule.warmup"] == 0.03
    assert done("axolotl", warmup_steps=0, warmup_ratio=0.1).settings["schedule.warmup"] == 0.1


@pytest.mark.parametrize("off", [False, 0, "false", "no"])
def test_both_half_precisions_switched_off_is_fp32_however_it_is_written(off: Any) -> None:
    assert done("hf_trainer", bf16=off, fp16=off).settings["precision"] == "fp32"
    assert done("hf_trainer", bf16=off, torch_dtype="float16").settings["precision"] == "float16"


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("hf_trainer", "accelerator_config", {"split_batches": True}),
        ("hf_trainer", "lr_scheduler_kwargs", {"num_cycles": 2}),
        ("hf_trainer", "lora_modules_to_save", ["embed_tokens"]),
        ("axolotl", "peft_use_dora", True),
        ("axolotl", "roles_to_train", ["user", "assistant"]),
        ("llama_factory", "additional_target", "embed_tokens"),
        ("torchtune", "model__apply_lora_to_output", True),
        ("torchtitan", "model__converters", ["float8"]),
        ("lightning", "trainer__fast_dev_run", True),
        ("lightning", "trainer__limit_train_batches", 2),
        ("lightning", "optimizer__class_path", "torch.optim.SGD"),
        ("deepspeed", "optimizer", {"type": "Adam", "params": {"lr": 1e-4, "adam_w_mode": False}}),
    ],
)
def test_what_changes_the_training_and_is_not_here_is_refused(name: str, key: str, value: Any) -> None:
    assert verdict(done(name, **{key: value}), key.replace("__", ".")) == "refused"


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("hf_trainer", {"assistant_only_loss": False}, {"data.encode": {"kind": "chat", "train_on": "all"}}),
        ("hf_trainer", {"assistant_only_loss": True}, {"data.encode": None}),
        (
            "hf_trainer",
            {"assistant_only_loss": False, "dataset_text_field": "text"},
            {"data.encode": {"kind": "text", "column": "text"}},
        ),
        ("hf_trainer", {"lr_scheduler_type": "constant", "warmup_ratio": 0.1}, {"schedule.warmup": None}),
        ("hf_trainer", {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 9}, {"schedule.warmup": 9}),
        (
            "deepspeed",
            {"train_batch_size": 256, "gradient_accumulation_steps": 4},
            {"batch.global": 256, "batch.accumulate": None, "batch.per_device": None},
        ),
        (
            "deepspeed",
            {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4},
            {"batch.global": None, "batch.accumulate": 4, "batch.per_device": 4},
        ),
        (
            "deepspeed",
            {"scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 10, "cos_min_ratio": 0.1}}},
            {"schedule.kind": "cosine", "schedule.warmup": 10, "schedule.floor": 0.1},
        ),
        ("torchtitan", {"training__dtype": "bfloat16"}, {"precision": "bf16-pure"}),
        (
            "torchtitan",
            {"training__dtype": "bfloat16", "training__mixed_precision_param": "bfloat16"},
            {"precision": "bf16-pure"},
        ),
        (
            "torchtitan",
            {"parallelism__data_parallel_shard_degree": -1, "parallelism__fsdp_reshard_after_forward": "never"},
            {"sharding.strategy": "grad_op"},
        ),
        (
            "torchtune",
            {"dataset___component_": "torchtune.datasets.alpaca_cleaned_dataset"},
            {"data.encode": {"kind": "chat", "train_on": "all"}},
        ),
        (
            "torchtune",
            {"dataset___component_": "torchtune.datasets.alpaca_dataset", "dataset__train_on_input": False},
            {"data.encode": None},
        ),
        ("lightning", {"optimizer__class_path": "torch.optim.AdamW"}, {"optimizer.kind": "adamw"}),
        ("accelerate", {"distributed_type": False, "num_processes": 1}, {"sharding.strategy": None}),
    ],
)
def test_means_what_it_means_there(name: str, values: dict[str, Any], expected: dict[str, Any]) -> None:
    found = done(name, **values)
    assert not found.refused
    assert {key: found.settings.get(key) for key in expected} == expected


def test_a_stage_and_a_section_that_are_none_are_said() -> None:
    with pytest.raises(RecipeError, match=r"training_stages.first: 1 is not a stage"):
        done("staged_config", training_stages={"first": 1})
    said = done("accelerate", distributed_type="FSDP", fsdp_config=[1]).refused
    assert [(entry.key, entry.why) for entry in said] == [("fsdp_config", "a section of keys is needed here")]


def test_a_named_file_that_is_broken_is_not_taken_for_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "zero3.json").write_text("{")
    with pytest.raises(RecipeError, match=r"zero3.json cannot be read as JSON"):
        deepspeed("zero3.json", File(folder=tmp_path))
    with pytest.raises(RecipeError, match=r"zero3.json cannot be read as JSON"):
        translate(dialects()["hf_trainer"], {"fsdp_config": "zero3.json"}, folder=tmp_path)
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    monkeypatch.chdir(tmp_path)  # as trainers read it, from where they start
    assert done("axolotl", deepspeed="ds.json").settings["sharding.strategy"] == "grad_op"


def test_a_key_in_a_recipe_of_ours_with_a_refused_value_is_not_called_superfluous() -> None:
    assert of_key("adapter", "qlora") == "Qlora is not available: lora and full are. Here it is model.lora."
    assert of_key("adapter", "lora") == (
        "Here it is model.lora: write model: {lora: true} in the recipe, or model.lora=true on the command line."
    )
    assert of_key("use_peft", "maybe") == "It must be true or false, not 'maybe'. Here it is model.lora."


def test_the_table_fits_the_terminal() -> None:
    found = done("torchtitan", model__converters=["float8"], lr_scheduler__decay_ratio=0.8, training__seq_len=48)
    lines = report.table(found, columns=80).splitlines()
    assert max(map(len, lines)) <= 80
    assert "cosine and linear decay over the whole run" in " ".join(" ".join(lines).split())
    assert len(report.table(found).splitlines()) == len(found.said) + 1
