"""Keys and values of other trainers, and what a recipe writes instead: HF Trainer, accelerate, DeepSpeed, axolotl,
torchtune, torchtitan, Lightning, LLaMA-Factory.

Four tables: KEYS and VALUES that have another name here, keys WITHOUT a counterpart, and keys that are accepted with
NO_EFFECT. For the first three the error names the key and the value to write; for the last the run says what happens
instead. Nothing is translated silently. Must not know the recipe: a test checks that every target is a key that exists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fullshard.formatting.yaml_text import shown

KEYS: dict[str, str] = {
    # Left: our key, which takes their value; `key=word`, if their switch is on; or `key=...$...`, with their value in
    # place of the $. Right: their spellings. The longest path that matches wins.
    "optimizer.lr": "learning_rate lr max_lr peak_lr",
    "optimizer.weight_decay": "weight_decay",
    "optimizer.betas=[$, 0.95]": "adam_beta1 beta1",
    "optimizer.betas=[0.9, $]": "adam_beta2 beta2",
    "optimizer.betas": "betas",
    "optimizer.eps": "adam_epsilon epsilon",
    "optimizer.clip": "max_grad_norm max_norm gradient_clip_val gradient_clipping clip_grad_norm grad_clip clip",
    "optimizer.kind": "optim optimizer_type optimizer.name optimizer.type optimizer._component_",
    "schedule.kind": (
        "lr_scheduler_type lr_scheduler lr_scheduler.type lr_scheduler._component_ scheduler scheduler.type "
        "scheduler_type lr_schedule"
    ),
    "schedule.warmup": "warmup warmup_steps warmup_ratio num_warmup_steps lr_warmup_steps warmup_num_steps",
    "schedule.floor": "lr_min min_lr_ratio cosine_min_lr_ratio min_lr_factor",
    "duration.epochs": "num_train_epochs num_epochs max_epochs epochs",
    "duration.steps": (
        "max_steps max_train_steps max_steps_per_epoch training.steps total_steps num_steps train_steps "
        "train_iters steps"
    ),
    "batch.per_device": (
        "micro_batch_size per_device_train_batch_size per_gpu_train_batch_size train_micro_batch_size_per_gpu "
        "local_batch_size batch_size batch_size_per_device per_device"
    ),
    "batch.accumulate": (
        "gradient_accumulation_steps gradient_accumulation accumulate_grad_batches grad_accum_steps "
        "accumulation_steps accumulate"
    ),
    "batch.global": "global_batch_size train_batch_size total_batch_size",
    "data.sequence_length": (
        "max_seq_length max_seq_len max_sequence_length sequence_len sequence_length seq_length seq_len "
        "max_length model_max_length cutoff_len block_size context_length"
    ),
    "data.pack": "packing packed sample_packing pack",
    "data.train": (
        "dataset datasets dataset_path train_file train_data train_dataset train_path data_path data_files "
        "dataset_train"
    ),
    "data.train={kind: hub, name: $}": "dataset_name",
    "data.validation": "validation_file eval_dataset eval_data val_data test_datasets dataset_val",
    "data.holdout": "val_set_size val_size validation_split holdout",
    "data.workers": "dataloader_num_workers num_workers workers",
    "data.shuffle": "shuffle",
    "data.encode={kind: chat, train_on: all}": "train_on_inputs",
    "data.encode={kind: text, column: $}": "dataset_text_field",
    "model.path": (
        "model_name_or_path pretrained_model_name_or_path model_name base_model model_id hf_assets_path checkpoint_dir"
    ),
    "model.tokenizer": "tokenizer_name tokenizer_path tokenizer",
    "model.trust_remote_code": "trust_remote_code",
    "model.attention": "attn_implementation attention",
    "model.attention=flash_attention_2": "flash_attention flash_attn",
    "model.lora=true": "adapter use_peft use_lora finetuning_type",
    "model.lora": "lora peft peft_config",
    "model.lora.r": "lora_r lora_rank rank",
    "model.lora.alpha": "lora_alpha",
    "model.lora.dropout": "lora_dropout",
    "model.lora.targets": "lora_target_modules lora_target lora_attn_modules target_modules",
    "precision=bf16": "bf16 bfloat16 bf16.enabled",
    "precision=fp16": "fp16 float16 fp16.enabled",
    "precision": "mixed_precision mixed_precision_param dtype torch_dtype compute_dtype",
    "sharding.strategy": (
        "fsdp sharding_strategy fsdp_sharding_strategy strategy distributed_type parallelism zero_stage "
        "zero_optimization.stage"
    ),
    "sharding.strategy=none": "ddp",
    "sharding.strategy=grad_op": "zero1 zero2",
    "sharding.strategy=full": (
        "zero3 full_shard deepspeed deepspeed_config fsdp_reshard_after_forward data_parallel_shard_degree"
    ),
    "sharding.wrap=[$]": "fsdp_transformer_layer_cls_to_wrap transformer_layer_cls_to_wrap",
    "sharding.wrap.min_params": "fsdp_min_num_params min_num_params",
    "sharding.cpu_offload": "fsdp_offload_params offload_params enable_cpu_offload fsdp_cpu_offload cpu_offload",
    "sharding.cpu_offload=true": "offload_optimizer.device offload_param.device",
    "sharding.forward_prefetch": "fsdp_forward_prefetch",
    "sharding.activation_checkpointing": (
        "fsdp_activation_checkpointing gradient_checkpointing activation_checkpointing activation_checkpoint.mode "
        "enable_activation_checkpointing"
    ),
    "sharding.compile": "torch_compile compile compile.enable",
    "topology.devices": "devices num_processes num_gpus nproc_per_node n_gpus",
    "topology.nodes": "num_machines num_nodes nnodes",
    "topology.device": "accelerator device",
    "topology.timeout_s": "ddp_timeout init_timeout_seconds",
    "output": "output_dir default_root_dir dump_folder out_dir",
    "name": "run_name experiment_name",
    "log.every_steps": "logging_steps log_every_n_steps log_freq log_interval",
    "log.sinks=[$]": "report_to logger",
    "log.sinks=[tensorboard]": "enable_tensorboard",
    "log.sinks=[wandb]": "enable_wandb",
    "log.sinks=[{kind: wandb, project: $}]": "wandb_project",
    "checkpoint.every_steps": "save_steps save_interval save_every_n_steps checkpoint.interval",
    "checkpoint.keep": "save_total_limit keep_latest_k save_top_k",
    "checkpoint.asynchronous=true": "async_mode",
    "checkpoint.best.metric": "metric_for_best_model",
    "checkpoint.export=best": "load_best_model_at_end",
    "evaluate.every_steps": "eval_steps val_check_interval eval_interval validation.freq",
    "evaluate.every_epochs": "check_val_every_n_epoch",
    "evaluate.at_start": "eval_on_start",
    "evaluate.per_device": "per_device_eval_batch_size eval_batch_size",
    "evaluate.patience": "early_stopping_patience patience",
    "ema.decay": "ema_decay",
    "ema=true": "use_ema",
    "seed": "random_seed",
    "kind": "_component_",
}

VALUES: dict[str, dict[str, str]] = {
    # Our key: our value, and the spellings of others in lower case.
    "sharding.strategy": {
        "full": (
            "full_shard, full_shard auto_wrap, full_shard offload, fsdp, fsdp2, fsdp_full_shard, zero3, zero_3, "
            "zero-3, deepspeed, deepspeed_stage_3, 3, true"
        ),
        "grad_op": "shard_grad_op, shard_grad_op auto_wrap, zero2, zero_2, zero-2, deepspeed_stage_2, 2, zero1, 1",
        "hybrid": "hybrid_shard, hybrid_shard auto_wrap, _hybrid_shard_zero2, hybrid_shard_zero2, hsdp",
        "none": "no_shard, ddp, multi_gpu, 0, no, false, ddp_find_unused_parameters_true",
    },
    "optimizer.kind": {
        "adamw": "adam, adamw, adamw_torch, adamw_torch_fused, adamw_hf, adamw_fused, torch.optim.adamw",
        "adamw_8bit": "adamw_bnb_8bit, adamw_8bit_bnb, paged_adamw_8bit, adamw8bit, bitsandbytes.optim.pagedadamw8bit",
    },
    "schedule.kind": {
        "constant": "constant_with_warmup, warmuplr",
        "cosine": (
            "cosine_with_restarts, cosine_with_min_lr, cosine_annealing, warmupcosinelr, "
            "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"
        ),
        "linear": "warmupdecaylr",
        "step": "steplr",
    },
    "sharding.activation_checkpointing": {
        "full": "true, on",
        "none": "false, off, no",
    },
    "topology.device": {
        "cuda": "gpu",
        "auto": "auto",
    },
    "model.attention": {
        "flash_attention_2": "flash_attention, flash",
    },
    "log.sinks": {
        "": "none",
        "tensorboard, wandb": "all",
    },
    "objective.kind": {
        "causal_lm": "clm, sft, language_modeling, cross_entropy",
        "contrastive": "multiplenegativesrankingloss, infonce",
        "flow_matching": "flow, rectified_flow",
        "ddpm": "ddim",
    },
}

WITHOUT: dict[str, str] = {
    # Keys without a counterpart, and what to do instead.
    "resume_from_checkpoint": "Resuming is not a setting: run the same command again, or name a folder: --resume PATH.",
    "load_in_4bit": "Quantised weights are not trained: use model.lora=true, which keeps frozen weights as stored.",
    "load_in_8bit": "Quantised weights are not trained: use model.lora=true, which keeps frozen weights as stored.",
    "push_to_hub": "fullshard uploads nothing: upload the finished folder RUN/model with `hf upload`.",
    "ddp_find_unused_parameters": "It is not needed: parameters without a gradient are found and named. Leave it out.",
    "find_unused_parameters": "It is not needed: parameters without a gradient are found and named. Leave it out.",
    "remove_unused_columns": "It is not needed: data.encode reads the columns that it knows. Leave it out.",
    "group_by_length": "It is not needed: data.pack fills rows without padding. Leave it out.",
    "tf32": "It is not needed: precision decides what computes in which dtype. Leave it out.",
    "save_strategy": "Name the interval itself: checkpoint.every_steps or checkpoint.every_epochs.",
    "eval_strategy": "Name the interval itself: evaluate.every_steps or evaluate.every_epochs.",
    "evaluation_strategy": "Name the interval itself: evaluate.every_steps or evaluate.every_epochs.",
}


@dataclass(frozen=True)
class NoEffect:
    """A key that is accepted and does nothing."""

    allowed: tuple[str | bool, ...]
    help: str
    """The key's description for editors."""
    note: str
    """What happens instead; {value} is the value given."""
    as_always: tuple[str | bool, ...] = ()
    """Values that ask for what FSDP2 does anyway; they need no note."""

    def note_for(self, value: str | bool) -> str | None:
        return None if value in self.as_always else self.note.format(value=shown(value))


