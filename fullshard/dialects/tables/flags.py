"""Flags of plain training scripts, as `fullshard train` takes them over, and spellings that many trainers share."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from fullshard.dialects.kinds import SHARE, SWITCH, TEXT, one_of
from fullshard.dialects.readers import DEEPSPEED, FSDP, INTERVAL, OFF, beta, deepspeed, fsdp_words, interval
from fullshard.dialects.rows import (
    Dialect,
    File,
    Outcome,
    Settings,
    choice,
    ignored,
    reads,
    refuse,
    refused,
    to,
    unused,
)
from fullshard.dialects.words import our_word


def _per_device(value: Any, file: File) -> Settings:
    """A batch size per GPU; the rows of a step then follow, whatever the recipe says for all ranks together."""
    return {"batch.per_device": value, "batch.global": None}


def _data_folder(value: Any, file: File) -> Settings:
    """A folder with train.* and val.*, or one that is all training data."""
    folder = Path(str(value)).expanduser()
    found = {name: sorted(folder.glob(f"{name}.*")) for name in ("train", "val", "validation")}
    if not found["train"]:
        return {"data.train": value}
    validation = [*found["val"], *found["validation"]]
    return {"data.train": str(found["train"][0])} | ({"data.validation": str(validation[0])} if validation else {})


def _scheduler(value: Any, file: File) -> Outcome | Settings:
    if not value:
        return {"schedule.kind": "constant"}
    return ignored("the recipe's schedule is always in force; schedule.kind chooses it")


def _best(value: Any, file: File) -> Settings:
    """An empty mapping switches `best` on and leaves the recipe's metric as it is."""
    return {"checkpoint.best": {} if value else None}


def _size(value: Any, file: File) -> Settings:
    """`model_config_1.7B` is the size 1.7B."""
    return {"model.size": re.sub(r"^model_config_", "", str(value))}


def _adapter(value: Any, file: File) -> Outcome | Settings:
    if value not in (False, "full", "lora"):
        return refused(f"{value} is not available: lora and full are")
    return {"model.lora": value == "lora"}


def _flash(value: Any, file: File) -> Outcome | Settings:
    if value == "fa3":
        return refused("fa3 is not available: fa2, sdpa, disabled and auto are")
    words = {True: "flash_attention_2", "fa2": "flash_attention_2", False: "eager", "disabled": "eager"}
    return {"model.attention": words.get(value, value)}


def _device(value: Any, file: File) -> Outcome | Settings:
    if value.isdecimal():
        return refused(f"a number of ranks is --devices {value}; device is auto, cuda or cpu")
    return {"topology.device": our_word("topology.device", value) or value}


_PRODUCTION = ignored("every run is checked, logged and saved as in production; --dry-run and `fullshard check` try it")

