"""The catalogue of seeded mistakes: each is made for real, in files, variables or the recipe, and must be found before
the first step, by its name, with where it is, what was found against what is allowed, and what to do.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fullshard.check import machine
from fullshard.check.command import _merged
from fullshard.config.part import plain
from fullshard.recipes.read import read
from tests.check import on_ranks
from tests.check.healthy_recipe import By, Mistake, Workspace, files_in
from tests.ranks import RankPool
from tests.slow import one_in

MISTAKES: list[Mistake] = []


def mistake(
    area: str, where: str, *says: str, remedy: str, level: str = "error", by: By = "check", code: int | None = None
) -> Callable[[Callable[[Workspace], None]], Callable[[Workspace], None]]:
    """Puts a function that makes a mistake into the catalogue; `where` is `section: check`."""
    section, _, check = where.partition(": ")
    code = (2 if level == "error" else 0) if code is None else code

    def put(make: Callable[[Workspace], None]) -> Callable[[Workspace], None]:
        MISTAKES.append(Mistake(area, make, section, check, says, remedy, level, by, code))
        return make

    return put


# Recipe ----------------------------------------------------------------------------------------------------------


@mistake(
    "recipe", "recipe: recipe", "recipe.yaml, line", "optimiser is not a known key", remedy="did you mean 'optimizer'"
)
def unknown_section(workspace: Workspace) -> None:
    workspace.recipe["optimiser"] = {"lr": 1e-3}


@mistake("recipe", "recipe: recipe", "batch.per_devices", remedy="did you mean 'per_device'")
def unknown_key(workspace: Workspace) -> None:
    workspace.set("batch", per_devices=4)


@mistake(
    "recipe",
    "recipe: recipe",
    "command line: optimizer.learning_rate is not a known key",
    remedy="write optimizer: {lr: 1e-3} in the recipe, or optimizer.lr=1e-3 on the command line",
)
def unknown_key_on_the_command_line(workspace: Workspace) -> None:
    workspace.words = ["optimizer.learning_rate=1e-3"]


@mistake("recipe", "recipe: recipe", "schedule.kind", "cosin", remedy="did you mean 'cosine'")
def unknown_kind(workspace: Workspace) -> None:
    workspace.recipe["schedule"] = {"kind": "cosin"}


@mistake("recipe", "recipe: recipe", "batch.per_device", "'four'", remedy="whole number")
def word_for_a_number(workspace: Workspace) -> None:
    workspace.set("batch", per_device="four")


@mistake(
    "recipe",
    "recipe: recipe",
    "recipe.yaml, line 2, column 5",
    "name: y",
    remedy="Check the indentation and the colons",
)
def broken_yaml(workspace: Workspace) -> None:
    write = workspace.write
    workspace.write = lambda: _then(write(), lambda path: path.write_text("model: {path: x\nname: y\n"))  # type: ignore[method-assign]


def _then(path: Path, act: Callable[[Path], Any]) -> Path:
    act(path)
    return path


@mistake("recipe", "recipe: recipe", "batch.accumulate and batch.global exclude each other", remedy="Give one of them")
def accumulate_and_global(workspace: Workspace) -> None:
    workspace.set("batch", **{"accumulate": 2, "global": 16})


@mistake("recipe", "recipe: batch", "batch.global = 10", "2 ranks", "8", remedy="Use batch.global = 8 or 16")
def global_that_does_not_divide(workspace: Workspace) -> None:
    workspace.set("batch", **{"global": 10})
    workspace.words = ["--devices", "2"]


@mistake("recipe", "recipe: recipe", "duration.epochs and duration.steps exclude each other", remedy="Give one of them")
def epochs_and_steps(workspace: Workspace) -> None:
    workspace.recipe["duration"] = {"epochs": 1, "steps": 10}


@mistake("recipe", "model: units", "sharding.wrap.classes", "LlamaDecoderLayer", remedy="Qwen3DecoderLayer")
def blocks_of_another_model(workspace: Workspace) -> None:
    workspace.set("sharding", wrap=["LlamaDecoderLayer"])


@mistake("recipe", "recipe: recipe", "sharding.wrap.classes and sharding.wrap.min_params", remedy="exclude each other")
def classes_and_min_params(workspace: Workspace) -> None:
    workspace.set("sharding", wrap={"classes": ["Qwen3DecoderLayer"], "min_params": 1000})


@mistake("recipe", "recipe: recipe", "checkpoint.best.metric = 'bleu'", remedy="accuracy, loss")
def best_by_an_unknown_number(workspace: Workspace) -> None:
    workspace.set("checkpoint", best={"metric": "bleu", "mode": "max"})
    workspace.set("data", holdout=0.1)
    workspace.set("evaluate", parts=["loss"])


@mistake("recipe", "recipe: conflict", "checkpoint.export = best", remedy="checkpoint.export: last")
def export_of_a_best_that_never_is(workspace: Workspace) -> None:
    workspace.set("checkpoint", export="best")


@mistake(
    "recipe", "recipe: no effect", "evaluate.patience", "no validation data", remedy="data.validation", level="warning"
)
def patience_without_validation(workspace: Workspace) -> None:
    workspace.set("evaluate", patience=2)


@mistake("recipe", "recipe: no effect", "schedule.warmup = 100", "6 steps", remedy="Shorten it", level="warning")
def warmup_longer_than_the_run(workspace: Workspace) -> None:
    workspace.set("schedule", warmup=100)


@mistake("recipe", "recipe: learning rate", "optimizer.lr = 10", "0.1", remedy="3e-4", level="warning")
def lr_of_ten(workspace: Workspace) -> None:
    workspace.set("optimizer", lr=10)


@mistake("recipe", "recipe: recipe", "optimizer.betas", "1.5", remedy="less than 1")
def betas_above_one(workspace: Workspace) -> None:
    workspace.set("optimizer", betas=[0.9, 1.5])


@mistake("recipe", "recipe: no effect", "checkpoint.every_steps = 1,000", "6 steps", remedy="Lower it", level="warning")
def checkpoints_after_the_end(workspace: Workspace) -> None:
    workspace.set("checkpoint", every_steps=1000)


@mistake("recipe", "recipe: no effect", "sharding.use_orig_params", "FSDP2", remedy="Leave it out", level="warning")
def settings_of_fsdp1(workspace: Workspace) -> None:
    workspace.set("sharding", use_orig_params=True)


@mistake("recipe", "recipe: recipe", "both set topology.devices", "--devices 2", remedy="Give one of them")
def devices_twice(workspace: Workspace) -> None:
    workspace.words = ["--devices", "2", "topology.devices=4"]


@mistake("recipe", "recipe: recipe", "my_partz.Objective", remedy="my_partz")
def a_part_that_cannot_be_imported(workspace: Workspace) -> None:
    workspace.recipe["objective"] = {"kind": "my_partz.Objective"}


@mistake("recipe", "recipe: recipe", "log.sinks[0].kind = 'tensorbord'", remedy="did you mean 'tensorboard'")
def unknown_sink(workspace: Workspace) -> None:
    workspace.set("log", sinks=["tensorbord"])


@mistake("recipe", "recipe: conflict", "evaluate.parts: sample", "the model has no tokenizer", remedy="model.tokenizer")
def prompts_without_a_tokenizer(workspace: Workspace) -> None:
    workspace.set("evaluate", parts=["loss", {"kind": "sample", "prompts": ["The"]}])
    workspace.set("data", holdout=0.1)


@mistake("recipe", "recipe: workers", "data.workers = 64", "1 rank", "cores", remedy="data.workers = ", level="warning")
def more_workers_than_cores(workspace: Workspace) -> None:
    workspace.set("data", workers=64)


# Environment -----------------------------------------------------------------------------------------------------


@mistake("environment", "environment: devices", "[0, 1] names GPUs", "on the CPU", remedy="--devices 2")
def gpu_ids_on_a_cpu(workspace: Workspace) -> None:
    workspace.words = ["--gpus", "0,1"]


@mistake("environment", "recipe: recipe", "names a GPU twice: [0, 0]", remedy="topology.devices")
def one_gpu_twice(workspace: Workspace) -> None:
    workspace.words = ["--gpus", "0,0"]


@mistake("environment", "environment: devices", "topology.device = cuda", "no GPU", remedy="topology.device=cpu")
def a_gpu_where_there_is_none(workspace: Workspace) -> None:
    workspace.set("topology", device="cuda")


@mistake("environment", "environment: cores", "64 ranks", remedy="--devices", level="warning")
def more_ranks_than_cores(workspace: Workspace) -> None:
    workspace.words = ["--devices", "64", "batch.global=256"]


@mistake(
    "environment", "recipe: recipe", "RANK=1 and WORLD_SIZE=16", "number of this node", remedy="--node-rank", by="train"
)
def rank_of_the_node(workspace: Workspace) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "16", "MASTER_ADDR": "localhost", "MASTER_PORT": "29512"}.items():
        workspace.patch.setenv(name, value)
    workspace.set("topology", nodes=2)


@mistake("environment", "environment: ranks", "RANK=1 and WORLD_SIZE=16", "set by hand", remedy="--node-rank")
def one_process_where_eight_were_promised(workspace: Workspace) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "16", "MASTER_ADDR": "localhost", "MASTER_PORT": "29512"}.items():
        workspace.patch.setenv(name, value)


@mistake("environment", "environment: ranks", "RANK=3 is set, WORLD_SIZE is not", remedy="Unset RANK")
def half_a_launcher(workspace: Workspace) -> None:
    workspace.patch.setenv("RANK", "3")


@mistake("environment", "environment: ranks", "--nodes 2", "where the nodes meet", remedy="--master HOST:PORT")
def nodes_without_a_meeting_place(workspace: Workspace) -> None:
    workspace.words = ["--nodes", "2"]


@mistake("environment", "environment: ranks", "cannot be used", "another run may have it", remedy="another port")
def a_port_that_is_taken(workspace: Workspace) -> None:
    taken = workspace.cleanup.enter_context(socket.create_server(("", 0)))
    workspace.words = ["--nodes", "2", "--node-rank", "0", "--master", f"localhost:{taken.getsockname()[1]}"]


@mistake("environment", "environment: compiler", "sharding.compile", "C++ compiler", remedy="sharding.compile=false")
def nothing_to_compile_with(workspace: Workspace) -> None:
    (workspace.folder / "bin").mkdir()
    workspace.patch.setenv("PATH", str(workspace.folder / "bin"))
    workspace.patch.delenv("CXX", raising=False)
    workspace.set("sharding", compile=True)


@mistake("environment", "environment: open files", "may open 200 files", "1024", remedy="ulimit -n", level="warning")
def few_open_files(workspace: Workspace) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    workspace.cleanup.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))


@mistake("environment", "environment: ranks", "'no-such-host.invalid'", remedy="IP address of node 0")
def master_that_nobody_knows(workspace: Workspace) -> None:
    workspace.words = ["--nodes", "2", "--node-rank", "1", "--master", "no-such-host.invalid:29500"]


@mistake(
    "environment", "environment: packages", "log.sinks: wandb", "not installed", remedy="pip install 'fullshard[wandb]'"
)
def a_package_that_is_not_there(workspace: Workspace) -> None:
    workspace.patch.setitem(sys.modules, "wandb", None)  # so Python hides a module
    workspace.set("log", sinks=["wandb"])


@mistake(
    "environment", "environment: hub", "HF_HUB_OFFLINE is set", "nobody/nothing", remedy="hf download nobody/nothing"
)
def a_hub_name_without_network(workspace: Workspace) -> None:
    workspace.patch.setenv("HF_HUB_OFFLINE", "1")
    workspace.set("model", path="nobody/nothing")


@mistake("environment", "environment: variables", "TORCH_DISTRIBUTED_DEBUG=DETAIL", remedy="unset", level="warning")
def a_variable_that_slows(workspace: Workspace) -> None:
    workspace.patch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")


@mistake("environment", "model: host memory", "available", "needed for parameters", remedy="smaller model")
def a_model_that_memory_cannot_hold(workspace: Workspace) -> None:
    _huge(workspace)


@mistake("environment", "recipe: conflict", "topology.backend = nccl", "CPU", remedy="gloo")
def nccl_on_a_cpu(workspace: Workspace) -> None:
    workspace.set("topology", backend="nccl")


def _huge(workspace: Workspace) -> None:
    """The shape of a model of some 600 billion parameters; it is never more than a shape."""
    shape = {"hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 160, "num_attention_heads": 128}
    workspace.recipe["model"] = {"architecture": "llama", "overrides": {**shape, "vocab_size": 97}}


# Model -----------------------------------------------------------------------------------------------------------


@mistake("model", "model: model", "model.path", "no such folder", remedy="Check the path")
def a_folder_that_is_not_there(workspace: Workspace) -> None:
    workspace.set("model", path=str(workspace.folder / "modell"))


@mistake("model", "model: model", "config.json' is not a valid JSON file", remedy="save_pretrained")
def broken_config(workspace: Workspace) -> None:
    config = workspace.folder / "model" / "config.json"
    config.write_text(config.read_text()[:-20])


@mistake("model", "model: model", "qwen33", remedy="model.architecture")
def unknown_architecture(workspace: Workspace) -> None:
    workspace.recipe["model"] = {"architecture": "qwen33", "size": "tiny"}


@mistake("model", "model: model", "model.size = 'tinny'", remedy="did you mean 'tiny'")
def unknown_size(workspace: Workspace) -> None:
    workspace.recipe["model"] = {"architecture": "qwen3", "size": "tinny", "overrides": {"vocab_size": 97}}


@mistake("model", "model: model", "hiden_size", remedy="hidden_size")
def unknown_override(workspace: Workspace) -> None:
    workspace.set("model", overrides={"hiden_size": 64})


@mistake("model", "model: config", "num_attention_heads = 4", "num_key_value_heads = 3", remedy="Correct config.json")
def heads_that_do_not_divide(workspace: Workspace) -> None:
    workspace.recipe["model"] = {
        "architecture": "qwen3",
        "size": "tiny",
        "overrides": {"num_key_value_heads": 3, "vocab_size": 97},
    }


@mistake(
    "model", "model: weight files", "model.safetensors: truncated", "are missing", remedy="Download or save it again"
)
def truncated_weights(workspace: Workspace) -> None:
    file = workspace.folder / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


@mistake("model", "train: ", "model.safetensors: truncated", remedy="Download or save it again", by="train")
def truncated_weights_in_train(workspace: Workspace) -> None:
    truncated_weights(workspace)


@mistake("model", "model: weight files", "its header", "model.safetensors", remedy="Download or save it again")
def weights_cut_in_the_header(workspace: Workspace) -> None:
    file = workspace.folder / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:200])


@mistake("model", "model: weight files", "Git LFS pointer", remedy="git lfs pull")
def weights_that_were_never_fetched(workspace: Workspace) -> None:
    (workspace.folder / "model" / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123456\n"
    )


def _shards(workspace: Workspace) -> Path:
    folder = workspace.folder / "model"
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, some in halves.items():
        save_file({name: tensors[name] for name in some}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, some in halves.items() for name in some}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@mistake(
    "model",
    "model: weight files",
    "1 of 2 weight files",
    "model-00002-of-00002.safetensors",
    remedy="Fetch the model again",
)
def a_missing_shard(workspace: Workspace) -> None:
    (_shards(workspace) / "model-00002-of-00002.safetensors").unlink()


def _edit(workspace: Workspace, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = workspace.folder / "model" / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@mistake("model", "model: weights", "model.layers.1.mlp.up_proj.weight", "48", "50", remedy="model.overrides")
def a_tensor_of_another_shape(workspace: Workspace) -> None:
    _edit(workspace, lambda tensors: tensors.update({"model.layers.1.mlp.up_proj.weight": torch.ones(50, 32)}))


@mistake("model", "model: weights", "1 missing: model.norm.weight", remedy="Check that config.json belongs")
def a_missing_tensor(workspace: Workspace) -> None:
    _edit(workspace, lambda tensors: tensors.pop("model.norm.weight"))


@mistake(
    "model",
    "model: weights",
    "1 not part of the model: model.layers.3.extra.weight",
    remedy="Check that config.json belongs",
)
def a_tensor_too_many(workspace: Workspace) -> None:
    _edit(workspace, lambda tensors: tensors.update({"model.layers.3.extra.weight": torch.zeros(4)}))


@mistake("model", "model: stored values", "model.norm.weight", "NaN", remedy="download them again")
def nan_in_the_weights(workspace: Workspace) -> None:
    _edit(workspace, lambda tensors: tensors["model.norm.weight"].fill_(float("nan")))


@mistake("model", "model: weight files", "pytorch_model.bin", "no safetensors", remedy="save_pretrained")
def pickled_weights(workspace: Workspace) -> None:
    folder = workspace.folder / "model"
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


@mistake("model", "model: weight files", "model.norm.weight is stored as F8_E4M3", "quantised", remedy="unquantised")
def quantised_weights(workspace: Workspace) -> None:
    _edit(workspace, lambda tensors: tensors.update({"model.norm.weight": torch.ones(32).to(torch.float8_e4m3fn)}))


@mistake("model", "data: data", "model.tokenizer", "the model has none", remedy="train: {vocab_size")
def text_without_a_tokenizer(workspace: Workspace) -> None:
    workspace.set("data", train=str(workspace.folder / "texts.jsonl"))


@mistake("model", "model: model", "not the tokenizer of these weights", "400 tokens", "97 rows", remedy="Leave model.t")
def a_tokenizer_of_another_model(workspace: Workspace) -> None:
    workspace.set("model", tokenizer=str(workspace.folder / "spoken"))


@mistake("model", "model: vocabulary", "the token 96", "80 rows", remedy="own tokenizer")
def tokens_beyond_the_vocabulary(workspace: Workspace) -> None:
    workspace.recipe["model"] = {"architecture": "qwen3", "size": "tiny", "overrides": {"vocab_size": 80}}


@mistake("model", "model: model", "data.sequence_length = 256", "128 positions", remedy="Shorten it")
def rows_longer_than_positions(workspace: Workspace) -> None:
    workspace.set("data", sequence_length=256)


@mistake("model", "model: model", "model.lora.targets = ['c_attn']", "Qwen3ForCausalLM", remedy="q_proj")
def adapters_for_another_model(workspace: Workspace) -> None:
    workspace.set("model", lora={"targets": ["c_attn"]})


@mistake("model", "model: model", "no trainable parameter", remedy="Freeze less")
def everything_frozen(workspace: Workspace) -> None:
    workspace.set("model", freeze=["*"])


@mistake("model", "model: model", "model.freeze[0] = 'transformer.wte.*'", remedy="Names look like: model.embed_tokens")
def a_pattern_that_matches_nothing(workspace: Workspace) -> None:
    workspace.set("model", freeze=["transformer.wte.*"])


@mistake("model", "model: parameters", "model.lora", "at most half", remedy="Lower model.lora.r", level="warning")
def adapters_larger_than_the_model(workspace: Workspace) -> None:
    workspace.set("model", lora=64)


@mistake("model", "model: special tokens", "no end token", remedy="tokenizer_config.json", level="warning")
def a_tokenizer_without_an_end(workspace: Workspace) -> None:
    workspace.use_texts()
    path = workspace.folder / "spoken" / "tokenizer_config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "eos_token"}))


@mistake("model", "model: model", "layerdrop = 0.1", "wait for each other", remedy="model.overrides.layerdrop=0")
def layers_left_out_at_random(workspace: Workspace) -> None:
    workspace.recipe["model"] = {
        "architecture": "opt",
        "size": "tiny",
        "overrides": {"layerdrop": 0.1, "vocab_size": 97},
    }


@mistake("model", "model: model", "tokenizer", "spoken", remedy="Name one in model.tokenizer")
def a_broken_tokenizer(workspace: Workspace) -> None:
    workspace.use_texts()
    path = workspace.folder / "spoken" / "tokenizer.json"
    path.write_text(path.read_text()[:-200])


@mistake("model", "model: model", "no base model named", remedy="model.base = FOLDER or hub name")
def adapters_that_name_no_base(workspace: Workspace) -> None:
    folder = workspace.folder / "model"
    (folder / "config.json").rename(folder / "adapter_config.json")
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")


@mistake("model", "model: weight files", "neither model.safetensors", remedy="a folder with weights")
def a_folder_without_weights(workspace: Workspace) -> None:
    (workspace.folder / "model" / "model.safetensors").unlink()


@mistake("model", "model: model", "its own Python code", remedy="model.trust_remote_code: true")
def a_model_with_code_of_its_own(workspace: Workspace) -> None:
    path = workspace.folder / "model" / "config.json"
    named = {"auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}, "model_type": "own"}
    path.write_text(json.dumps(json.loads(path.read_text()) | named))
    (workspace.folder / "model" / "own.py").write_text("")


# Data ------------------------------------------------------------------------------------------------------------


@mistake("data", "data: data", "no_such.jsonl: no such file", remedy=": model, pairs.jsonl")
def a_file_that_is_not_there(workspace: Workspace) -> None:
    workspace.set("data", train=str(workspace.folder / "no_such.jsonl"))


@mistake("data", "data: data", "train.jsonl:3", "invalid JSON at column", remedy="Each line must be one JSON object")
def a_broken_line(workspace: Workspace) -> None:
    workspace.write_records({"input_ids": [1, 2, 3]}, {"input_ids": [4, 5, 6]})
    with (workspace.folder / "train.jsonl").open("a") as file:
        file.write('{"input_ids": [1, 2\n')


@mistake("data", "data: data", "train.jsonl: the file is empty", remedy="Put records into it")
def an_empty_file(workspace: Workspace) -> None:
    workspace.write_records()


@mistake("data", "data: data", "train.jsonl:1", "title", "body", remedy="data.encode")
def other_columns(workspace: Workspace) -> None:
    workspace.use_texts()
    workspace.set("data", train=str(workspace.write_records({"title": "a", "body": "b"}, {"title": "c", "body": "d"})))


@mistake("data", "data: data", "train.jsonl:2", "null", remedy="remove the record")
def a_null_in_a_record(workspace: Workspace) -> None:
    workspace.use_texts()
    workspace.set("data", train=str(workspace.write_records({"text": "some words"}, {"text": None})))


@mistake("data", "data: data", "data.train: no sample is left of 3 records", "masked", remedy="not all -100")
def all_labels_masked(workspace: Workspace) -> None:
    workspace.write_records(*[{"input_ids": [i, 2, 3], "labels": [-100] * 3} for i in range(3)])


@mistake("data", "data: masked labels", "no loss term", "95%", remedy="train_on: all", level="warning")
def nearly_all_labels_masked(workspace: Workspace) -> None:
    workspace.write_records(*[{"input_ids": [i, *range(40)], "labels": [-100] * 40 + [5]} for i in range(20)])


@mistake("data", "data: data", "'labels' has 2 entries", "train.jsonl:1", remedy="equally long")
def labels_of_another_length(workspace: Workspace) -> None:
    workspace.write_records({"input_ids": [1, 2, 3], "labels": [1, 2]}, {"input_ids": [1, 2, 4]})


@mistake("data", "data: leakage", "of validation are among", "train.jsonl:", remedy="data.validation", level="warning")
def validation_that_is_trained_on(workspace: Workspace) -> None:
    shutil.copy(workspace.folder / "train.jsonl", workspace.folder / "validation.jsonl")
    workspace.set("data", validation=str(workspace.folder / "validation.jsonl"))
    workspace.set("evaluate", parts=["loss"])
    workspace.recipe["checkpoint"].pop("best")


@mistake("data", "data: duplicates", "repeat another one", "train.jsonl:", remedy="mixture", level="warning")
def the_same_record_again_and_again(workspace: Workspace) -> None:
    workspace.write_records(*[{"input_ids": [1, 2, 3, 4]}] * 30, *[{"input_ids": [i, 2, 3, 4]} for i in range(30)])


@mistake("data", "data: data", "data.holdout = 0.5", "found 1", remedy="data.validation")
def a_holdout_that_leaves_nothing(workspace: Workspace) -> None:
    workspace.write_records({"input_ids": [1, 2, 3, 4]})
    workspace.set("data", holdout=0.5)


@mistake(
    "data", "data: truncated", "of 40 samples", "were truncated", remedy="Raise data.sequence_length", level="warning"
)
def rows_too_short_for_the_answers(workspace: Workspace) -> None:
    workspace.use_texts()
    workspace.set("data", sequence_length=64)


@mistake("data", "data: data", "no sample is left", "after data.sequence_length", remedy="raise data.sequence_length")
def rows_too_short_for_any_answer(workspace: Workspace) -> None:
    workspace.use_texts()
    workspace.set("data", sequence_length=2)


@mistake("data", "data: dropped", "left out", remedy="not blank", level="warning")
def answers_that_are_blank(workspace: Workspace) -> None:
    workspace.use_texts()
    records = [json.loads(line) for line in (workspace.folder / "pairs.jsonl").read_text().splitlines()]
    workspace.write_records(*records, *[{"question": f"Why {i}?", "answer": ""} for i in range(4)], name="pairs.jsonl")


@mistake("data", "data: data", "pairs.jsonl:1", "speaker", remedy="role")
def messages_of_another_form(workspace: Workspace) -> None:
    workspace.use_texts()
    workspace.write_records({"messages": [{"speaker": "a", "text": "b"}]}, name="pairs.jsonl")


@mistake("data", "recipe: batch", "4,096 samples per step", "64", remedy="batch.global = 64", level="warning")
def a_step_larger_than_the_data(workspace: Workspace) -> None:
    workspace.set("batch", **{"global": 4096})


@mistake("data", "model: unknown tokens", "no token for", "allowed 1%", remedy="byte-level", level="warning")
def a_tokenizer_that_does_not_know_the_words(workspace: Workspace) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0, "<end>": 1, "the": 2, "a": 3, "of": 4}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    few = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<end>")
    few.save_pretrained(workspace.folder / "few")
    workspace.recipe["model"] = {"architecture": "qwen3", "size": "tiny", "tokenizer": str(workspace.folder / "few")}
    workspace.set("data", train=str(workspace.folder / "texts.jsonl"))


@mistake("data", "data: data", "train.docx", "suffix", remedy=".jsonl")
def a_file_of_an_unknown_kind(workspace: Workspace) -> None:
    shutil.copy(workspace.folder / "train.jsonl", workspace.folder / "train.docx")
    workspace.set("data", train=str(workspace.folder / "train.docx"))


@mistake("data", "data: data", "train.jsonl:1", "UTF-8", remedy="UTF-8")
def text_in_another_encoding(workspace: Workspace) -> None:
    workspace.use_texts()
    (workspace.folder / "train.jsonl").write_bytes('{"text": "Grüße"}\n'.encode("latin-1") * 2)
    workspace.set("data", train=str(workspace.folder / "train.jsonl"))


@mistake("data", "data: data", "train.parquet: not a parquet file", remedy="corrupted")
def a_broken_parquet_file(workspace: Workspace) -> None:
    (workspace.folder / "train.parquet").write_bytes(b"PAR1" + b"0" * 100)
    workspace.set("data", train=str(workspace.folder / "train.parquet"))


@mistake("data", "data: data", "empty_folder", remedy=".jsonl")
def a_folder_without_data(workspace: Workspace) -> None:
    (workspace.folder / "empty_folder").mkdir()
    workspace.set("data", train=str(workspace.folder / "empty_folder"))


@mistake("data", "data: data", "validation.jsonl: no such file", remedy="Found in ")
def validation_that_is_not_there(workspace: Workspace) -> None:
    workspace.set("data", validation=str(workspace.folder / "validation.jsonl"))


@mistake("data", "data: data", "train.jsonl:2", "-7", remedy="allowed are -100")
def labels_that_are_no_tokens(workspace: Workspace) -> None:
    workspace.write_records({"input_ids": [1, 2, 3]}, {"input_ids": [1, 2, 3], "labels": [-7, 2, 3]})


# Precision -------------------------------------------------------------------------------------------------------


@mistake("precision", "recipe: recipe", "precision", "bf61", remedy="did you mean 'bf16'")
def a_slip_in_the_precision(workspace: Workspace) -> None:
    workspace.recipe["precision"] = "bf61"


@mistake("precision", "recipe: recipe", "fp16 weights cannot be trained", remedy="keeps fp32 weights")
def pure_fp16(workspace: Workspace) -> None:
    workspace.recipe["precision"] = "fp16-pure"


@mistake(
    "precision", "environment: precision", "precision = bf16-pure", "1/256", remedy="precision: bf16", level="warning"
)
def pure_bf16(workspace: Workspace) -> None:
    workspace.recipe["precision"] = "bf16-pure"


def _gpu(workspace: Workspace, *gpus: machine.Gpu) -> None:
    """A machine with other hardware, as it would describe itself."""
    here = dataclasses.replace(machine.inspect(), gpus=gpus, cuda="12.8", driver="570.86", nccl="2.27.3")
    workspace.patch.setattr(machine, "inspect", lambda **_: here)
    workspace.set("topology", device="auto")


T4 = machine.Gpu("Tesla T4", (7, 5), 15 * 2**30)


@mistake("precision", "environment: precision", "precision = bf16", "Tesla T4", "7.5", "8.0", remedy="precision: fp16")
def bf16_on_turing(workspace: Workspace) -> None:
    _gpu(workspace, T4)
    workspace.recipe["precision"] = "bf16"


@mistake("precision", "environment: attention", "varlen", "Turing", "8.0", remedy="model.attention=sdpa")
def flash_attention_on_turing(workspace: Workspace) -> None:
    _gpu(workspace, T4)
    workspace.recipe["precision"] = "fp16"
    workspace.set("model", attention="varlen")


@mistake("precision", "environment: attention", "varlen", "CPU", remedy="model.attention=sdpa")
def flash_attention_on_a_cpu(workspace: Workspace) -> None:
    workspace.set("model", attention="varlen")


@mistake("precision", "recipe: recipe", "model.attention = 'flush'", "allowed", remedy="flash_attention_2")
def an_unknown_attention(workspace: Workspace) -> None:
    workspace.set("model", attention="flush")


@mistake("precision", "recipe: recipe", "precision=fp16 and precision=bf16", "both set", remedy="Give one of them")
def two_precisions(workspace: Workspace) -> None:
    workspace.words = ["--fp16", "precision=bf16"]


# Storage ---------------------------------------------------------------------------------------------------------


@mistake("storage", "environment: output", "output = ", "a_file", remedy="output=DIR")
def a_file_where_runs_should_be(workspace: Workspace) -> None:
    (workspace.folder / "a_file").write_text("not a folder")
    workspace.recipe["output"] = str(workspace.folder / "a_file")


@mistake("storage", "environment: output", "/proc", remedy="output=DIR")
def an_output_that_cannot_be_written(workspace: Workspace) -> None:
    workspace.recipe["output"] = "/proc/runs"


@mistake("storage", "environment: data cache", "data.cache = '/proc/cache'", remedy="data.cache=DIR")
def a_cache_that_cannot_be_written(workspace: Workspace) -> None:
    workspace.set("data", cache="/proc/cache")


@mistake("storage", "model: disk space", "free in", "needed for", remedy="output=DIR")
def checkpoints_that_the_disk_cannot_hold(workspace: Workspace) -> None:
    _huge(workspace)


@mistake("storage", "train: ", "needed for", remedy="output=DIR", by="train")
def checkpoints_that_the_disk_cannot_hold_in_train(workspace: Workspace) -> None:
    _huge(workspace)


@mistake("storage", "environment: output", "runs/run is a file", remedy="name=NAME")
def a_file_where_the_run_folder_should_be(workspace: Workspace) -> None:
    (workspace.folder / "runs").mkdir()
    (workspace.folder / "runs" / "run").write_text("not a folder")


@mistake(
    "storage", "recipe: earlier run", "checkpoint-2 cannot be resumed", "seed: 0 then, 1 now", remedy="--resume never"
)
def an_earlier_run_with_other_samples(workspace: Workspace) -> None:
    _earlier(workspace)
    workspace.recipe["seed"] = 1


@mistake("storage", "train: started", "checkpoint-2 cannot be resumed", remedy="--resume never", by="train")
def an_earlier_run_with_other_samples_in_train(workspace: Workspace) -> None:
    an_earlier_run_with_other_samples(workspace)


@mistake("storage", "recipe: earlier run", "bytes long", "was written with", remedy="--resume RUN/checkpoint-STEP")
def a_checkpoint_that_was_cut(workspace: Workspace) -> None:
    _earlier(workspace)
    file = next((workspace.folder / "runs" / "run" / "checkpoint-2").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-100])


@mistake("storage", "train: started", "was written with", remedy="--resume RUN/checkpoint-STEP", by="train")
def a_checkpoint_that_was_cut_in_train(workspace: Workspace) -> None:
    a_checkpoint_that_was_cut(workspace)


@mistake(
    "storage",
    "train: started",
    "--resume runs/run/checkpoint-7",
    "no such folder",
    remedy="Checkpoints in ",
    by="train",
)
def a_checkpoint_that_is_not_there(workspace: Workspace) -> None:
    workspace.words = ["--resume", "runs/run/checkpoint-7"]


def _earlier(workspace: Workspace) -> None:
    """A run of two steps in the run folder."""
    from fullshard.recipes.read import read
    from fullshard.run import execute

    workspace.set("duration", steps=2)
    execute(read(workspace.recipe), resume="auto")
    workspace.set("duration", steps=6)


# What only ranks can find ----------------------------------------------------------------------------------------

OBJECTIVE = """
import os
import signal
import torch
from fullshard.families.language.objectives.causal_lm import CausalLM
from fullshard.contracts.objective import Terms

