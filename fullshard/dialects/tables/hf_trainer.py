"""TrainingArguments of the Hugging Face Trainer, with the model and data arguments of its scripts and of TRL's."""

from __future__ import annotations

import json
from typing import Any

from fullshard.dialects import readers
from fullshard.dialects.rows import (
    Dialect,
    File,
    Outcome,
    Settings,
    ignored,
    is_on,
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
        note="true: full; false: grad_op",
    ),
    reads(
        "sharding.strategy",
        readers.sharding_strategy,
        "fsdp_config.sharding_strategy fsdp_config.fsdp_sharding_strategy",
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
        "sharding.wrap.classes", readers.wrap_policy, "fsdp_config.auto_wrap_policy fsdp_config.fsdp_auto_wrap_policy"
    ),
    reads(
        "sharding.wrap.classes",
        readers.wrap_classes,
        "fsdp_config.transformer_layer_cls_to_wrap fsdp_config.fsdp_transformer_layer_cls_to_wrap",
    ),
    reads("sharding.wrap.min_params", readers.min_params, "fsdp_config.min_num_params fsdp_config.fsdp_min_num_params"),
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
    path = file.folder / str(named)
    if not isinstance(named, str) or not path.is_file():
        return file
    return File({**file.values, "fsdp_config": json.loads(path.read_text(encoding="utf-8"))}, file.folder)


def fsdp(value: Any, file: File) -> Outcome | Settings:
    """A switch beside a section that says more, or words that say all."""
    found = readers.fsdp_words(value, file)
    keys = ("reshard_after_forward", "fsdp_reshard_after_forward", "sharding_strategy", "fsdp_sharding_strategy")
    says_more = any(file.get(f"fsdp_config.{key}") is not None for key in keys)
    if isinstance(found, dict) and says_more:
        found = {key: word for key, word in found.items() if key != "sharding.strategy"}
    return found


def epochs(value: Any, file: File) -> Outcome | Settings:
    if int(file.get("max_steps", -1)) > 0:
        return ignored("max_steps is set, and wins")
    return {"duration.epochs": value}


def steps(value: Any, file: File) -> Outcome | Settings:
    return {"duration.steps": int(value)} if int(value) > 0 else ignored("")


def schedule(value: Any, file: File) -> Outcome | Settings:
    """The kind; the two cosine kinds with a smallest rate have it in lr_scheduler_kwargs."""
    if value in ("cosine_with_min_lr", "cosine_warmup_with_min_lr"):
        kwargs, rate = file.get("lr_scheduler_kwargs", {}), file.get("learning_rate", 5e-5)
        floor = kwargs.get("min_lr_rate", kwargs.get("min_lr", 0.0) / rate if rate else 0.0)
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
    if set(value) <= {"min_lr", "min_lr_rate", "num_cycles"}:
        return ignored("")
    return refused(f"{', '.join(value)} are not settings of a schedule here")


def optimizer(value: Any, file: File) -> Outcome | Settings:
    ours = our_word("optimizer.kind", value)
    if ours is None:
        return refused(f"{value} is not here. Known: adamw, adamw_8bit, muon; or your own class as optimizer.kind")
    return {"optimizer.kind": ours}


def warmup_steps(value: Any, file: File) -> Outcome | Settings:
    """Transformers also reads a share of the run here."""
    return {"schedule.warmup": value} if value else ignored("")


def clip(value: Any, file: File) -> Settings:
    return {"optimizer.clip": float(value) or None}


def metric(value: Any, file: File) -> Settings:
    name = str(value).removeprefix("eval_")
    mode = file.get("greater_is_better")
    return {"checkpoint.best.metric": name} | (
        {} if mode is None else {"checkpoint.best.mode": "max" if mode else "min"}
    )


def save_total_limit(value: Any, file: File) -> Settings:
    return {"checkpoint.keep": int(value)}


def run_folder(value: Any, file: File) -> Settings:
    """Their folder is that of the run; ours is `output/name`."""
    parent, _, last = str(value).rstrip("/").rpartition("/")
    plain = (
        last.replace("-", "a").replace("_", "a").replace(".", "a").isalnum() and last[0].isalnum() if last else False
    )
    return (
        {"output": parent or ("/" if str(value).startswith("/") else "."), "name": last} if plain else {"output": value}
    )


def run_name(value: Any, file: File) -> Outcome | Settings:
    if file.get("output_dir") is not None:
        return ignored("the run is called as its folder")
    return {"name": value}


def hub_data(value: Any, file: File) -> Settings:
    config = file.get("dataset_config_name", file.get("dataset_config"))
    split = file.get("dataset_train_split")
    return {"data.train": readers.dataset(str(value), config=config, split=None if split == "train" else split)}


def holdout(value: Any, file: File) -> Settings:
    return {"data.holdout": value / 100}


