"""torchtitan's TOML: job, model, optimizer, lr_scheduler, training, parallelism, checkpoint, activation_checkpoint."""

from __future__ import annotations

from typing import Any

from fullshard.dialects.kinds import ANY_WHOLE, SHARE, SWITCH, TEXT, UP_TO_ONE, WHOLE, one_of
from fullshard.dialects.rows import (
    Dialect,
    File,
    Outcome,
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

_ARCHITECTURES = {"llama3": "llama", "llama3_ft": "llama", "qwen3": "qwen3", "llama": "llama"}
_SETS = {
    "c4": {"kind": "hub", "name": "allenai/c4", "config": "en"},
    "c4_validation": {"kind": "hub", "name": "allenai/c4", "config": "en", "split": "validation"},
}


def _model(value: Any, file: File) -> Outcome | Settings:
    found = _ARCHITECTURES.get(value)
    return (
        {"model.architecture": found}
        if found
        else refused(f"{value} is not known: write model.architecture, a model type of Transformers")
    )


def _size(value: Any, file: File) -> Settings:
    return {"model.size": "tiny" if value.startswith("debug") else value}


def _data(value: Any, file: File) -> Outcome | Settings:
    if file.get("training.dataset_path"):
        return {"data.train": file.get("training.dataset_path")}
    found = _SETS.get(value)
    return (
        {"data.train": found}
        if found
        else refused(f"{value} is not known: write data.train, a path or {{kind: hub, name: ...}}")
    )


def _sizes(degree: str) -> Any:
    def read(value: Any, file: File) -> Outcome | Settings:
        return ignored("") if value in (1, 0) else refused(f"there is no {degree} parallelism")

    return read


def _replicate(value: Any, file: File) -> Outcome | Settings:
    if value <= 1:
        return ignored("")
    return {"sharding.strategy": "none" if file.get("parallelism.data_parallel_shard_degree") == 1 else "hybrid"}


def _shard(value: Any, file: File) -> Outcome | Settings:
    replicate = file.get("parallelism.data_parallel_replicate_degree", 1)
    if value != 1 and file.get("parallelism.fsdp_reshard_after_forward") == "never":
        return Outcome(why="read with fsdp_reshard_after_forward")
    return {"sharding.strategy": "full"} if value != 1 and replicate <= 1 else ignored("")


def _reshard(value: Any, file: File) -> Outcome | Settings:
    replicate = file.get("parallelism.data_parallel_replicate_degree", 1)
    if value == "never" and replicate > 1:
        return ignored("within a node parameters are gathered again for the backward pass")
    return {"sharding.strategy": "grad_op"} if value == "never" else ignored("")


def _precision(value: Any, file: File) -> Outcome | Settings:
    if file.get("training.dtype") == "bfloat16":
        return ignored("training.dtype is bfloat16: weights are in it too")
    return {"precision": value}


def _dtype(value: Any, file: File) -> Outcome | Settings:
    if value == "bfloat16":
        return {"precision": "bf16-pure"}
    return ignored("") if value == "float32" else refused(f"{value} is not here. Known: float32, bfloat16")


def _saves(value: Any, file: File) -> Outcome | Settings:
    return ignored("") if value else Outcome({"checkpoint.every_epochs": None}, why="the end is saved in any case")


def _interval(value: Any, file: File) -> Outcome | Settings:
    on = file.get("checkpoint.enable", file.get("checkpoint.enable_checkpoint"))
    return {"checkpoint.every_steps": value} if on else ignored("checkpoints are not enabled")


def _async(value: Any, file: File) -> Settings:
    return {"checkpoint.asynchronous": value != "disabled"}


def _beta(place: int) -> Any:
    def read(value: Any, file: File) -> Settings:
        pair = [file.get("optimizer.beta1", 0.9), file.get("optimizer.beta2", 0.95)]
        pair[place] = value
        return {"optimizer.betas": pair}

    return read


def _decay(value: Any, file: File) -> Outcome | Settings:
    return (
        refused("a constant rate with a late decay is not available: cosine and linear decay over the whole run")
        if value
        else ignored("")
    )


def _decay_type(value: Any, file: File) -> Outcome | Settings:
    ours = our_word("schedule.kind", value)
    return {"schedule.kind": ours} if ours else refused(f"{value} is not here. Known: linear, cosine")


def _sinks(word: str) -> Any:
    def read(value: Any, file: File) -> Outcome | Settings:
        both = file.get("metrics.enable_tensorboard") and file.get("metrics.enable_wandb")
        return {"log.sinks": ["tensorboard", "wandb"] if both else [word]} if value else ignored("")

    return read


DIALECT = Dialect(
    name="torchtitan",
    title="torchtitan",
    intro=(
        "Pre-training from scratch with data parallelism. What a file leaves out is as torchtitan does it: a rate of\n"
        "8e-4 with linear decay after 200 steps of warm-up, 10,000 steps, rows of 2,048 tokens."
    ),
    marks=(
        "job",
        "parallelism",
        "metrics",
        "training.steps",
        "training.seq_len",
        "training.local_batch_size",
        "activation_checkpoint",
        "model.flavor",
    ),
    always={"data.holdout": 0},
    rows=(
        reads("model.architecture", _model, "model.name"),
        reads("model.size", _size, "model.flavor"),
        to("model.tokenizer", "model.tokenizer_path model.hf_assets_path"),
        unused(
            "model.norm_type model.print_after_conversion",
            "the architecture decides",
            quiet=([], "", False),
        ),
        refuse("model.converters", "write precision: float8 for float8; there is no other conversion", unless=([], "")),
        reads("data.train", _data, "training.dataset", takes=TEXT, note="c4, or the path in dataset_path"),
        part_of("training.dataset_path", "dataset", takes=TEXT),
        to("data.sequence_length", "training.seq_len", default=2048),
        to("batch.per_device", "training.local_batch_size training.batch_size", default=8),
        reads(
            "batch.global",
            lambda value, file: {"batch.global": value} if value > 0 else ignored(""),
            "training.global_batch_size",
            takes=ANY_WHOLE,
        ),
        to("duration.steps", "training.steps", default=10000),
        to("optimizer.clip", "training.max_norm"),
        to("seed", "training.seed debug.seed"),
        reads("precision", _precision, "training.mixed_precision_param", default="bfloat16"),
        reads("precision", _dtype, "training.dtype", takes=TEXT, note="bfloat16: bf16-pure"),
        unused("training.mixed_precision_reduce", "gradients are always reduced in fp32", quiet=("float32",)),
        to("sharding.cpu_offload", "training.enable_cpu_offload"),
        to("sharding.compile", "compile.enable training.compile"),
        unused(
            "compile.components compile.backend training.gc_freq training.gc_debug training.deterministic "
            "debug.deterministic training.debug_moe_force_load_balance",
            "each block is compiled; the rest is fixed",
            quiet=(False, 50, ["model", "loss"], "float32", "inductor"),
        ),
        reads(
            "optimizer.kind",
            lambda value, file: (
                {"optimizer.kind": our_word("optimizer.kind", value)}
                if our_word("optimizer.kind", value)
                else refused(f"{value} is not here. Known: AdamW")
            ),
            "optimizer.name",
        ),
        to("optimizer.lr", "optimizer.lr", default=8e-4),
        to("optimizer.eps", "optimizer.eps"),
        to("optimizer.weight_decay", "optimizer.weight_decay"),
        reads("optimizer.betas", _beta(0), "optimizer.beta1", takes=SHARE),
        reads("optimizer.betas", _beta(1), "optimizer.beta2", takes=SHARE),
        unused(
            "optimizer.implementation optimizer.early_step_in_backward optimizer.fused",
            "the optimizer is fused",
            quiet=("fused", False, True),
        ),
        to("schedule.warmup", "lr_scheduler.warmup_steps training.warmup_steps", default=200),
        reads("schedule.kind", _decay_type, "lr_scheduler.decay_type", default="linear"),
        reads("schedule.kind", _decay, "lr_scheduler.decay_ratio", takes=UP_TO_ONE),
        to("schedule.floor", "lr_scheduler.min_lr_factor lr_scheduler.lr_min"),
        reads(
            "sharding.strategy",
            _shard,
            "parallelism.data_parallel_shard_degree training.data_parallel_shard_degree",
            takes=ANY_WHOLE,
        ),
        reads(
            "sharding.strategy",
            _replicate,
            "parallelism.data_parallel_replicate_degree training.data_parallel_replicate_degree",
            takes=WHOLE,
        ),
        reads(
            "sharding.strategy",
            _reshard,
            "parallelism.fsdp_reshard_after_forward",
            takes=one_of("default", "never", "always"),
            note="never: grad_op",
        ),
        reads(
            "",
            _sizes("tensor"),
            "parallelism.tensor_parallel_degree training.tensor_parallel_degree",
            takes=WHOLE,
            note="1 only",
        ),
        reads(
            "",
            _sizes("pipeline"),
            "parallelism.pipeline_parallel_degree experimental.pipeline_parallel_degree",
            takes=WHOLE,
            note="1 only",
        ),
        reads(
            "",
            _sizes("context"),
            "parallelism.context_parallel_degree experimental.context_parallel_degree",
            takes=WHOLE,
            note="1 only",
        ),
        reads(
            "",
            _sizes("expert"),
            "parallelism.expert_parallel_degree parallelism.expert_tensor_parallel_degree",
            takes=WHOLE,
            note="1 only",
        ),
        unused(
            "parallelism.enable_async_tensor_parallel parallelism.disable_loss_parallel "
            "parallelism.enable_compiled_autograd parallelism.pipeline_parallel_schedule "
            "parallelism.context_parallel_rotate_method experimental",
            "it belongs to parallelism that is not in use",
            quiet=(),
        ),
        to("sharding.activation_checkpointing", "activation_checkpoint.mode", default="selective"),
        unused(
            "activation_checkpoint.selective_ac_option "
            "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns",
            "selective keeps attention and every second matrix product",
            quiet=("op", "2", 2),
        ),
        reads("checkpoint.every_epochs", _saves, "checkpoint.enable checkpoint.enable_checkpoint", takes=SWITCH),
        reads("checkpoint.every_steps", _interval, "checkpoint.interval"),
        reads(
            "checkpoint.asynchronous",
            _async,
            "checkpoint.async_mode",
            takes=one_of("disabled", "async", "async_with_pinned_mem"),
        ),
        reads(
            "checkpoint.keep",
            lambda value, file: {"checkpoint.keep": value or None},
            "checkpoint.keep_latest_k",
            takes=WHOLE,
            default=10,
        ),
        unused(
            "checkpoint.folder checkpoint.model_weights_only checkpoint.export_dtype "
            "checkpoint.last_save_model_only checkpoint.last_save_in_hf checkpoint.initial_load_in_hf "
            "checkpoint.create_seed_checkpoint checkpoint.load_step checkpoint.exclude_from_loading",
            "checkpoints are in the run folder, and the model is exported for Transformers",
            quiet=(True, False, "checkpoint", -1, []),
        ),
        refuse(
            "checkpoint.initial_load_path",
            "to start from weights write model.path: a folder of Transformers",
            unless=("",),
        ),
        to("output", "job.dump_folder"),
        unused(
            "job.description job.use_for_integration_test job.print_args job.print_config job.config_file "
            "job.custom_config_module",
            "it does not change what is learned",
            quiet=(),
        ),
        to("log.every_steps", "metrics.log_freq"),
        reads("log.sinks", _sinks("tensorboard"), "metrics.enable_tensorboard", takes=SWITCH),
        reads("log.sinks", _sinks("wandb"), "metrics.enable_wandb", takes=SWITCH),
        unused(
            "metrics.save_tb_folder metrics.disable_color_printing metrics.rank_0_only metrics.save_for_all_ranks",
            "logs are in the run folder",
            quiet=("tb", True, False),
        ),
        to("evaluate.every_steps", "validation.freq"),
        unused("validation", "write data.validation and evaluate", quiet=({},)),
        unused(
            "profiling.enable_profiling profiling.save_traces_folder profiling.profile_freq "
            "profiling.enable_memory_snapshot profiling.save_memory_snapshot_folder profiling",
            "metrics.jsonl has the times and memory of every step",
            quiet=(False,),
        ),
        unused(
            "float8.enable_fsdp_float8_all_gather float8.precompute_float8_dynamic_scale_for_fsdp "
            "float8.filter_fqns float8 quantize mx",
            "precision: float8 or float8-gather decides",
            quiet=(False, ["output"], "output"),
        ),
        unused(
            "comm.init_timeout_seconds comm.trace_buf_size comm.train_timeout_seconds comm.save_traces_folder comm",
            "topology.timeout_s is how long a rank waits",
            quiet=(),
        ),
        unused("fault_tolerance memory_estimation", "a run resumes; `fullshard check` estimates memory", quiet=({},)),
    ),
)
