"""A model of Transformers without values: parameters on meta, buffers computed.

Must not know where values come from, adapters or ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn

from fullshard.errors import RecipeError
from fullshard.hf.architecture.causal import make_decoder


def empty_model(config: Any, *, attention: str | None, trust_remote_code: bool, auto: str) -> nn.Module:
    """The model of a config that Transformers' class `auto` builds; `attention`: its kernel, None for the model's
    own."""
    import transformers

    _refuse_layerdrop(config)
    if auto == "AutoModelForCausalLM":
        make_decoder(config, trust_remote_code=trust_remote_code)
    for part in (config, config.get_text_config(decoder=True)):
        # With its cache, a model ignores the bounds of documents that share a row.
        part.use_cache = False
    config.dtype = torch.float32
    chosen = {} if attention is None else {"attn_implementation": attention}
    try:
        with init_empty_weights(include_buffers=False):
            module = getattr(transformers, auto).from_config(config, trust_remote_code=trust_remote_code, **chosen)
    except Exception as error:
        # Any error comes from the config: a missing key, a wrong type, or keys that contradict each other.
        reason = (str(error).strip().splitlines() or [""])[0].removesuffix("You can install it with pip:")
        reason = reason.strip().rstrip(".")
        if not isinstance(error, (ImportError, ValueError, RuntimeError)):
            reason = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
        remedy = "Install it" if isinstance(error, ImportError) else "Check model.attention and model.overrides"
        raise RecipeError(
            f"model: Transformers cannot build {config.model_type} with these settings ({reason}). {remedy}."
        ) from error
    module.tie_weights()
    module.architecture_name = type(module).__name__
    return module  # type: ignore[no-any-return]


def _refuse_layerdrop(config: Any) -> None:
    parts = {"": config, **{f"{name}.": getattr(config, name, None) for name in config.sub_configs}}
    found = {
        f"{at}{key}": v for at, part in parts.items() if part for key, v in vars(part).items() if "layerdrop" in key
    }
    if key := next((key for key, share in found.items() if share), None):
        raise RecipeError(
            f"model: its config has {key} = {found[key]:g}, with which each rank leaves out other layers, and sharded "
            f"ranks would wait for each other without end. Set model.overrides.{key}=0."
        )
