"""Files of other trainers as people really have them: wrong types, switches that are off, keys that contradict.

What changes the training is never dropped silently, and a wrong value never ends in a traceback.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.dialects import merged_files, report
from fullshard.dialects.foreign_keys import of_key
from fullshard.dialects.readers import deepspeed
from fullshard.dialects.rows import Dialect, File, nested
from fullshard.dialects.tables import dialects
from fullshard.dialects.translate import Translation, translate
from fullshard.errors import FullshardError, RecipeError
from fullshard.formatting.yaml_text import parse_value
from fullshard.recipes.read import read

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
    lora = nested(done("llama_factory", lora_rank=32).settings)["model"]["lora"]
    assert lora == {"r": 32, "alpha": 64, "dropout": 0.0, "targets": "all-linear"}


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


DEFAULTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    # What each trainer does with a key that its file leaves out, as its own source says.
    ("hf_trainer", {}, {"precision": "fp32", "optimizer.lr": 5e-5, "sharding.activation_checkpointing": None}),
    ("hf_trainer", {}, {"checkpoint.keep": None, "schedule.kind": "linear", "duration.epochs": 3.0}),
    ("hf_trainer", {"fp16": True}, {"precision": "fp16"}),
    ("hf_trainer", {"bf16": False}, {"precision": "fp32"}),
    (
        "hf_trainer",
        {"packing": True},  # a key of TRL
        {"precision": "bf16", "optimizer.lr": 2e-5, "sharding.activation_checkpointing": "full"},
    ),
    ("hf_trainer", {"packing": True, "bf16": False}, {"precision": "fp32"}),
    ("hf_trainer", {"lora_r": 8}, {"model.lora": None, "model.lora.r": None, "model.lora.dropout": None}),
    (
        "hf_trainer",
        {"use_peft": True, "lora_r": 8},
        {"model.lora.r": 8, "model.lora.dropout": 0.05, "model.lora.targets": ["q_proj", "v_proj"]},
    ),
    ("axolotl", {}, {"schedule.warmup": 0.03, "schedule.kind": "cosine", "checkpoint.keep": 4, "precision": None}),
    ("axolotl", {"max_steps": 1000}, {"schedule.warmup": 30}),
    ("axolotl", {"max_steps": 10_000}, {"schedule.warmup": 100}),
    ("axolotl", {"max_steps": 10_000, "warmup_ratio": 0.1}, {"schedule.warmup": 0.1}),
    ("axolotl", {"bf16": False}, {"precision": "fp32"}),
    ("axolotl", {"lora_r": 8}, {"model.lora.r": None}),
    (
        "llama_factory",
        {},
        {"data.pack": False, "data.sequence_length": 2048, "model.lora.r": 8, "model.lora.alpha": 16},
    ),
    ("llama_factory", {}, {"sharding.activation_checkpointing": "full", "model.lora.targets": "all-linear"}),
    ("llama_factory", {"disable_gradient_checkpointing": True}, {"sharding.activation_checkpointing": "none"}),
    ("llama_factory", {"stage": "pt"}, {"data.pack": True}),
    ("llama_factory", {"stage": "pt", "packing": False}, {"data.pack": False}),
    ("llama_factory", {"packing": False, "neat_packing": True}, {"data.pack": True}),
    ("torchtune", {}, {"schedule.kind": "constant", "optimizer.clip": None, "data.sequence_length": 1024}),
    ("torchtune", {}, {"optimizer.weight_decay": 0.01, "data.pack": False}),
    ("torchtitan", {}, {"precision": "bfloat16", "schedule.warmup": 200, "optimizer.lr": 8e-4}),
    ("torchtitan", {}, {"sharding.activation_checkpointing": "selective", "batch.per_device": 8}),
    ("lightning", {}, {"optimizer.clip": None}),
]


@pytest.mark.parametrize(("name", "values", "expected"), DEFAULTS)
def test_what_a_file_leaves_out_is_as_its_own_trainer_does_it(
    name: str, values: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = done(name, **values)
    assert not found.refused
    assert {key: found.settings.get(key) for key in expected} == expected
    said = {key for entry in found.said for key in entry.settings}
    assert set(found.settings) == said  # nothing is set that no line says


def test_the_rank_of_adapters_that_trl_would_not_train_says_so() -> None:
    [entry] = [entry for entry in done("hf_trainer", lora_r=8).said if entry.key == "lora_r"]
    assert (entry.verdict, entry.why) == ("no effect", "use_peft is not on, so TRL trains the whole model")


def test_a_set_of_torchtune_may_have_another_source() -> None:
    component = "torchtune.datasets.alpaca_dataset"
    found = done("torchtune", dataset___component_=component, dataset__source="yahma/alpaca-cleaned")
    assert found.settings["data.train"] == {"kind": "hub", "name": "yahma/alpaca-cleaned"}


def test_fsdp_settings_may_be_in_a_json_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`fsdp_config: FILE.json` in a file, and `--fsdp-config FILE.json` on the command line."""
    section = {"reshard_after_forward": False, "cpu_offload": "yes", "version": 2, "activation_checkpointing": True}
    (tmp_path / "fsdp.json").write_text(json.dumps(section))
    expected = {"strategy": "grad_op", "cpu_offload": True, "activation_checkpointing": "full"}
    found = translate(dialects()["hf_trainer"], {"fsdp": True, "fsdp_config": "fsdp.json"}, folder=tmp_path)
    assert not found.refused
    assert nested(found.settings)["sharding"] == expected
    monkeypatch.chdir(tmp_path)
    sharding = read("quickstart", preset="fsdp.json").recipe.sharding
    assert {key: getattr(sharding, key) for key in expected} == expected
    shown = CliRunner().invoke(app, ["train", "quickstart", "--dry-run", "--fsdp-config", "fsdp.json"]).output
    assert "grad_op" in shown