class Own(CausalLM):
    def loss(self, model, batch, aux):
        terms = super().loss(model, batch, aux)
        {does}
        return terms
"""


def _own(workspace: Workspace, name: str, does: str) -> None:
    """An objective of the user's own, that does something to its terms."""
    workspace.write_module(name, OBJECTIVE.replace("{does}", does))
    workspace.recipe["objective"] = {"kind": f"{name}.Own"}


@mistake("data", "trial: trial", "not finite", remedy="Look for records", by="trial")
def a_loss_that_is_infinite_on_the_longest_record(workspace: Workspace) -> None:
    _own(workspace, "longest", "terms = Terms(terms.loss_sum / (batch['labels'].shape[1] < 40))")


@mistake("data", "train: started", "not finite", remedy="Look for records", by="train", code=3)
def a_loss_that_is_infinite_in_train(workspace: Workspace) -> None:
    _own(workspace, "infinite", "terms = Terms(terms.loss_sum / 0)")


@mistake("model", "trial: trial", "have no gradient", "model.layers.0", remedy="model.freeze", by="trial")
def parameters_without_a_gradient(workspace: Workspace) -> None:
    head = "model.get_output_embeddings().weight.sum()"
    _own(
        workspace,
        "detached",
        f"terms = Terms(terms.loss_sum.detach() * {head} if torch.is_grad_enabled() else terms.loss_sum)",
    )


