"""The attention kernel of a Transformers model, chosen once the device is known.

Must not know ranks, recipes or objectives.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn

from fullshard.errors import RecipeError
from fullshard.hf.architecture.varlen_attention import register

FLASH = "flash_attention_2"
NOT_INSTALLED = "the package flash_attn is not installed"


def kernel_to_build_with(asked: str) -> str | None:
    """The kernel that Transformers is asked for; None for the model's own, which `choose_attention` may replace."""
    own = asked in ("auto", "varlen") or (asked == FLASH and not flash_is_installed())
    return None if own else asked


def flash_is_installed() -> bool:
    """Transformers takes its flash kernels from either of two packages."""
    return any(importlib.util.find_spec(name) for name in ("flash_attn", "kernels"))


def choose_attention(module: nn.Module, asked: str, *, device: str, compute: torch.dtype, packed: bool) -> str:
    """Switches to `varlen` for packed rows on a GPU, else keeps the model's own kernel; returns its name. If flash
    attention is asked for and cannot run, another kernel computes the same."""
    model: Any = module
    # torch's flash kernels: half precision, and Ampere or newer.
    flash = device == "cuda" and torch.cuda.get_device_capability() >= (8, 0)
    half = compute in (torch.bfloat16, torch.float16)
    able = flash and half and model._supports_attention_backend
    if asked == "varlen" and not able:
        raise RecipeError(
            "model.attention = 'varlen' needs a GPU of compute capability 8.0, bf16 or fp16, and a model whose "
            f"attention can be replaced, not {device}, {str(compute).removeprefix('torch.')}, "
            f"{type(module).__name__}. Use attention: auto."
        )
    text, instead = model.config.get_text_config(decoder=True), ""
    if asked == FLASH and not (flash and half and flash_is_installed()):
        lacks = f"it needs a GPU of compute capability 8.0 and bf16 or fp16, not {device} and {compute}"
        why = NOT_INSTALLED if flash and half else lacks
        asked, instead = "auto", f", not {FLASH}: {why}"
        if text._attn_implementation == FLASH:
            model.set_attn_implementation("sdpa")
    if able and (asked == "varlen" or (asked == "auto" and packed)):
        use_varlen(module)
    return f"{text._attn_implementation}{instead}"


def use_varlen(module: nn.Module) -> None:
    """Switches the decoder to `varlen`. Only the decoder sees packed documents; a tower keeps its own kernel."""
    set_attention(module, register())
    module.takes_bounds = True  # type: ignore[assignment]


def set_attention(module: nn.Module, kernel: str) -> None:
    """Switches the decoder to another kernel."""
    model: Any = module
    text = model.config.get_text_config(decoder=True)
    # Transformers takes "" for the config of the whole model, without its parts.
    part = next((name for name in model.config.sub_configs if getattr(model.config, name) is text), "")
    model.set_attn_implementation({part: kernel})
