"""Keys of TrainingArguments that other trainers hand on to the Hugging Face Trainer, and readers for its keys.

Must not know the recipe.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fullshard.dialects import readers
from fullshard.dialects.kinds import (
    NOT_NEGATIVE,
    NUMBER,
    POSITIVE,
    SECTION,
    SHARE,
    SWITCH,
    TEXT,
    TEXTS,
    WHOLE,
)
from fullshard.dialects.rows import (
    File,
    Outcome,
    Said,
    Settings,
    ignored,
    part_of,
    reads,
    refuse,
    refused,
    to,
    unused,
)
from fullshard.dialects.words import our_word

FSDP_ROWS = (
    # Inside fsdp_config, with and without the prefix.
    reads(
        "sharding.strategy",
        readers.reshard_after_forward,
        "fsdp_config.reshard_after_forward fsdp_config.fsdp_reshard_after_forward",
        takes=SWITCH | TEXT,
        note="true: full; false: grad_op",
    ),
    reads(
        "sharding.strategy",
        readers.sharding_strategy,
        "fsdp_config.sharding_strategy fsdp_config.fsdp_sharding_strategy",
        takes=TEXT,
    ),
    to(
        "sharding.cpu_offload",
        "fsdp_config.cpu_offload fsdp_config.offload_params fsdp_config.fsdp_offload_params "
        "fsdp_config.fsdp_cpu_offload",
    ),
    to(
        "sharding.activation_checkpointing",
        "fsdp_config.activation_checkpointing fsdp_config.fsdp_activation_checkpointing",
    ),
    reads(
        "sharding.wrap.classes",
        readers.wrap_policy,
        "fsdp_config.auto_wrap_policy fsdp_config.fsdp_auto_wrap_policy",
        takes=readers.POLICY,
    ),
    reads(
        "sharding.wrap.classes",
        readers.wrap_classes,
        "fsdp_config.transformer_layer_cls_to_wrap fsdp_config.fsdp_transformer_layer_cls_to_wrap",
    ),
    reads(
        "sharding.wrap.min_params",
        readers.min_params,
        "fsdp_config.min_num_params fsdp_config.fsdp_min_num_params",
        takes=WHOLE,
    ),
    to("sharding.forward_prefetch", "fsdp_config.forward_prefetch fsdp_config.fsdp_forward_prefetch"),
    to("checkpoint.format", "fsdp_config.state_dict_type fsdp_config.fsdp_state_dict_type"),
    unused("fsdp_config.version fsdp_config.fsdp_version fsdp_version", "fullshard always uses FSDP2", quiet=(2, "2")),
    unused(
        "fsdp_config.backward_prefetch fsdp_config.fsdp_backward_prefetch fsdp_config.backward_prefetch_policy "
        "fsdp_config.fsdp_backward_prefetch_policy",
        "FSDP2 always gathers the next block's parameters early, as BACKWARD_PRE did",
        quiet=("BACKWARD_PRE", "backward_pre"),
    ),
    unused(
        "fsdp_config.use_orig_params fsdp_config.fsdp_use_orig_params", "FSDP2 always keeps the original parameters"
    ),
    unused(
        "fsdp_config.limit_all_gathers fsdp_config.fsdp_limit_all_gathers", "FSDP2 bounds the gathered memory by itself"
    ),
    unused(
        "fsdp_config.cpu_ram_efficient_loading fsdp_config.fsdp_cpu_ram_efficient_loading "
        "fsdp_config.sync_module_states fsdp_config.fsdp_sync_module_states",
        "each rank always reads only its own slices, and all start from the same values",
    ),
    unused(
        "fsdp_config.cpu_offload_pin_memory fsdp_config.final_state_dict_type fsdp_config.mixed_precision_policy "
        "fsdp_config.fsdp_final_state_dict_type fsdp_config.fsdp_mixed_precision_policy",
        "memory is pinned, the whole model is exported, and precision decides",
        quiet=(True,),
    ),
    refuse(
        "fsdp_config.xla fsdp_config.xla_fsdp_v2 fsdp_config.xla_fsdp_grad_ckpt", "fullshard trains on CUDA and CPU"
    ),
    unused("fsdp_config.xla_fsdp_settings", "fullshard trains on CUDA and CPU", quiet=({},)),
)


def load_fsdp_config(file: File) -> File:
    """`fsdp_config: settings.json` names a file."""
    named = file.get("fsdp_config")
    inner = readers.json_beside(named, file) if isinstance(named, str) else None
    return file if inner is None else File({**file.values, "fsdp_config": inner}, file.folder)


def fsdp(value: Any, file: File) -> Outcome | Settings:
    """A switch beside a section that says more, or words that say all."""
    found = readers.fsdp_words(value, file)
    keys = ("reshard_after_forward", "fsdp_reshard_after_forward", "sharding_strategy", "fsdp_sharding_strategy")
    says_more = any(file.get(f"fsdp_config.{key}") is not None for key in keys)
    if isinstance(found, dict) and says_more:
        found = {key: word for key, word in found.items() if key != "sharding.strategy"}
    return found


def epochs(value: Any, file: File) -> Outcome | Settings:
    if file.get("max_steps", -1) > 0:
        return ignored("max_steps is set, and wins")
    return {"duration.epochs": value}


def steps(value: Any, file: File) -> Outcome | Settings:
    return {"duration.steps": value} if value > 0 else ignored("")


_WITH_FLOOR = ("cosine_with_min_lr", "cosine_warmup_with_min_lr")


def schedule(value: Any, file: File) -> Outcome | Settings:
    """The kind; the two cosine kinds with a smallest rate have it in lr_scheduler_kwargs."""
    if value in _WITH_FLOOR:
        kwargs, rate = file.get("lr_scheduler_kwargs", {}), file.get("learning_rate", 5e-5)
        floor = kwargs.get("min_lr_rate", NUMBER.read(kwargs.get("min_lr", 0.0)) / rate)
        return {"schedule.kind": "cosine", "schedule.floor": floor}
    if value == "cosine_with_restarts" and file.get("lr_scheduler_kwargs.num_cycles", 1) == 1:
        return Outcome({"schedule.kind": "cosine"}, why="one cycle is a plain cosine")
    ours = our_word("schedule.kind", value)
    if ours is None:
        return refused(
            f"{value} is not here. Known: constant, linear, cosine, step; or your own class as schedule.kind"
        )
    return {"schedule.kind": ours}


def schedule_kwargs(value: Any, file: File) -> Outcome | Settings:
    kind = str(file.get("lr_scheduler_type", file.get("lr_scheduler", "linear")))
    read = (
        ["min_lr", "min_lr_rate"] if kind in _WITH_FLOOR else ["num_cycles"] if kind == "cosine_with_restarts" else []
    )
    same = {"num_cycles": 0.5} if kind.startswith("cosine") else {}  # what a plain cosine is
    left = [key for key, inner in value.items() if key not in read and inner not in (None, same.get(key))]
    if left:
        return refused(f"{', '.join(left)} is not a setting of the schedule {kind} here")
    return Outcome(why="read with the schedule")


def optimizer(value: Any, file: File) -> Outcome | Settings:
    ours = our_word("optimizer.kind", value)
    if ours is None:
        return refused(f"{value} is not here. Known: adamw, adamw_8bit, muon; or your own class as optimizer.kind")
    return {"optimizer.kind": ours}


def warmup_steps(value: Any, file: File) -> Outcome | Settings:
    """Transformers also reads a share of the run here. Its plain constant rate has no warm-up."""
    if value and file.get("lr_scheduler_type", file.get("lr_scheduler")) == "constant":
        return ignored("constant has no warm-up there; constant_with_warmup has")
    return ignored("") if not value and file.get("warmup_ratio") else {"schedule.warmup": value}


def clip(value: Any, file: File) -> Settings:
    return {"optimizer.clip": float(value) or None}


def metric(value: Any, file: File) -> Settings:
    name = value.removeprefix("eval_")
    mode = file.get("greater_is_better")
    return {"checkpoint.best.metric": name} | (
        {} if mode is None else {"checkpoint.best.mode": "max" if mode else "min"}
    )


def run_folder(value: Any, file: File) -> Settings:
    """Their folder is that of the run; ours is `output/name`."""
    parent, _, last = value.rstrip("/").rpartition("/")
    plain = (
        last.replace("-", "a").replace("_", "a").replace(".", "a").isalnum() and last[0].isalnum() if last else False
    )
    return {"output": parent or ("/" if value.startswith("/") else "."), "name": last} if plain else {"output": value}


def run_name(value: Any, file: File) -> Outcome | Settings:
    if file.get("output_dir") is not None:
        return ignored("the run is called as its folder")
    return {"name": value}


def hub_data(value: Any, file: File) -> Settings:
    config = file.get("dataset_config_name", file.get("dataset_config"))
    split = file.get("dataset_train_split")
    return {"data.train": readers.dataset(value, config=config, split=None if split == "train" else split)}


def holdout(value: Any, file: File) -> Settings:
    return {"data.holdout": value / 100}


def precision(settings: Settings, file: File) -> Iterator[Said]:
    """Neither kind of half precision asked for is fp32; TRL asks for bf16 unless told otherwise."""
    if "precision" in settings:
        return
    if is_trl(file) and file.get("bf16") is None and not file.get("fp16"):
        yield Said("bf16", True, "default", {"precision": "bf16"}, "TRL computes in bf16 unless told otherwise")
    else:
        yield Said("bf16", False, "default", {"precision": "fp32"}, "neither bf16 nor fp16 is on; bf16: true is faster")


_OF_TRL = (
    *("use_peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "dataset_text_field", "packing"),
    *("assistant_only_loss", "completion_only_loss", "dataset_train_split", "dataset_config", "dataset_num_proc"),
)


def is_trl(file: File) -> bool:
    """Whether a file is for TRL's SFTTrainer, whose defaults differ."""
    return any(file.get(key) is not None for key in _OF_TRL)