NO_EFFECT: dict[str, dict[str, NoEffect]] = {
    # By section. These were switches of FSDP1.
    "sharding": {
        "use_orig_params": NoEffect(
            (True, False),
            "Accepted without effect: FSDP2 always keeps the original parameters.",
            "sharding.use_orig_params has no effect: FSDP2 always keeps the original parameters.",
        ),
        "limit_all_gathers": NoEffect(
            (True, False),
            "Accepted without effect: FSDP2 needs no limit.",
            "sharding.limit_all_gathers has no effect: FSDP2 bounds the gathered memory by itself.",
        ),
        "backward_prefetch": NoEffect(
            ("BACKWARD_PRE", "BACKWARD_POST", "NONE"),
            "Accepted without effect: FSDP2 always gathers the next block early, as BACKWARD_PRE did.",
            "sharding.backward_prefetch = {value} is not available: "
            "FSDP2 always gathers the next block's parameters early, as BACKWARD_PRE did.",
            as_always=("BACKWARD_PRE",),
        ),
    },
}

_OURS = {spelling: ours for ours, spellings in KEYS.items() for spelling in spellings.split()}


def of_key(path: str, value: Any) -> str | None:
    """Two sentences for a key that other trainers have, or None: what it is called here, and what to write."""
    steps = path.replace("-", "_").lower().split(".")
    endings = [".".join(steps[place:]) for place in range(len(steps))]
    if absent := next((WITHOUT[ending] for ending in endings if ending in WITHOUT), None):
        return absent
    found = next((_OURS[ending] for ending in endings if ending in _OURS), None)
    if found is None or found == path:
        return None
    key, is_fixed, form = found.partition("=")
    if is_fixed and "$" not in form and _off(value):
        return f"Here it is {key}, and if it is off, leave it out."
    written = form if is_fixed else "$"
    if "$" in written:
        if value is None or isinstance(value, Mapping):
            return f"Here it is {key}."
        ours = of_value(key, value) or shown(value)
        written = written.replace("[$]", f"[{ours.strip('[]')}]").replace("$", ours)
    setting = _quoted(f"{key}={written}")
    return f"Here it is {key}: write {_nested(key, written)} in the recipe, or {setting} on the command line."


def inside(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """The foreign keys in a section that does not exist here, each with what to write."""
    for key, inner in value.items() if isinstance(value, Mapping) else ():
        where = f"{path}.{key}"
        if isinstance(inner, Mapping):
            yield from inside(where, inner)
        elif found := of_key(where, inner):
            yield where, found


def of_value(key: str, value: Any) -> str | None:
    """Our word for a foreign value of one of our keys, or None."""
    word = shown(value).lower()
    return next((ours for ours, theirs in VALUES.get(key, {}).items() if word in theirs.split(", ")), None)


def _off(value: Any) -> bool:
    return value is False or (isinstance(value, str) and value.lower() in ("false", "no", "off", "none"))


def _nested(key: str, written: str) -> str:
    """`optimizer: {lr: 3e-4}`."""
    *outer, last = key.split(".")
    text = f"{last}: {written}"
    for name in reversed(outer):
        text = f"{name}: {{{text}}}"
    return text


def _quoted(setting: str) -> str:
    return f"'{setting}'" if any(character in setting for character in " {}[]*") else setting