DIALECT = Dialect(
    name="a plain script",
    title="Plain torchrun scripts",
    intro=(
        "`fullshard train RECIPE` takes the flags that such scripts have, so that everything after the script's name\n"
        "works as it is; `fullshard train --help-aliases` prints this table. Hyphens and underscores are the same. A\n"
        "switch is a bare flag, `--no-flag`, or `--flag True`. Two flags that say different things are an error; a\n"
        "setting in our own words, such as `optimizer.lr=3e-4`, wins over a flag."
    ),
    rows=(
        to("duration.epochs", "epochs num_epochs num_train_epochs max_epochs"),
        to("duration.steps", "max_steps max_train_steps total_steps num_steps train_steps train_iters steps"),
        reads(
            "batch.per_device",
            _per_device,
            "batch_size train_batch_sz micro_batch_size per_device_train_batch_size per_gpu_train_batch_size "
            "train_micro_batch_size_per_gpu local_batch_size batch_size_per_device per_device",
            note="rows of one GPU; the recipe's batch.global gives way",
        ),
        to(
            "batch.accumulate",
            "gradient_accumulation gradient_accumulation_steps grad_accum_steps accumulate_grad_batches "
            "accumulation_steps accumulate",
        ),
        to("batch.global", "global_batch_size train_batch_size total_batch_size"),
        to("evaluate.per_device", "val_batch_sz val_batch_size per_device_eval_batch_size eval_batch_size"),
        to("optimizer.lr", "learning_rate lr max_lr peak_lr"),
        to("optimizer.weight_decay", "weight_decay"),
        to("optimizer.betas", "betas"),
        reads(
            "optimizer.betas", beta(0, others=(0.9, 0.95)), "adam_beta1 beta1", takes=SHARE, note="the first of the two"
        ),
        reads(
            "optimizer.betas",
            beta(1, others=(0.9, 0.95)),
            "adam_beta2 beta2",
            takes=SHARE,
            note="the second of the two",
        ),
        to("optimizer.eps", "adam_epsilon epsilon"),
        to(
            "optimizer.clip", "max_grad_norm max_norm gradient_clip_val gradient_clipping clip_grad_norm grad_clip clip"
        ),
        to("optimizer.kind", "optim optimizer_type optimizer.name optimizer.type optimizer._component_"),
        reads(
            "schedule.kind",
            _scheduler,
            "use_scheduler",
            takes=SWITCH,
            note="False: constant; True leaves the recipe's schedule",
        ),
        to(
            "schedule.kind",
            "scheduler_type lr_scheduler_type lr_scheduler lr_scheduler.type lr_scheduler._component_ scheduler "
            "scheduler.type lr_schedule",
            note="cosine, linear, step, constant; none is constant",
        ),
        to("schedule.step_size", "scheduler_step_size step_size"),
        to("schedule.gamma", "scheduler_gamma gamma"),
        to("schedule.warmup", "warmup_steps warmup_ratio warmup num_warmup_steps lr_warmup_steps warmup_num_steps"),
        to("schedule.floor", "lr_min min_lr_ratio cosine_min_lr_ratio min_lr_factor"),
        to(
            "data.train",
            "dataset_path data_path train_data train_file train_path train_dataset dataset_train data_files dataset "
            "datasets",
        ),
        reads(
            "data.train",
            _data_folder,
            "data_dir_path data_dir",
            takes=TEXT,
            note="train.* and val.* in it, if it has them",
        ),
        to("data.train={kind: hub, name: $}", "dataset_name"),
        to(
            "data.validation",
            "val_data_path validation_file eval_dataset eval_data val_data test_datasets dataset_val",
        ),
        to("data.holdout", "val_set_size val_size validation_split holdout"),
        to(
            "data.sequence_length",
            "max_sequence_length max_seq_length max_seq_len sequence_len sequence_length seq_length seq_len max_length "
            "model_max_length cutoff_len block_size context_length",
        ),
        to("data.pack", "packing packed sample_packing pack"),
        to("data.workers", "num_workers dataloader_num_workers workers"),
        to("data.shuffle", "shuffle"),
        to("data.encode={kind: chat, train_on: all}", "train_on_inputs"),
        to("data.encode={kind: text, column: $}", "dataset_text_field"),
        to(
            "model.path",
            "model_name model_name_or_path pretrained_model_name_or_path base_model model_id hf_assets_path",
        ),
        reads("model.size", _size, "model_config", note="model_config_1.7B is the size 1.7B"),
        to("model.tokenizer", "tokenizer_name tokenizer_path tokenizer"),
        to("model.trust_remote_code", "trust_remote_code"),
        to("model.attention", "attn_implementation attention"),
        to("model.attention=flash_attention_2", "flash_attention use_flash_attention"),
        reads("model.attention", _flash, "flash_attn", takes=SWITCH | one_of("auto", "disabled", "sdpa", "fa2", "fa3")),
        to("model.lora=true", "use_lora use_peft"),
        reads("model.lora", _adapter, "adapter finetuning_type", takes=OFF | TEXT, note="lora or full"),
        to("model.lora", "lora peft peft_config"),
        to("model.lora.r", "lora_r lora_rank rank"),
        to("model.lora.alpha", "lora_alpha"),
        to("model.lora.dropout", "lora_dropout"),
        to("model.lora.targets", "lora_target_modules lora_target lora_attn_modules target_modules"),
        to("precision=bf16", "bf16 bfloat16 bf16.enabled"),
        to("precision=fp16", "fp16 float16 fp16.enabled"),
        to(
            "precision",
            "mp_dt mixed_precision mixed_precision_param dtype torch_dtype compute_dtype",
            note="float16, bfloat16, bf16-mixed, 16-mixed, 32, none and others",
        ),
        to(
            "sharding.strategy",
            "fsdp_sharding_strategy sharding_strategy dist_mode strategy distributed_type parallelism",
            note="FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD, NO_SHARD, fsdp, ddp, zero2, zero3",
        ),
        reads(
            "sharding.strategy",
            fsdp_words,
            "fsdp use_fsdp",
            takes=FSDP,
            note="full_shard, shard_grad_op, auto_wrap, offload",
        ),
        reads(
            "sharding.strategy",
            deepspeed,
            "deepspeed deepspeed_config",
            takes=DEEPSPEED,
            note="the ZeRO stage of the file",
        ),
        to("sharding.strategy=none", "ddp"),
        to("sharding.strategy=grad_op", "zero1 zero2"),
        to("sharding.strategy=full", "zero3 full_shard"),
        to(
            "sharding.cpu_offload", "cpu_offload fsdp_offload_params offload_params enable_cpu_offload fsdp_cpu_offload"
        ),
        to(
            "sharding.activation_checkpointing",
            "gradient_checkpointing activation_checkpointing fsdp_activation_checkpointing "
            "enable_activation_checkpointing activation_checkpoint.mode",
        ),
        to("sharding.forward_prefetch", "forward_prefetch fsdp_forward_prefetch"),
        to("sharding.compile", "torch_compile compile compile.enable"),
        to("checkpoint.format", "fsdp_state_dict_type state_dict_type", note="full or sharded"),
        to("topology.devices", "devices num_processes num_gpus nproc_per_node n_gpus"),
        to("topology.nodes", "num_nodes num_machines nnodes"),
        reads("topology.device", _device, "accelerator compute_device device", takes=TEXT, note="gpu is cuda"),
        to("topology.timeout_s", "ddp_timeout init_timeout_seconds"),
        to("output", "dir_path_save output_dir save_dir default_root_dir dump_folder out_dir"),
        to("name", "run_name experiment_name"),
        to("seed", "random_seed"),
        to("checkpoint.every_epochs", "epoch_save_freq save_every_epochs"),
        to("checkpoint.every_steps", "save_steps save_interval save_every_n_steps checkpoint.interval"),
        to("checkpoint.keep", "save_total_limit keep_latest_k save_top_k"),
        reads(
            "checkpoint.best",
            _best,
            "save_best",
            takes=SWITCH,
            note="by the recipe's metric; by default the validation loss",
        ),
        to("checkpoint.best.metric", "metric_for_best_model"),
        to("checkpoint.export=best", "load_best_model_at_end"),
        reads(
            "checkpoint.asynchronous",
            lambda value, file: {"checkpoint.asynchronous": value not in (False, "disabled")},
            "async_mode",
            takes=SWITCH | one_of("disabled", "async", "async_with_pinned_mem"),
        ),
        to("evaluate.every_steps", "eval_steps val_check_interval eval_interval validation.freq"),
        to("evaluate.every_epochs", "check_val_every_n_epoch"),
        to("evaluate.at_start", "eval_on_start"),
        to("evaluate.patience", "early_stopping_patience patience"),
        to("log.every_steps", "logging_steps log_every_n_steps log_freq log_interval"),
        to("log.debug", "debug"),
        to("log.sinks=[$]", "report_to logger"),
        to("log.sinks=[tensorboard]", "enable_tensorboard"),
        to("log.sinks=[wandb]", "enable_wandb use_wandb"),
        to("log.sinks=[{kind: wandb, project: $}]", "wandb_project"),
        to("ema.decay", "ema_decay"),
        to("ema=true", "use_ema"),
        to("--preset", "fsdp_config"),
        to("--resume", "resume_from_checkpoint resume_local resume_dir"),
        to("RECIPE", "config", note="a built-in recipe or a file, as --config paper_r64"),
        reads("", choice("", {"production": _PRODUCTION, "basic": _PRODUCTION}), "mode", takes=TEXT, note="no effect"),
        refuse("no_resume", "write --resume never"),
        refuse("load_in_4bit load_in_8bit", "quantised weights are not trained: model.lora=true keeps frozen weights"),
        refuse("push_to_hub push_hub", "fullshard uploads nothing: upload the finished RUN/model with `hf upload`"),
        unused("ddp_find_unused_parameters find_unused_parameters", "parameters without a gradient are named anyway"),
        unused("remove_unused_columns", "data.encode reads the columns that it knows", quiet=(True,)),
        unused("group_by_length", "data.pack fills rows without padding"),
        unused("tf32", "precision decides what computes in which dtype"),
        reads(
            "checkpoint.every_steps",
            interval("checkpoint", "save_steps", default=500),
            "save_strategy",
            takes=INTERVAL,
            note="no, epoch or steps",
        ),
        reads(
            "evaluate.every_steps",
            interval("evaluate", "eval_steps", default=500),
            "eval_strategy evaluation_strategy",
            takes=INTERVAL,
            note="no, epoch or steps",
        ),
        unused("use_orig_params fsdp_use_orig_params", "FSDP2 always keeps the original parameters", quiet=()),
        unused("limit_all_gathers fsdp_limit_all_gathers", "FSDP2 bounds the gathered memory by itself", quiet=()),
        unused("local_rank", "the launcher says it: LOCAL_RANK", quiet=()),
    ),
)
