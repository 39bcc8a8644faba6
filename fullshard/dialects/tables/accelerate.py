"""accelerate's launcher file, versions 1 and 2 of FSDP, DeepSpeed's section included; its environment variables too."""

from __future__ import annotations

from typing import Any

from fullshard.dialects import readers
from fullshard.dialects.kinds import ANY_WHOLE, AUTO, COUNT, NOT_NEGATIVE, SWITCH, TEXT, WHOLE, Kind, one_of
from fullshard.dialects.readers import stage_settings
from fullshard.dialects.rows import (
    Dialect,
    File,
    Outcome,
    Reader,
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
from fullshard.formatting.yaml_text import shown

_IDS = one_of("all") | Kind(("ids such as 0,1",), (lambda value: _ids(value),))
_FSDP_SECTION = "its section says the rest"


def _by_option(option: str) -> Reader:
    """Where the machines meet is no setting of a recipe: each machine is started with its own."""

    def read(value: Any, file: File) -> Outcome | Settings:
        if file.get("num_machines", 1) > 1:
            return Outcome(why=f"in force with --config-file; as an option it is {option}")
        return ignored("the file says one machine" if value else "")

    return read


def _replicates(file: File) -> bool:
    return bool(file.get("parallelism_config.parallelism_config_dp_replicate_size", 1) > 1)


def _unless_replicated(reader: Reader) -> Reader:
    """Replicas of sharded groups are hybrid, whatever else the file says about sharding."""

    def read(value: Any, file: File) -> Outcome | Settings:
        if _replicates(file):
            return ignored("parallelism_config_dp_replicate_size is more than 1: hybrid")
        return reader(value, file)

    return read


def _distributed_type(value: Any, file: File) -> Outcome | Settings:
    kind = shown(value).upper()
    if kind == "FSDP" and _replicates(file):
        return ignored("")
    if kind == "FSDP":
        keys = ("fsdp_config.fsdp_sharding_strategy", "fsdp_config.fsdp_reshard_after_forward")
        named = any(file.get(key) is not None for key in keys)
        return ignored("") if named else {"sharding.strategy": "full"}
    if kind == "DEEPSPEED":
        return ignored("")
    if kind in ("MULTI_GPU", "MULTI_CPU", "NO", "FALSE"):  # YAML reads a bare NO as false
        several = kind.startswith("MULTI")
        return {"sharding.strategy": "none"} if several else ignored("one process")
    return refused(f"{value} is not available: fullshard shards with FSDP2 on CUDA and CPU")


def _processes(value: Any, file: File) -> Outcome | Settings:
    """accelerate counts processes over all machines, fullshard on one."""
    machines = file.get("num_machines", 1)
    if value < 1:
        return ignored("")
    if value % machines:
        return refused(f"{value} processes do not divide into {machines} machines")
    if file.get("gpu_ids") not in (None, "all"):
        return ignored("gpu_ids says the same")
    return {"topology.devices": value // machines}


def _gpu_ids(value: Any, file: File) -> Outcome | Settings:
    return ignored("") if value == "all" else {"topology.devices": value}


def _ids(value: Any) -> list[int] | None:
    """`0,1` or [0, 1]."""
    parts = value if isinstance(value, list) else shown(value).split(",")
    ids = [shown(part).strip() for part in parts]
    return [int(each) for each in ids] if ids and all(each.isdecimal() for each in ids) else None


def _precision(value: Any, file: File) -> Outcome | Settings:
    return {"precision": "fp32" if value in (False, "no") else value}


def _machines(value: Any, file: File) -> Outcome | Settings:
    return {"topology.nodes": value} if value > 1 else ignored("")


def _format(value: Any, file: File) -> Outcome | Settings:
    numbers = {"0": "full", "1": "sharded", "2": "sharded"}
    ours = numbers.get(value) or our_word("checkpoint.format", value)
    return {"checkpoint.format": ours} if ours else refused(f"{value} is not a state dict type")


def _backward_prefetch(value: Any, file: File) -> Outcome | Settings:
    if shown(value).upper() in ("BACKWARD_PRE", "NO_PREFETCH", "NONE", "0", "2"):
        return ignored("")
    return ignored("FSDP2 always gathers the next block's parameters early, as BACKWARD_PRE did")


def _stage(value: Any, file: File) -> Outcome | Settings:
    return stage_settings(int(value))


def _offload(value: Any, file: File) -> Outcome | Settings:
    if value == "none":
        return ignored("")
    if value == "nvme":
        return refused("there is no offload to NVMe: host memory is sharding.cpu_offload: true")
    return {"sharding.cpu_offload": True}


def _backend(value: Any, file: File) -> Outcome | Settings:
    if value is False:
        return ignored("")
    return {"sharding.compile": True} if value.upper() == "INDUCTOR" else ignored("blocks are compiled with inductor")


def _size(limit: str) -> Any:
    def read(value: Any, file: File) -> Outcome | Settings:
        return ignored("") if value <= 1 else refused(limit)

    return read


def _replicate(value: Any, file: File) -> Outcome | Settings:
    return ignored("") if value <= 1 else {"sharding.strategy": "hybrid"}


DIALECT = Dialect(
    name="accelerate",
    title="accelerate",
    intro=(
        "The file of `accelerate config` says how ranks start and shard. Give it beside a recipe or a training file:\n"
        "`fullshard train train.yaml --config-file accelerate.yaml`. Its number of processes is in force; its other\n"
        "settings fill in what the recipe leaves open. Under `accelerate launch -m fullshard train train.yaml` the\n"
        "same table reads its environment variables. There a mixed precision of `no` is left to the recipe:\n"
        "accelerate says `no` when nobody chose."
    ),
    launches=True,
    marks=(
        "distributed_type",
        "compute_environment",
        "num_machines",
        "main_training_function",
        "fsdp_sharding_strategy",
        "fsdp_offload_params",
        "fsdp_reshard_after_forward",
    ),
    sections=("fsdp_config", "deepspeed_config", "parallelism_config", "dynamo_config"),
    rows=(
        reads(
            "sharding.strategy",
            _distributed_type,
            "distributed_type",
            takes=readers.OFF | TEXT,
            note="FSDP: full; MULTI_GPU: none",
        ),
        reads(
            "topology.devices",
            _processes,
            "num_processes",
            takes=ANY_WHOLE,
            note="accelerate counts all machines, fullshard each",
        ),
        reads("topology.nodes", _machines, "num_machines"),
        reads("topology.devices", _gpu_ids, "gpu_ids", takes=_IDS, note="ids as a list"),
        reads(
            "precision",
            _precision,
            "mixed_precision",
            takes=one_of("no", "fp16", "bf16", "fp8") | readers.OFF,
            note="no is fp32",
        ),
        to("topology.device=cpu", "use_cpu"),
        to("topology.device", "compute_device", note="no key of accelerate, but seen in its files; gpu is cuda"),
        reads(
            "sharding.strategy",
            _unless_replicated(readers.sharding_strategy),
            "fsdp_sharding_strategy",
            takes=TEXT,
            note="by name or number",
        ),
        reads(
            "sharding.strategy",
            _unless_replicated(readers.reshard_after_forward),
            "fsdp_reshard_after_forward",
            takes=SWITCH | TEXT,
            note="true: full; false: grad_op; in files for FSDP1 the strategy's name",
        ),
        to("sharding.cpu_offload", "fsdp_offload_params"),
        reads(
            "sharding.wrap.classes",
            readers.wrap_policy,
            "fsdp_auto_wrap_policy",
            takes=readers.POLICY,
            note="the next two say what",
        ),
        reads("sharding.wrap.classes", readers.wrap_classes, "fsdp_transformer_layer_cls_to_wrap"),
        reads(
            "sharding.wrap.min_params",
            readers.min_params,
            "fsdp_min_num_params",
            takes=WHOLE,
            note="for SIZE_BASED_WRAP only",
        ),
        to("sharding.activation_checkpointing", "fsdp_activation_checkpointing"),
        to("sharding.forward_prefetch", "fsdp_forward_prefetch"),
        reads(
            "checkpoint.format",
            _format,
            "fsdp_state_dict_type",
            takes=TEXT,
            note="FULL_STATE_DICT, SHARDED_STATE_DICT",
        ),
        reads(
            "",
            _backward_prefetch,
            "fsdp_backward_prefetch fsdp_backward_prefetch_policy",
            takes=TEXT,
            note="no effect: always early",
        ),
        unused("fsdp_version", "fullshard always uses FSDP2", quiet=(2, "2")),
        unused("fsdp_use_orig_params", "FSDP2 always keeps the original parameters", quiet=("true",)),
        unused("fsdp_limit_all_gathers", "FSDP2 bounds the gathered memory by itself", quiet=("true",)),
        unused(
            "fsdp_cpu_ram_efficient_loading",
            "each rank always reads only its own slices; it does not move anything to the CPU during training",
            quiet=("true",),
        ),
        unused("fsdp_sync_module_states", "ranks always start from the same values", quiet=(True, "true")),
        unused(
            "fsdp_activation_checkpointing_offload",
            "activations are recomputed, never moved to the host",
            quiet=(False, "false"),
        ),
        unused("fsdp_ignored_modules", "every module is sharded", quiet=()),
        reads(
            "sharding.strategy",
            _stage,
            "zero_stage deepspeed_config.zero_stage",
            takes=one_of("0", "1", "2", "3"),
            note="DeepSpeed: 1, 2: grad_op; 3: full",
        ),
        reads(
            "sharding.cpu_offload",
            _offload,
            "offload_optimizer_device offload_param_device",
            takes=one_of("none", "cpu", "nvme"),
        ),
        to("batch.accumulate", "gradient_accumulation_steps"),
        reads(
            "optimizer.clip",
            lambda value, file: {} if value == "auto" else {"optimizer.clip": value or None},
            "gradient_clipping",
            takes=NOT_NEGATIVE | AUTO,
        ),
        unused(
            "zero3_init_flag zero3_save_16bit_model",
            "each rank reads its own slices; the whole model is exported",
            quiet=(),
        ),
        reads(
            "sharding.strategy",
            readers.deepspeed,
            "deepspeed_config_file",
            takes=readers.DEEPSPEED,
            note="the file is read",
        ),
        unused(
            "deepspeed_hostfile deepspeed_multinode_launcher deepspeed_exclusion_filter deepspeed_inclusion_filter",
            "start each node with --nodes, --node-rank and --master",
            quiet=("standard",),
        ),
        unused("deepspeed_moe_layer_cls_names", "experts are found by structure", quiet=()),
        reads("sharding.compile", _backend, "dynamo_backend dynamo_config.dynamo_backend", takes=readers.OFF | TEXT),
        unused(
            "dynamo_mode dynamo_use_dynamic dynamo_use_fullgraph dynamo_use_regional_compilation",
            "each block is compiled for itself",
            quiet=("default", False),
        ),
        reads(
            "sharding.strategy",
            _replicate,
            "parallelism_config_dp_replicate_size",
            takes=COUNT,
            note="more than 1: hybrid",
        ),
        unused("parallelism_config_dp_shard_size", "all other ranks shard", quiet=()),
        reads("", _size("there is no tensor parallelism"), "parallelism_config_tp_size", takes=COUNT, note="1 only"),
        reads(
            "",
            _size("there is no context or sequence parallelism"),
            "parallelism_config_cp_size parallelism_config_sp_size",
            takes=COUNT,
            note="1 only",
        ),
        unused(
            "parallelism_config_cp_backend parallelism_config_cp_comm_strategy parallelism_config_sp_backend "
            "parallelism_config_sp_seq_length parallelism_config_sp_seq_length_is_variable "
            "parallelism_config_sp_attn_implementation use_parallelism_config",
            "ranks are arranged by sharding.strategy",
            quiet=("torch", "allgather", False),
        ),
        reads("", _by_option("--node-rank"), "machine_rank", takes=WHOLE, note="--node-rank, unless you give it"),
        reads("", _by_option("--master HOST:PORT"), "main_process_ip", takes=TEXT, note="--master, with the port"),
        part_of("main_process_port", "main_process_ip", takes=WHOLE),
        unused(
            "rdzv_backend same_network compute_environment main_training_function enable_cpu_affinity debug "
            "downcast_bf16 tpu_env tpu_name tpu_zone tpu_vm tpu_use_cluster tpu_use_sudo command_file commands "
            "mpirun_config fp8_config",
            "it says how accelerate starts processes",
            quiet=("static", True, False, "no", "main", "LOCAL_MACHINE", (), [], {}, "c10d"),
        ),
        refuse(
            "megatron_lm_config",
            "fullshard shards with FSDP2; there is no tensor or pipeline parallelism",
            unless=({},),
        ),
        unused("use_fsdp use_deepspeed", _FSDP_SECTION, quiet=(True, False)),
    ),
)
