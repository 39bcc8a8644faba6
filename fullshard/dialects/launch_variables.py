"""The settings of `accelerate launch`, which reach a script as environment variables, in our words.

They are read by the same table as accelerate's file, and are in force where the recipe and the command line leave a key
open. Must not import torch or accelerate."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fullshard.dialects.translate import Translation, translate
from fullshard.formatting.yaml_text import parse_value

NAME = "accelerate launch"
_NAMES = {
    # Variables whose key in accelerate's file is not their own name in lower case.
    "ACCELERATE_MIXED_PRECISION": "mixed_precision",
    "ACCELERATE_USE_CPU": "use_cpu",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
    "ACCELERATE_GRADIENT_CLIPPING": "gradient_clipping",
    "ACCELERATE_DYNAMO_BACKEND": "dynamo_backend",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "zero_stage",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "offload_optimizer_device",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "offload_param_device",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "deepspeed_config_file",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "fsdp_transformer_layer_cls_to_wrap",
}
_UNSAID = {
    # What accelerate sets when nobody chose.
    "mixed_precision": ("no", False),
    "use_cpu": (False, "false"),
    "gradient_accumulation_steps": (1,),
    "dynamo_backend": ("no", "NO", False),
    "fsdp_min_num_params": (100_000_000,),
    "fsdp_version": (1,),
    "fsdp_use_orig_params": (True, False),
    "fsdp_sync_module_states": (True, False),
    "fsdp_cpu_ram_efficient_loading": (True, False),
    "fsdp_offload_params": (False,),
    "fsdp_activation_checkpointing": (False,),
    "fsdp_activation_checkpointing_offload": (False,),
    "fsdp_forward_prefetch": (False,),
}


def settings(environ: Mapping[str, str]) -> Translation | None:
    """What `accelerate launch` asked for; None if it did not start this process."""
    if "ACCELERATE_MIXED_PRECISION" not in environ:
        return None
    from fullshard.dialects.tables import dialects

    return translate(dialects()["accelerate"], _as_file(environ), name=NAME)


def _as_file(environ: Mapping[str, str]) -> dict[str, Any]:
    """The variables as the file that they came from."""
    is_fsdp, is_deepspeed = (environ.get(f"ACCELERATE_USE_{kind}") == "true" for kind in ("FSDP", "DEEPSPEED"))
    values: dict[str, Any] = {}
    section: dict[str, Any] = {}
    for name, text in environ.items():
        key, value = _NAMES.get(name, name.lower()), parse_value(text, where=name)
        if value in ("auto", "none", "", None) or value in _UNSAID.get(key, ()):
            continue
        if name.startswith("FSDP_") and is_fsdp:
            section[key] = value
        elif name in _NAMES and (is_deepspeed or "DEEPSPEED" not in name) and not name.startswith("FSDP_"):
            values[key] = value
    if is_fsdp:
        section.pop("fsdp_version", None)
        section.pop(_other_strategy(section, version=environ.get("FSDP_VERSION", "1")), None)
        values |= {"distributed_type": "FSDP", "fsdp_config": section}
    return values


def _other_strategy(section: Mapping[str, Any], *, version: str) -> str:
    """accelerate always sets two keys for the strategy; the one that nobody chose, or that this version ignores."""
    by_name = isinstance(section.get("fsdp_reshard_after_forward"), str)
    if version == "2" or (by_name and section.get("fsdp_sharding_strategy") == "FULL_SHARD"):
        return "fsdp_sharding_strategy"
    return "fsdp_reshard_after_forward"


def asked_for() -> int | None:
    """The number of processes that accelerate was asked for, if it says so."""
    return _asked_for()[0]


def notes(world: int) -> list[str]:
    """A line for ranks that accelerate was asked for and did not start."""
    return list(_too_few(world))


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
