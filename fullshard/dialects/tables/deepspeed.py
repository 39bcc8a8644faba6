"""DeepSpeed's JSON: the ZeRO stage becomes a sharding strategy, and the rest is answered key by key."""

from __future__ import annotations

from typing import Any

from fullshard.dialects.kinds import AUTO, COUNT, NOT_NEGATIVE, SECTION, SWITCH, one_of
from fullshard.dialects.readers import stage_settings
from fullshard.dialects.rows import (
    Dialect,
    File,
    Outcome,
    Reader,
    Settings,
    ignored,
    reads,
    refuse,
    refused,
    to,
    unused,
)
from fullshard.dialects.words import our_word
from fullshard.formatting.yaml_text import shown

_MICRO = "train_micro_batch_size_per_gpu"
_AUTO = ignored("auto: the training file decides")
_SAME_OPTIMIZER: dict[str, tuple[Any, ...]] = {
    "adam_w_mode": (True,),
    "bias_correction": (True,),
    "amsgrad": (False,),
    "torch_adam": (True, False),
    "fused": (True, False),
}
"""Other parameters of DeepSpeed's Adam, with the values that change nothing here."""
_SCHEDULE = {
    "warmup_num_steps": "schedule.warmup",
    "warmup_max_lr": "optimizer.lr",
    "total_num_steps": "duration.steps",
    "cos_min_ratio": "schedule.floor",
}
_STAGE = one_of("0", "1", "2", "3")
_DEVICE = one_of("none", "cpu", "nvme")
_ENABLED = SWITCH | AUTO
_TUNING = "FSDP2 sizes its buckets and prefetches by itself"


def _unless_auto(ours: str) -> Reader:
    def read(value: Any, file: File) -> Outcome | Settings:
        return _AUTO if value == "auto" else {ours: value or None}

    return read


def _stage(value: Any, file: File) -> Outcome | Settings:
    why = "grad_op also shards gradients: less memory, the same numbers" if value == "1" else ""
    return Outcome(stage_settings(int(value)), why=why)


def _offload(value: Any, file: File) -> Outcome | Settings:
    device = _DEVICE.read(value.get("device", "cpu")) if isinstance(value, dict) else value
    if device in ("none", False):
        return ignored("")
    if device == "nvme":
        return refused("there is no offload to NVMe: host memory is sharding.cpu_offload: true")
    return Outcome({"sharding.cpu_offload": True}, why="parameters, gradients and optimizer state move together")


def _accumulate(value: Any, file: File) -> Outcome | Settings:
    """Of the three sizes of a batch two say the third."""
    if value != "auto" and not _is_number(file, _MICRO) and _is_number(file, "train_batch_size"):
        return ignored("train_batch_size says the rows of a step; how they are split does not change what is learned")
    return _AUTO if value == "auto" else {"batch.accumulate": value}


def _global(value: Any, file: File) -> Outcome | Settings:
    if value != "auto" and _is_number(file, _MICRO) and _is_number(file, "gradient_accumulation_steps"):
        return ignored(f"{_MICRO} and gradient_accumulation_steps say it")
    return _AUTO if value == "auto" else {"batch.global": value}


def _is_number(file: File, key: str) -> bool:
    return isinstance(file.get(key), int)


def _half(word: str) -> Reader:
    def read(value: Any, file: File) -> Outcome | Settings:
        enabled = _ENABLED.read(value.get("enabled", True)) if isinstance(value, dict) else value
        if enabled == "auto":
            return _AUTO
        return {"precision": word} if enabled else ignored("")

    return read


def _optimizer(value: Any, file: File) -> Outcome | Settings:
    kind = our_word("optimizer.kind", value.get("type", "AdamW"))
    if kind is None and str(value.get("type")).lower() == "adam":
        kind = "adamw"  # DeepSpeed's Adam decouples the decay unless adam_w_mode says otherwise
    if kind is None:
        return refused(f"the optimizer {value.get('type')} is not here. Known: adamw, adamw_8bit, muon.")
    given = _params(value)
    found = {f"optimizer.{key}": given.pop(key) for key in ("lr", "betas", "eps", "weight_decay") if key in given}
    left = [key for key, inner in given.items() if inner not in _SAME_OPTIMIZER.get(key, ())]
    if left:
        return refused(f"params.{left[0]}: {shown(given[left[0]])} is not available")
    return {"optimizer.kind": kind, **found}


def _scheduler(value: Any, file: File) -> Outcome | Settings:
    kind = our_word("schedule.kind", value.get("type"))
    if kind is None:
        return refused(f"the scheduler {value.get('type')} is not here. Known: constant, linear, cosine, step.")
    given = _params(value)
    found: Settings = {"schedule.kind": kind}
    found |= {ours: given.pop(theirs) for theirs, ours in _SCHEDULE.items() if theirs in given}
    nearly = [
        key for key in ("warmup_min_lr", "warmup_min_ratio", "warmup_type", "last_batch_iteration") if key in given
    ]
    left = [key for key in given if key not in nearly]
    if left:
        return refused(f"params.{left[0]}: {shown(given[left[0]])} is not available")
    return Outcome(found, why="the warm-up is linear, from 0" if nearly else "")