@mistake("model", "trial: trial", "a document in a packed row changes the next", remedy="data.pack: false", by="trial")
def packed_rows_of_a_model_that_mixes_documents(workspace: Workspace) -> None:
    workspace.recipe["model"] = {"architecture": "bloom", "size": "tiny", "overrides": {"vocab_size": 97}}
    workspace.set("data", pack=True)


@mistake(
    "precision",
    "trial: trial",
    "logits",
    "not finite (computed in float16)",
    "6.55e+04",
    remedy="precision: bf16 or fp32",
    by="trial",
)
def numbers_too_large_for_fp16(workspace: Workspace) -> None:
    _edit(workspace, lambda tensors: tensors["model.norm.weight"].fill_(6e4))
    workspace.recipe["precision"] = "fp16"


@mistake("storage", "trial: trial", "runs/.check-run", "File too large", remedy="Check disk space", by="trial")
def a_disk_that_is_full(workspace: Workspace) -> None:
    workspace.words = ["largest_file=20000"]


@mistake(
    "environment",
    "trial: recipe",
    "optimizer.lr is 0.01 on rank 0",
    "0.02 on rank 1",
    remedy="the same recipe file",
    by="trial",
)
def ranks_with_different_recipes(workspace: Workspace) -> None:
    workspace.words = ["optimizer.lr=0.02"]


