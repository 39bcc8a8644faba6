"""Flags of other scripts after `fullshard train RECIPE`."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.dialects.command_line import Given, read_words, recipe_and_rest
from fullshard.dialects.tables import dialects
from fullshard.errors import RecipeError
from fullshard.recipe import Recipe
from fullshard.recipes.read import read


def given(*words: str) -> Given:
    return read_words(words, sections=list(Recipe.model_fields), options=("--devices", "--resume"))


def settings(line: str) -> dict[str, str]:
    return dict(setting.split("=", 1) for setting in given(*line.split()).settings)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--epochs 100", {"duration.epochs": "100"}),
        ("--train-batch-sz 128", {"batch.per_device": "128", "batch.global": "null"}),
        ("--batch_size=2", {"batch.per_device": "2", "batch.global": "null"}),
        ("--val-batch-sz 16", {"evaluate.per_device": "16"}),
        ("--mp-dt float16", {"precision": "float16"}),
        ("--use-scheduler False", {"schedule.kind": "constant"}),
        ("--no-use-scheduler", {"schedule.kind": "constant"}),
        ("--use-scheduler True --scheduler-type cosine", {"schedule.kind": "cosine"}),
        ("--scheduler-type none", {"schedule.kind": "constant"}),
        (
            "--use-scheduler True --scheduler-type step --scheduler-step-size 100 --scheduler-gamma 0.5",
            {"schedule.kind": "step", "schedule.step_size": "100", "schedule.gamma": "0.5"},
        ),
        ("--dir-path-save checkpoints", {"output": "checkpoints"}),
        ("--epoch-save-freq 10", {"checkpoint.every_epochs": "10"}),
        ("--save-best True", {"checkpoint.best": "{}"}),
        ("--save-best", {"checkpoint.best": "{}"}),
        ("--no-save-best", {"checkpoint.best": "null"}),
        ("--dataset-path /data/set", {"data.train": "/data/set"}),
        ("--fsdp-sharding-strategy FULL_SHARD", {"sharding.strategy": "full"}),
        ("--fsdp_sharding_strategy SHARD_GRAD_OP", {"sharding.strategy": "grad_op"}),
        ("--fsdp-state-dict-type sharded", {"checkpoint.format": "sharded"}),
        ("--fsdp full_shard", {"sharding.strategy": "full"}),
        ("--gradient-accumulation 8", {"batch.accumulate": "8"}),
        ("--learning-rate 2e-5", {"optimizer.lr": "2e-5"}),
        ("--lr 1e-4", {"optimizer.lr": "1e-4"}),
        ("--num-workers 4", {"data.workers": "4"}),
        ("--model-config model_config_1.7B", {"model.size": "1.7B"}),
        ("--model_config model_config_1.7B", {"model.size": "1.7B"}),
        ("--gradient-checkpointing", {"sharding.activation_checkpointing": "full"}),
        ("--use-lora", {"model.lora": "true"}),
        ("--use-lora False", {"model.lora": "false"}),
        ("--adam-beta1 0.8 --adam-beta2 0.99", {"optimizer.betas": "[0.8, 0.99]"}),
        ("--save-strategy steps --save-steps 7", {"checkpoint.every_steps": "7", "checkpoint.every_epochs": "null"}),
        ("--optim adamw_torch", {"optimizer.kind": "adamw"}),
        ("--precision bf16-mixed", {"precision": "bf16-mixed"}),
        ("--fp16", {"precision": "fp16"}),
        ("--mode production", {}),
    ],
)
def test_a_flag_is_a_setting_of_ours(line: str, expected: dict[str, str]) -> None:
    assert settings(line) == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--batch-size 2 --train-batch-sz 4", "--batch-size 2 and --train-batch-sz 4 on the command line both set"),
        ("--use-scheduler False --scheduler-type cosine", "both set schedule.kind"),
        ("--lr 1 --learning-rate 2", "both set optimizer.lr"),
        ("--mode fast", "--mode fast: fast is not known. Known: production, basic."),
        ("--no-resume", "Write --resume never."),
        ("--load-in-4bit", "Quantised weights are not trained"),
        ("--lora-modules x", "neither an option nor a key"),
        ("--zero-optimization.stage 3", "Here it is sharding.strategy: write sharding: {strategy: full}"),
    ],
)
def test_conflicts_and_what_is_refused(line: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        given(*line.split())
    assert message in str(caught.value)


def test_two_flags_that_say_the_same_agree() -> None:
    assert settings("--lr 1e-4 --learning-rate 0.0001") == {"optimizer.lr": "1e-4"}


def test_a_setting_of_ours_wins_over_a_flag_and_says_so() -> None:
    found = given("--epochs", "100", "--train-batch-sz", "128", "duration.steps=2", "batch.per_device=4")
    assert found.settings == ["batch.global=null", "duration.steps=2", "batch.per_device=4"]
    assert found.overridden() == [
        "--epochs 100 gives way to the settings that follow it",
        "--train-batch-sz 128 gives way to the settings that follow it",
    ]


def test_a_data_folder_with_two_files_is_both(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    assert settings(f"--data-dir-path {folder}") == {"data.train": str(folder)}
    for name in ("train.csv", "val.csv"):
        (folder / name).touch()
    assert settings(f"--data-dir-path {folder}") == {
        "data.train": str(folder / "train.csv"),
        "data.validation": str(folder / "val.csv"),
    }


def test_the_recipe_may_be_named_by_config() -> None:
    assert recipe_and_rest("--config", ["paper_r64", "--fp16"]) == ("paper_r64", ["--fp16"])
    assert recipe_and_rest("--fp16", ["--config=paper_r64"]) == ("paper_r64", ["--fp16"])
    assert recipe_and_rest("paper_r64", ["--config", "paper_r64", "seed=1"]) == ("paper_r64", ["seed=1"])
    assert recipe_and_rest("sft", ["seed=1"]) == ("sft", ["seed=1"])
    with pytest.raises(RecipeError, match="sft and --config paper_r64 name two recipes"):
        recipe_and_rest("sft", ["--config", "paper_r64"])


def test_save_best_keeps_the_metric_of_the_recipe_and_switches_it_on() -> None:
    best = read("embedding", "checkpoint.best={}").recipe.checkpoint.best
    assert best is not None
    assert best.metric == "recall@10"
    base = {"model": "m", "data": {"train": "d"}, "checkpoint": {"best": None}}
    assert read(base).recipe.checkpoint.best is None
    on = read(base, "checkpoint.best={}").recipe.checkpoint.best
    assert on is not None
    assert on.metric == "loss"


def test_help_shows_every_flag_of_the_table() -> None:
    shown = CliRunner().invoke(app, ["train", "--help-aliases"]).output
    for row in dialects()["flags"].rows:
        for name in row.theirs:
            assert "." in name or f"--{name.replace('_', '-')}" in shown


def test_words_of_other_trainers_in_a_recipe_of_ours_are_read_with_a_note() -> None:
    base = {
        "model": "m",
        "data": {"train": "d"},
        "sharding": {"strategy": "HYBRID_SHARD", "activation_checkpointing": True},
        "schedule": "none",
        "optimizer": {"kind": "adamw_torch", "lr": 1e-4},
        "checkpoint": {"format": "FULL_STATE_DICT"},
    }
    reading = read(base)
    recipe = reading.recipe
    assert (recipe.sharding.strategy, recipe.sharding.activation_checkpointing) == ("hybrid", "full")
    assert (recipe.schedule.kind(), recipe.optimizer.kind(), recipe.checkpoint.format) == ("constant", "adamw", "full")
    assert recipe.optimizer.lr == 1e-4
    assert "sharding.activation_checkpointing: true is read as full" in reading.overridden
    assert len([line for line in reading.overridden if "is read as" in line]) == 5