def _params(value: Any) -> dict[str, Any]:
    params = SECTION.read(value.get("params") or {})
    return {key: inner for key, inner in params.items() if inner not in ("auto", None)}


DIALECT = Dialect(
    name="DeepSpeed",
    title="DeepSpeed",
    intro=(
        "A DeepSpeed JSON beside a training file (`fullshard train train.yaml --config-file ds_config.json`), or\n"
        "named in its `deepspeed:` key. `auto` leaves a value to the training file, as it does there."
    ),
    launches=True,
    marks=(
        "zero_optimization",
        "train_micro_batch_size_per_gpu",
        "zero_allow_untested_optimizer",
        "wall_clock_breakdown",
    ),
    rows=(
        reads(
            "sharding.strategy",
            _stage,
            "zero_optimization.stage",
            takes=_STAGE,
            note="0: none; 1 and 2: grad_op; 3: full",
        ),
        reads(
            "sharding.cpu_offload",
            _offload,
            "zero_optimization.offload_optimizer zero_optimization.offload_param zero_optimization.cpu_offload "
            "zero_optimization.offload_optimizer.device zero_optimization.offload_param.device",
            takes=_DEVICE | SWITCH | SECTION,
            note="cpu; NVMe is refused",
        ),
        reads(
            "batch.per_device", _unless_auto("batch.per_device"), "train_micro_batch_size_per_gpu", takes=COUNT | AUTO
        ),
        reads(
            "batch.accumulate",
            _accumulate,
            "gradient_accumulation_steps",
            takes=COUNT | AUTO,
        ),
        reads(
            "batch.global",
            _global,
            "train_batch_size",
            takes=COUNT | AUTO,
            note="rows of a step over all ranks",
        ),
        reads("optimizer.clip", _unless_auto("optimizer.clip"), "gradient_clipping", takes=NOT_NEGATIVE | AUTO),
        reads("precision", _half("bf16"), "bf16 bfloat16", takes=_ENABLED | SECTION),
        reads("precision", _half("fp16"), "fp16", takes=_ENABLED | SECTION, note="the loss scale is found by itself"),
        reads("optimizer.kind", _optimizer, "optimizer", takes=SECTION),
        reads("schedule.kind", _scheduler, "scheduler", takes=SECTION, note="WarmupLR, WarmupDecayLR, WarmupCosineLR"),
        to("log.every_steps", "steps_per_print"),
        unused(
            "zero_optimization.overlap_comm zero_optimization.contiguous_gradients zero_optimization.sub_group_size "
            "zero_optimization.reduce_bucket_size zero_optimization.allgather_bucket_size "
            "zero_optimization.allgather_partitions zero_optimization.reduce_scatter "
            "zero_optimization.stage3_prefetch_bucket_size zero_optimization.stage3_param_persistence_threshold "
            "zero_optimization.stage3_max_live_parameters zero_optimization.stage3_max_reuse_distance "
            "zero_optimization.round_robin_gradients zero_optimization.ignore_unused_parameters "
            "zero_optimization.memory_efficient_linear",
            _TUNING,
            quiet=(),
        ),
        unused(
            "zero_optimization.stage3_gather_16bit_weights_on_model_save "
            "zero_optimization.stage3_gather_fp16_weights_on_model_save",
            "the whole model is always exported at the end; checkpoint.format: full for whole checkpoints",
            quiet=(False,),
        ),
        unused(
            "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer", "every optimizer works with sharding", quiet=()
        ),
        unused(
            "activation_checkpointing", "write sharding.activation_checkpointing: full in the recipe", quiet=(False,)
        ),
        unused(
            "wall_clock_breakdown dump_state flops_profiler comms_logger comms_config monitor_config tensorboard "
            "csv_monitor memory_breakdown",
            "metrics.jsonl has the times of every step; log.sinks chooses TensorBoard or wandb",
            quiet=(False,),
        ),
        unused("prescale_gradients gradient_predivide_factor", "gradients are always averaged in fp32", quiet=(False,)),
        unused("communication_data_type data_types", "gradients are always reduced in fp32", quiet=("fp32", "auto")),
        unused("aio", "nothing is read from or written to NVMe", quiet=()),
        refuse(
            "zero_optimization.zero_quantized_weights zero_optimization.zero_quantized_gradients "
            "zero_optimization.zero_hpz_partition_size",
            "there are no quantised collectives: for slow networks use sharding.strategy: hybrid",
        ),
        refuse(
            "sparse_attention compression_training pipeline tensor_parallel sequence_parallel_size",
            "not available here",
        ),
        unused("elasticity", "any checkpoint resumes on any number of ranks", quiet=()),
    ),
)