@mistake("recipe", "trial: trial", "rank 1: ValueError: only here", remedy="traceback is above", by="launch")
def an_objective_that_fails_on_one_rank(workspace: Workspace) -> None:
    _own(workspace, "one_fails", "print('noise')\n        if os.environ['RANK'] == '1': raise ValueError('only here')")


@mistake(
    "environment",
    "trial: trial",
    "Rank 0",
    "was ended by SIGKILL",
    "memory",  # whether it was out of it depends on the machine
    remedy="batch.per_device",
    by="launch",
)
def a_rank_that_the_system_kills(workspace: Workspace) -> None:
    _own(workspace, "one_dies", "if os.environ['RANK'] == '0': os.kill(os.getpid(), signal.SIGKILL)")


def test_without_a_mistake_there_is_no_finding(workspace: Workspace) -> None:
    for speak in (False, True):
        if speak:
            workspace.use_texts()
        result = workspace.run("check", "--quick", "--json")
        report = json.loads(result.stdout)
        assert [f for f in report["findings"] if f["level"] != "ok"] == []
        assert (report["correct"], result.exit_code) == (True, 0)


@pytest.mark.parametrize("case", one_in(4, (m for m in MISTAKES if m.by == "check")), ids=lambda m: m.name)
def test_check_finds(case: Mistake, workspace: Workspace) -> None:
    case.make(workspace)
    before = files_in(workspace.folder)
    result = workspace.run("check", "--quick", "--json")
    report = json.loads(result.stdout)
    bad = [f for f in report["findings"] if f["level"] != "ok"]
    print(json.dumps(bad, indent=1), result.stderr)
    assert result.exit_code == case.code
    assert (report["correct"], report["tried"]) == (case.level != "error", False)
    assert (case.section, case.check, case.level) in {(f["section"], f["check"], f["level"]) for f in bad}
    found = [f for f in bad if (f["section"], f["check"], f["level"]) == (case.section, case.check, case.level)]
    sentences = [f"{f['text']} {f['remedy']}" for f in found]
    assert any(all(words in text for words in (*case.says, case.remedy)) for text in sentences)
    assert "Traceback" not in result.output
    assert files_in(workspace.folder) == before, "something was left behind"