def precision_off(settings: Settings, file: File) -> Settings:
    """Both kinds of half precision switched off is fp32."""
    if "precision" not in settings and file.get("bf16") is False and file.get("fp16") is False:
        return {**settings, "precision": "fp32"}
    return settings


def packing(value: Any, file: File) -> Settings:
    return {"data.pack": is_on(value)}


def workers(value: Any, file: File) -> Outcome | Settings:
    return {"data.workers": value} if value else ignored("")


def attention(value: Any, file: File) -> Settings:
    return {"model.attention": our_word("model.attention", value) or value}


def lora_targets(value: Any, file: File) -> Settings:
    if value in ("all", "all-linear", ["all-linear"], "all_linear"):
        return {"model.lora.targets": "all-linear"}
    return {"model.lora.targets": value if isinstance(value, list) else [name.strip() for name in value.split(",")]}


def dtype(value: Any, file: File) -> Outcome | Settings:
    if file.get("bf16") or file.get("fp16") or value == "auto":
        return ignored("frozen weights keep the dtype of their file, trained ones are kept in fp32")
    return {"precision": value}


COMMON = (
    # Keys of TrainingArguments that LLaMA-Factory and axolotl hand on to it.
    reads("batch.accumulate", lambda value, file: {"batch.accumulate": int(value)}, "gradient_accumulation_steps"),
    to("optimizer.lr", "learning_rate", default=5e-5),
    to("optimizer.weight_decay", "weight_decay", default=0.0),
    reads("optimizer.betas", readers.beta(0), "adam_beta1", default=0.9, note="the first of the two"),
    reads("optimizer.betas", readers.beta(1), "adam_beta2", note="the second of the two"),
    to("optimizer.eps", "adam_epsilon"),
    reads("optimizer.clip", clip, "max_grad_norm", note="0: null"),
    reads("schedule.warmup", warmup_steps, "warmup_steps"),
    reads("schedule.warmup", readers.warmup, "warmup_ratio", note="a share of the run; warmup_steps wins"),
    reads("schedule.kind", schedule_kwargs, "lr_scheduler_kwargs", note="min_lr becomes schedule.floor"),
    to("precision=bf16", "bf16"),
    to("precision=fp16", "fp16"),
    reads(
        "sharding.strategy",
        fsdp,
        "fsdp",
        note="full_shard, shard_grad_op, hybrid_shard, no_shard; offload; true is full",
    ),
    *FSDP_ROWS,
    reads("sharding.strategy", readers.deepspeed, "deepspeed", note="a file or a section: its ZeRO stage"),
    to("sharding.activation_checkpointing", "gradient_checkpointing"),
    unused("gradient_checkpointing_kwargs", "recomputation is always non-reentrant", quiet=({"use_reentrant": False},)),
    to("sharding.compile", "torch_compile"),
    unused(
        "torch_compile_backend torch_compile_mode",
        "each block is compiled with inductor",
        quiet=("inductor", "default"),
    ),
    to("log.every_steps", "logging_steps"),
    reads("log.sinks", readers.trackers, "report_to"),
    reads("checkpoint.every_steps", readers.every_steps("checkpoint", "save_strategy", default="steps"), "save_steps"),
    reads(
        "checkpoint.every_steps",
        readers.interval("checkpoint", "save_steps", default=500),
        "save_strategy",
        note="no, epoch or steps",
    ),
    reads("checkpoint.keep", save_total_limit, "save_total_limit"),
    reads("checkpoint.best.metric", metric, "metric_for_best_model"),
    unused("greater_is_better", "said with metric_for_best_model: checkpoint.best.mode", quiet=(True, False)),
    to("checkpoint.export=best", "load_best_model_at_end"),
    reads("evaluate.every_steps", readers.every_steps("evaluate", "eval_strategy", default="steps"), "eval_steps"),
    reads(
        "evaluate.every_steps",
        readers.interval("evaluate", "eval_steps", default=500),
        "eval_strategy evaluation_strategy",
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

DIALECT = Dialect(
    name="the HF Trainer",
    title="Hugging Face Trainer",
    intro=(
        "A JSON or YAML file of TrainingArguments, alone or with the model and data arguments of the scripts that use\n"
        "it. What the file leaves out is as Transformers does it: a learning rate of 5e-5, linear decay, no weight\n"
        "decay, three epochs, no packing, nothing held out."
    ),
    marks=(
        "per_device_train_batch_size",
        "num_train_epochs",
        "per_device_eval_batch_size",
        "lr_scheduler_type",
        "do_train",
        "dataset_text_field",
        "model_name_or_path",
        "adam_beta2",
        "save_total_limit",
        "fsdp",
        "gradient_checkpointing_kwargs",
        "eval_strategy",
        "save_strategy",
        "optim",
        "ddp_timeout",
        "warmup_ratio",
        "max_grad_norm",
    ),
    prepare=load_fsdp_config,
    finish=precision_off,
    rows=(
        to("batch.per_device", "per_device_train_batch_size per_gpu_train_batch_size", default=8),
        to("evaluate.per_device", "per_device_eval_batch_size per_gpu_eval_batch_size"),
        reads("duration.steps", steps, "max_steps", note="-1: not set"),
        reads("duration.epochs", epochs, "num_train_epochs", default=3.0, note="max_steps wins"),
        reads("optimizer.kind", optimizer, "optim"),
        reads("schedule.kind", schedule, "lr_scheduler_type", default="linear"),
        *COMMON,
        to("evaluate.at_start", "eval_on_start"),
        to("topology.device=cpu", "use_cpu no_cuda"),
        to("model.path", "model_name_or_path model_name"),
        to("model.tokenizer", "tokenizer_name tokenizer_name_or_path"),
        to("model.revision", "model_revision"),
        to("model.trust_remote_code", "trust_remote_code"),
        reads("model.attention", attention, "attn_implementation"),
        reads("precision", dtype, "torch_dtype dtype"),
        to("model.lora=true", "use_peft use_lora"),
        to("model.lora.r", "lora_r"),
        to("model.lora.alpha", "lora_alpha"),
        to("model.lora.dropout", "lora_dropout"),
        reads("model.lora.targets", lora_targets, "lora_target_modules"),
        unused(
            "lora_task_type lora_modules_to_save",
            "adapters are trained on the layers of model.lora.targets",
            quiet=("CAUSAL_LM", []),
        ),
        reads("data.train", hub_data, "dataset_name", note="a path, or a name on the hub"),
        unused("dataset_config_name dataset_config dataset_train_split", "said with dataset_name", quiet=("train",)),
        unused("dataset_test_split", "give data.validation a source", quiet=("test",)),
        to("data.train", "train_file dataset_path train_data_path data_path train_data"),
        to("data.validation", "validation_file eval_file val_data_path eval_data_path"),
        reads("data.holdout", holdout, "validation_split_percentage", default=0),
        to("data.encode={kind: text, column: $}", "dataset_text_field text_column_name"),
        to("data.sequence_length", "max_seq_length max_length block_size max_seq_len model_max_length"),
        reads("data.pack", packing, "packing", default=False),
        unused(
            "do_train do_eval do_predict",
            "fullshard train trains, and validates if there is data for it",
            quiet=(True, False),
        ),
        unused(
            "assistant_only_loss completion_only_loss",
            "only answers are learned, unless data.encode says train_on: all",
            quiet=(True,),
        ),
        unused(
            "preprocessing_num_workers dataset_num_proc overwrite_cache",
            "data is encoded once and cached by content",
            quiet=(),
        ),
        unused(
            "average_tokens_across_devices",
            "a step is always averaged over the tokens of all ranks",
            quiet=(True,),
        ),
        unused("per_device_batch_size auto_find_batch_size", "`fullshard check` says what fits", quiet=(False,)),
        unused(
            "logging_strategy logging_first_step log_on_each_node logging_nan_inf_filter log_level log_level_replica "
            "logging_dir disable_tqdm include_num_input_tokens_seen include_tokens_per_second project trackio_space_id "
            "trackio_bucket_id trackio_static_space_id skip_memory_metrics debug",
            "the console, log.txt and metrics.jsonl have everything",
            quiet=(True, False, "steps", "passive", "warning", "no", "", "huggingface", []),
        ),
        unused(
            "eval_delay eval_accumulation_steps prediction_loss_only eval_do_concat_batches eval_use_gather_object "
            "batch_eval_metrics bf16_full_eval fp16_full_eval",
            "validation computes as training does, batch by batch",
            quiet=(True, False, 0),
        ),
        unused(
            "save_only_model save_on_each_node save_safetensors enable_jit_checkpoint ignore_data_skip "
            "restore_callback_states_from_checkpoint",
            "a checkpoint always resumes exactly",
            quiet=(True, False),
        ),
        unused("full_determinism data_seed", "the data order follows from `seed`", quiet=(False,)),
        unused("accelerator_config", "the loader and the step are fullshard's own", quiet=({},)),
        refuse("parallelism_config", "there is no tensor or context parallelism", unless=({},)),
        unused(
            "torch_empty_cache_steps use_cache",
            "activations are freed by themselves; there is no cache in training",
            quiet=(False, True),
        ),
        unused("train_sampling_strategy", "data.shuffle: a new order every epoch", quiet=("random",)),
        unused("local_rank", "the launcher says it: LOCAL_RANK", quiet=(-1, 0)),
        refuse(
            "load_in_4bit load_in_8bit",
            "quantised weights are not trained: model.lora: true keeps frozen weights as stored",
        ),
    ),
)
