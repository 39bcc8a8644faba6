"""The attention kernel of a Transformers model, chosen once the device is known.

Must not know ranks, recipes or objectives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fullshard.errors import RecipeError
from fullshard.hf.architecture.varlen_attention import register


def choose_attention(module: nn.Module, asked: str, *, device: str, compute: torch.dtype, packed: bool) -> str:
    """Switches to `varlen` for packed rows on a GPU, else keeps the model's own kernel; returns its name."""
    model: Any = module
    # torch's flash kernels: half precision, and Ampere or newer.
    flash = device == "cuda" and torch.cuda.get_device_capability() >= (8, 0)
    able = flash and compute in (torch.bfloat16, torch.float16) and model._supports_attention_backend
    if asked == "varlen" and not able:
        raise RecipeError(
            "model.attention = 'varlen' needs a GPU of compute capability 8.0, bf16 or fp16, and a model whose "
            f"attention can be replaced, not {device}, {str(compute).removeprefix('torch.')}, "
            f"{type(module).__name__}. Use attention: auto."
        )
    text = model.config.get_text_config(decoder=True)
    if able and (asked == "varlen" or (asked == "auto" and packed)):
        use_varlen(module)
    return str(text._attn_implementation)


def use_varlen(module: nn.Module) -> None:
    """Switches the decoder to `varlen`. Only the decoder sees packed documents; a tower keeps its own kernel."""
    model: Any = module
    text = model.config.get_text_config(decoder=True)
    # Transformers takes "" for the config of the whole model, without its parts.
    part = next((name for name in model.config.sub_configs if getattr(model.config, name) is text), "")
    model.set_attn_implementation({part: register()})
    model.takes_bounds = True