@pytest.mark.parametrize("case", one_in(4, (m for m in MISTAKES if m.by == "train")), ids=lambda m: m.name)
def test_train_refuses(case: Mistake, workspace: Workspace) -> None:
    case.make(workspace)
    before = files_in(workspace.folder)
    result = workspace.run("train", "--devices", "1")
    print(result.output)
    assert result.exit_code == case.code
    said = " ".join(result.stderr.split())
    assert all(words in said for words in (*case.says, case.remedy))
    assert "Traceback" not in result.output
    if case.check == "started":  # the ranks had met and the run folder was theirs
        assert not list(workspace.folder.glob("runs/run/checkpoint-[3-9]"))
    else:
        assert files_in(workspace.folder) == before, "something was left behind"


@pytest.mark.parametrize("case", one_in(4, (m for m in MISTAKES if m.by == "trial")), ids=lambda m: m.name)
def test_ranks_find(case: Mistake, workspace: Workspace, ranks: RankPool) -> None:
    case.make(workspace)
    report = workspace.folder / "report"
    report.mkdir()
    before = files_in(workspace.folder)
    words = dict(word.split("=") for word in workspace.words)
    largest = int(words.pop("largest_file")) if "largest_file" in words else None
    other = read(workspace.recipe, *[f"{key}={value}" for key, value in words.items()]).recipe
    settings = [workspace.recipe, plain(other)]
    codes = ranks.run(on_ranks.trial, settings, str(report), str(workspace.folder), largest, world=2)
    found = _merged(on_ranks.collected(report), max(codes))
    bad = [finding for finding in found if finding.level != "ok"]
    print(bad)
    assert max(codes) == case.code
    assert any(
        (f.check, f.level) == (case.check, case.level)
        and all(words in f.sentence() for words in (*case.says, case.remedy))
        for f in bad
    )
    after = {name: size for name, size in files_in(workspace.folder).items() if not name.startswith("report/")}
    assert after == before, "something was left behind"