def accelerator(value: Any, file: File) -> Outcome | Settings:
    """Settings of accelerate's loader; one of them changes how many rows a step has."""
    if SWITCH.read(value.get("split_batches", False)):
        return refused(
            "split_batches: batch.per_device is the rows of one rank; write the batch of all ranks as batch.global"
        )
    return ignored("the loader and the step are fullshard's own" if value else "")


def answers_only(value: Any, file: File) -> Outcome | Settings:
    """Plain text is learned whole; of a conversation the answers are, unless the file says otherwise."""
    if value or file.get("dataset_text_field") is not None:
        return ignored("")
    return {"data.encode": {"kind": "chat", "train_on": "all"}}


def workers(value: Any, file: File) -> Outcome | Settings:
    return {"data.workers": value} if value else ignored("")


def lora_targets(value: Any, file: File) -> Settings:
    return {"model.lora.targets": "all-linear" if value in (["all"], ["all-linear"], ["all_linear"]) else value}


def dtype(value: Any, file: File) -> Outcome | Settings:
    if file.get("bf16") or file.get("fp16") or value == "auto":
        return ignored("frozen weights keep the dtype of their file, trained ones are kept in fp32")
    return {"precision": value}


COMMON = (
    # Keys of TrainingArguments that LLaMA-Factory and axolotl hand on to it.
    to("batch.accumulate", "gradient_accumulation_steps"),
    to("optimizer.lr", "learning_rate", default=5e-5),
    to("optimizer.weight_decay", "weight_decay", default=0.0),
    reads("optimizer.betas", readers.beta(0), "adam_beta1", takes=SHARE, default=0.9, note="the first of the two"),
    reads("optimizer.betas", readers.beta(1), "adam_beta2", takes=SHARE, note="the second of the two"),
    to("optimizer.eps", "adam_epsilon"),
    reads("optimizer.clip", clip, "max_grad_norm", takes=NOT_NEGATIVE, note="0: null"),
    reads("schedule.warmup", warmup_steps, "warmup_steps"),
    reads("schedule.warmup", readers.warmup, "warmup_ratio", note="a share of the run; warmup_steps wins"),
    reads("schedule.kind", schedule_kwargs, "lr_scheduler_kwargs", takes=SECTION, note="min_lr becomes schedule.floor"),
    to("precision=bf16", "bf16"),
    to("precision=fp16", "fp16"),
    reads(
        "sharding.strategy",
        fsdp,
        "fsdp",
        takes=readers.FSDP,
        note="full_shard, shard_grad_op, hybrid_shard, no_shard; offload; true is full",
    ),
    *FSDP_ROWS,
    reads(
        "sharding.strategy",
        readers.deepspeed,
        "deepspeed",
        takes=readers.DEEPSPEED,
        note="a file or a section: its ZeRO stage",
    ),
    to("sharding.activation_checkpointing", "gradient_checkpointing"),
    unused("gradient_checkpointing_kwargs", "recomputation is always non-reentrant", quiet=({"use_reentrant": False},)),
    to("sharding.compile", "torch_compile"),
    unused(
        "torch_compile_backend torch_compile_mode",
        "each block is compiled with inductor",
        quiet=("inductor", "default"),
    ),
    to("log.every_steps", "logging_steps"),
    reads("log.sinks", readers.trackers, "report_to", takes=TEXTS),
    reads(
        "checkpoint.every_steps",
        readers.every_steps("checkpoint", "save_strategy", default="steps"),
        "save_steps",
        takes=POSITIVE,
    ),
    reads(
        "checkpoint.every_steps",
        readers.interval("checkpoint", "save_steps", default=500),
        "save_strategy",
        takes=readers.INTERVAL,
        note="no, epoch or steps",
    ),
    reads(
        "checkpoint.keep",
        lambda value, file: {"checkpoint.keep": value or None},
        "save_total_limit",
        takes=WHOLE,
        default=None,
        note="null: all are kept",
    ),
    reads("checkpoint.best.metric", metric, "metric_for_best_model"),
    part_of("greater_is_better", "metric_for_best_model", takes=SWITCH),
    to("checkpoint.export=best", "load_best_model_at_end"),
    reads(
        "evaluate.every_steps",
        readers.every_steps("evaluate", "eval_strategy", default="steps"),
        "eval_steps",
        takes=POSITIVE,
    ),
    reads(
        "evaluate.every_steps",
        readers.interval("evaluate", "eval_steps", default=500),
        "eval_strategy evaluation_strategy",
        takes=readers.INTERVAL,
        note="no, epoch or steps",
    ),
    to("evaluate.patience", "early_stopping_patience"),
    to("seed", "seed", default=42),
    reads("output", run_folder, "output_dir", note="the run's folder: output and name together"),
    reads("name", run_name, "run_name"),
    reads("data.workers", workers, "dataloader_num_workers"),
    to("topology.timeout_s", "ddp_timeout"),
    unused("overwrite_output_dir", "a run resumes; --resume never starts over"),
    unused(
        "resume_from_checkpoint auto_resume_from_checkpoints",
        "the same command resumes; --resume PATH names a checkpoint",
    ),
    unused("tf32", "precision decides what computes in which dtype", quiet=(True, False)),
    unused("group_by_length length_column_name", "data.pack fills rows without padding", quiet=(False, "length")),
    unused(
        "dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor dataloader_in_order "
        "dataloader_multiprocessing_context dataloader_drop_last",
        "the loader pins and prefetches by itself, and every sample is used",
        quiet=(True, False, 2),
    ),
    unused(
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend",
        "FSDP2 reduces gradients; parameters without one are named",
        quiet=(False, "nccl"),
    ),
    unused(
        "remove_unused_columns label_names include_for_metrics",
        "data.encode reads the columns that it knows",
        quiet=(True, False, []),
    ),
    unused(
        "use_liger_kernel liger_kernel_config",
        "the loss is computed in chunks, without a copy of the logits",
        quiet=(False,),
    ),
    refuse("neftune_noise_alpha", "noise on embeddings is not available"),
    refuse("label_smoothing_factor", "label smoothing is not available: write your own objective", unless=(0, 0.0)),
    refuse("optim_args optim_target_modules", "the optimizer's settings are keys of `optimizer`", unless=("", None)),
    refuse("push_to_hub", "fullshard uploads nothing: upload the finished RUN/model with `hf upload`"),
    unused(
        "hub_model_id hub_token hub_strategy hub_private_repo hub_always_push hub_revision",
        "fullshard uploads nothing: `hf upload` does",
        quiet=(False, "every_save"),
    ),
)
