"""Settings of `accelerate launch` that fullshard ignores: one note each, with the key to write instead.

Accelerate passes its settings to the script as environment variables; fullshard takes over only its ranks. Must not
import torch or accelerate."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

_STRATEGIES = {
    **dict.fromkeys(("1", "FULL_SHARD", "full_shard"), "full"),
    **dict.fromkeys(("2", "SHARD_GRAD_OP", "shard_grad_op"), "grad_op"),
    **dict.fromkeys(("3", "NO_SHARD", "no_shard"), "none"),
    **dict.fromkeys(("4", "HYBRID_SHARD", "hybrid_shard", "5", "HYBRID_SHARD_ZERO2", "hybrid_shard_zero2"), "hybrid"),
}
_ON = {"true": "true"}
_KEYS: dict[str, tuple[str, dict[str, str] | None]] = {
    # The variable, our key, and our value for each of accelerate's; None: the same value. Other values need no note.
    "ACCELERATE_MIXED_PRECISION": ("precision", {"bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}),
    "ACCELERATE_USE_CPU": ("topology.device", {"True": "cpu", "true": "cpu"}),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": ("batch.accumulate", None),
    "ACCELERATE_GRADIENT_CLIPPING": ("optimizer.clip", None),
    "ACCELERATE_DYNAMO_BACKEND": ("sharding.compile", {"INDUCTOR": "true"}),
    "FSDP_SHARDING_STRATEGY": ("sharding.strategy", _STRATEGIES),
    "FSDP_OFFLOAD_PARAMS": ("sharding.cpu_offload", _ON),
    "FSDP_ACTIVATION_CHECKPOINTING": ("sharding.activation_checkpointing", {"true": "full"}),
    "FSDP_FORWARD_PREFETCH": ("sharding.forward_prefetch", _ON),
    "FSDP_STATE_DICT_TYPE": (
        "checkpoint.format",
        {"FULL_STATE_DICT": "full", "SHARDED_STATE_DICT": "sharded", "LOCAL_STATE_DICT": "sharded"},
    ),
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": ("sharding.strategy", {"1": "grad_op", "2": "grad_op", "3": "full"}),
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": ("sharding.cpu_offload", {"cpu": "true", "nvme": "true"}),
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": ("sharding.cpu_offload", {"cpu": "true", "nvme": "true"}),
}
_WITHOUT_KEY: dict[str, tuple[tuple[str, ...], str]] = {
    # The variable, the values that need no note, and what happens instead.
    "FSDP_VERSION": (("2",), "fullshard always uses FSDP2"),
    "FSDP_BACKWARD_PREFETCH": (
        ("BACKWARD_PRE", "NO_PREFETCH"),
        "FSDP2 always gathers the next block early, as BACKWARD_PRE did",
    ),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": (("false",), "activations are recomputed, never moved to the host"),
    "FSDP_CPU_RAM_EFFICIENT_LOADING": (("true",), "each rank always reads its own slices only"),
    "FSDP_SYNC_MODULE_STATES": (("true",), "ranks always start from the same values"),
    "FSDP_IGNORED_MODULES": ((), "every module is sharded"),
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": (("none",), "DeepSpeed's file is not read"),
    "ACCELERATE_USE_DEEPSPEED": (("false",), "fullshard shards with FSDP2"),
    "ACCELERATE_USE_MEGATRON_LM": (("false",), "fullshard shards with FSDP2"),
    "ACCELERATE_USE_PARALLELISM_CONFIG": (("false",), "ranks are arranged by sharding.strategy"),
}
_FSDP2_STRATEGIES = {"true": "full", "false": "grad_op"}


def notes(environ: Mapping[str, str], *, world: int) -> list[str]:
    """A line for each of accelerate's settings that is ignored, and for ranks that it did not start."""
    return [*_too_few(world), *_ignored(environ)]


def _ignored(environ: Mapping[str, str]) -> Iterator[str]:
    if environ.get("ACCELERATE_USE_FSDP") != "true":
        environ = {name: value for name, value in environ.items() if not name.startswith("FSDP_")}
    yield from _wrap(environ)
    for name, (key, values) in _KEYS.items():
        value = environ.get(name, "")
        if name == "FSDP_SHARDING_STRATEGY" and environ.get("FSDP_VERSION") == "2":
            # For FSDP2 accelerate has a switch instead of a strategy.
            name, values = "FSDP_RESHARD_AFTER_FORWARD", _FSDP2_STRATEGIES
            value = environ.get(name, "")
        ours = value if values is None else values.get(value)
        if ours and value.lower() not in ("none", "auto"):
            yield f"accelerate's {name}={value} is ignored. Write {key}={ours}."
    for name, (nothing, instead) in _WITHOUT_KEY.items():
        value = environ.get(name, "")
        if value and value not in nothing and value.lower() not in ("none", "auto"):
            yield f"accelerate's {name}={value} is ignored: {instead}."


def _wrap(environ: Mapping[str, str]) -> Iterator[str]:
    policy, classes = environ.get("FSDP_AUTO_WRAP_POLICY", ""), environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "")
    if policy == "TRANSFORMER_BASED_WRAP" and classes:
        yield f"accelerate's FSDP_TRANSFORMER_CLS_TO_WRAP={classes} is ignored. Write sharding.wrap=[{classes}]."
    elif policy == "SIZE_BASED_WRAP":
        smallest = environ.get("FSDP_MIN_NUM_PARAMS", "100000000")
        yield (
            f"accelerate's FSDP_AUTO_WRAP_POLICY={policy} (FSDP_MIN_NUM_PARAMS={smallest}) is ignored. Write "
            f"sharding.wrap.min_params={smallest}."
        )
    elif policy == "NO_WRAP":
        yield f"accelerate's FSDP_AUTO_WRAP_POLICY={policy} is ignored. Write sharding.wrap.whole=true."


def _too_few(world: int) -> Iterator[str]:
    asked, where = _asked_for()
    if asked is not None and asked > world:
        started = "one" if world == 1 else str(world)
        yield (
            f"accelerate was asked for {asked} processes ({where}) and started {started}. To train on {asked}, leave "
            f"accelerate out: fullshard train RECIPE --devices {asked}."
        )


def _asked_for() -> tuple[int | None, str]:
    """The number of processes that accelerate was asked for, and where: its command line or its configuration file."""
    words = _command()
    if words is None:
        return None, ""
    text = "\0".join(words)
    if found := re.search(r"\0--num[_-]processes[=\0](\d+)", text):
        return int(found[1]), f"--num_processes {found[1]}"
    named = re.search(r"\0--config[_-]file[=\0]([^\0]+)", text)
    if named is None and "--cpu" in words:
        return None, ""  # accelerate does not read its default file then
    path = Path(named[1]) if named else _default_file()
    try:
        found = re.search(r"(?m)^\s*\"?num_processes\"?:\s*(\d+)", path.read_text(encoding="utf-8"))
    except OSError:
        return None, ""
    return (int(found[1]), f"num_processes in {path}") if found else (None, "")


def _command() -> list[str] | None:
    """The command line of the `accelerate launch` that started this process."""
    import psutil  # type: ignore[import-untyped]

    try:
        for parent in psutil.Process().parents()[:3]:
            words = parent.cmdline()
            if any("accelerate" in word for word in words) and any("launch" in word for word in words):
                return [str(word) for word in words]
    except psutil.Error:
        pass
    return None


def _default_file() -> Path:
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    return Path(home).expanduser() / "accelerate" / "default_config.yaml"