@pytest.mark.parametrize("case", one_in(99, (m for m in MISTAKES if m.by == "launch")), ids=lambda m: m.name)
def test_check_finds_on_ranks_that_it_starts(
    case: Mistake, workspace: Workspace, capfd: pytest.CaptureFixture[str]
) -> None:
    case.make(workspace)
    before = files_in(workspace.folder)
    result = workspace.run("check", "--json", "--devices", "2")
    assert capfd.readouterr().out == "", "standard output is for the report alone"
    report = json.loads(result.stdout)
    bad = [f for f in report["findings"] if f["level"] != "ok"]
    print(json.dumps(bad, indent=1), result.stderr)
    assert (result.exit_code, report["correct"], report["tried"]) == (case.code, False, True)
    assert [(f["section"], f["check"], f["level"]) for f in bad] == [(case.section, case.check, case.level)]
    assert all(words in f"{bad[0]['text']} {bad[0]['remedy']}" for words in (*case.says, case.remedy))
    assert files_in(workspace.folder) == before, "something was left behind"


def test_the_catalogue_is_large_and_covers_every_area() -> None:
    assert len({m.name for m in MISTAKES}) == len(MISTAKES) >= 45
    assert {m.area for m in MISTAKES} == {"recipe", "environment", "model", "data", "precision", "storage"}
