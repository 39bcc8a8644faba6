"""Words of other trainers for values of our keys: those that mean the same, and those that come near.

A word that means the same is accepted anywhere, with a note; one that only comes near is an error that names ours.
Numbers are left to each trainer's own table: 1 is FULL_SHARD for accelerate and the first ZeRO stage for DeepSpeed.
Must not know the recipe: a test checks that every key and value exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fullshard.formatting.yaml_text import shown

SAME: dict[str, dict[str, str]] = {
    # Our key: our value, and the spellings of others in lower case.
    "sharding.strategy": {
        "full": (
            "full_shard, full_shard auto_wrap, fsdp, fsdp2, fsdp_full_shard, zero3, zero_3, zero-3, deepspeed_stage_3"
        ),
        "grad_op": (
            "shard_grad_op, shard_grad_op auto_wrap, zero2, zero_2, zero-2, deepspeed_stage_2, zero1, zero_1, zero-1, "
            "deepspeed_stage_1"
        ),
        "hybrid": "hybrid_shard, hybrid_shard auto_wrap, _hybrid_shard_zero2, hybrid_shard_zero2, hsdp",
        "none": "no_shard, ddp, multi_gpu, ddp_find_unused_parameters_true",
    },
    "optimizer.kind": {
        "adamw": (
            "adamw_torch, adamw_torch_fused, adamw_hf, adamw_fused, torch.optim.adamw, paged_adamw, paged_adamw_32bit, "
            "bitsandbytes.optim.adamw, bitsandbytes.optim.pagedadamw, adamw"
        ),
        "adamw_8bit": (
            "adamw_bnb_8bit, adamw_8bit_bnb, adamw_torch_8bit, paged_adamw_8bit, adamw8bit, adamw_8bit, "
            "bitsandbytes.optim.adamw8bit, bitsandbytes.optim.pagedadamw8bit, torchao.optim.adamw8bit"
        ),
        "muon": "muon",
    },
    "schedule.kind": {
        "constant": "constant_with_warmup, warmuplr, none, constantlr",
        "cosine": (
            "cosine_annealing, cosineannealinglr, warmupcosinelr, "
            "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup, "
            "torchtune.modules.get_cosine_schedule_with_warmup, cosine"
        ),
        "linear": "warmupdecaylr, linear",
        "step": "steplr, step",
    },
    "sharding.activation_checkpointing": {"full": "true", "none": "false"},
    "checkpoint.format": {"full": "full_state_dict", "sharded": "sharded_state_dict, local_state_dict"},
    "topology.device": {"cuda": "gpu"},
    "model.attention": {"flash_attention_2": "flash_attention, flash, fa2"},
}

NEAR: dict[str, dict[str, str]] = {
    # Values without an exact counterpart: the error names ours.
    "sharding.strategy": {"full": "full_shard offload, deepspeed, 3, true", "grad_op": "2, 1", "none": "0, false"},
    "optimizer.kind": {"adamw": "adam, torch.optim.adam, fusedadam, deepspeedcpuadam, adamw_anyprecision"},
    "schedule.kind": {"cosine": "cosine_with_restarts, cosine_with_min_lr, cosine_warmup_with_min_lr"},
    "log.sinks": {"": "none", "tensorboard, wandb": "all"},
    "objective.kind": {
        "causal_lm": "clm, sft, language_modeling, cross_entropy",
        "contrastive": "multiplenegativesrankingloss, infonce",
        "flow_matching": "flow, rectified_flow",
        "ddpm": "ddim",
    },
}


def our_word(key: str, value: Any) -> str | None:
    """Our word for a value that means the same, or None."""
    return _found(SAME, key, value)


def nearest_word(key: str, value: Any) -> str | None:
    """Our word for a value that means the same or comes near, or None."""
    return our_word(key, value) or _found(NEAR, key, value)


def _found(table: Mapping[str, Mapping[str, str]], key: str, value: Any) -> str | None:
    word = shown(value).lower()
    return next((ours for ours, theirs in table.get(key, {}).items() if word in (ours, *theirs.split(", "))), None)


def in_our_words(values: dict[str, Any]) -> list[str]:
    """Replaces other trainers' words in a recipe by ours, in place; a line for each."""
    notes = []
    for key in SAME:
        *outer, last = key.split(".")
        place: Any = values
        for step in outer:
            place = place.get(step) if isinstance(place, dict) else None
        value = place.get(last) if isinstance(place, dict) else None
        ours = our_word(key, value) if isinstance(value, (str, bool)) else None
        if ours is not None and ours != value:
            place[last] = ours
            notes.append(f"{key}: {shown(value)} is read as {ours}")
    return notes