def test_fsdp_settings_in_a_file_that_is_missing_or_wrong_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [entry] = translate(dialects()["hf_trainer"], {"fsdp_config": "fsdp.json"}, folder=tmp_path).refused
    assert entry.why == f"there is no file fsdp.json here or in {tmp_path}"
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=r"fsdp.json cannot be read: No such file"):
        read("quickstart", preset="fsdp.json")
    (tmp_path / "fsdp.json").write_text('{"cpu_offload": "maybe", "reshard": 1}')
    with pytest.raises(RecipeError) as caught:
        read("quickstart", preset="fsdp.json")
    assert "fsdp.json (the HF Trainer), fsdp_config.cpu_offload: it must be true or false, not 'maybe'." in str(
        caught.value
    )
    assert "fsdp_config.reshard: no key of the HF Trainer that fullshard knows." in str(caught.value)


def test_a_reference_of_torchtune_is_the_value_of_the_other_key() -> None:
    found = done("torchtune", batch_size=4, batch_size_val="${batch_size}", root="/data", output_dir="${root}/out")
    assert found.settings["evaluate.per_device"] == 4
    assert (found.settings["output"], found.settings["name"]) == ("/data", "out")
    assert verdict(done("torchtune", batch_size_val="${nothing}"), "batch_size_val") == "refused"


def test_replicas_of_sharded_groups_are_hybrid() -> None:
    section = {"fsdp_version": 2, "fsdp_reshard_after_forward": True}
    replicas = {"parallelism_config_dp_replicate_size": 2}
    found = done("accelerate", distributed_type="FSDP", fsdp_config=section, parallelism_config=replicas)
    assert found.settings == {"sharding.strategy": "hybrid"}


def test_several_data_sets_are_refused_with_what_to_write() -> None:
    listed = [{"path": "a/one", "type": "alpaca"}, {"path": "b/two", "split": "train[:5%]"}]
    [entry] = done("axolotl", datasets=listed).refused
    _, _, text = entry.why.partition("write data.train: ")
    source = parse_value(text, where="data.train")
    assert [part["source"]["name"] for part in source["parts"]] == ["a/one", "b/two"]
    base = {"model": "m", "data": {"train": source}}
    assert read(base).recipe.data.train.kind() == "mixture"


@pytest.mark.parametrize("said", [{}, {"bf16": False, "fp16": False}])
def test_the_precision_of_a_launcher_is_over_one_that_the_training_file_leaves_out(
    tmp_path: Path, said: dict[str, Any]
) -> None:
    """As under `accelerate launch`: TrainingArguments without bf16 and fp16 compute in its mixed precision."""
    train, launch = tmp_path / "train.json", tmp_path / "launch.json"
    train.write_text(json.dumps({"model_name_or_path": "m", "train_file": "d.jsonl", "num_train_epochs": 1, **said}))
    launch.write_text(json.dumps({"distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 2}))
    assert read(str(train)).recipe.precision == "fp32"
    assert read(str(train), launch_file=str(launch)).recipe.precision == "bf16"
    assert read(str(train), "precision=fp16", launch_file=str(launch)).recipe.precision == "fp16"
    merged = merged_files.read([str(train), str(launch)])
    assert merged.settings["precision"] == "bf16"
