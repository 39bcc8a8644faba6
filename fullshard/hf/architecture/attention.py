"""The attention kernel of a Transformers model, chosen once the device is known.

Must not know ranks, recipes or objectives.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn

from fullshard.errors import RecipeError
from fullshard.kernels import flash4
from fullshard.kernels.varlen_attention import register

FLASH = "flash_attention_2"
NOT_INSTALLED = "the package flash_attn is not installed"


def kernel_to_build_with(asked: str) -> str | None:
    """The kernel that Transformers is asked for; None for the model's own, which `choose_attention` may replace."""
    own = asked in ("auto", "varlen", flash4.WORD) or (asked == FLASH and not flash_is_installed())
    return None if own else asked


def flash_is_installed() -> bool:
    """Transformers takes its flash kernels from either of two packages. flash-attn-4 is a folder of the first, without
    what Transformers needs: a namespace, which has no file of its own."""
    found = [importlib.util.find_spec(name) for name in ("flash_attn", "kernels")]
    return any(spec is not None and spec.origin is not None for spec in found)


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
    if asked == flash4.WORD:
        asked, instead = _flash4(module, text, device=device, able=able, packed=packed)
    if able and (asked == "varlen" or (asked == "auto" and packed)):
        use_varlen(module)
    return f"{text._attn_implementation}{instead}"


def _flash4(module: nn.Module, text: Any, *, device: str, able: bool, packed: bool) -> tuple[str, str]:
    """Switches to FlashAttention-4 for packed rows; else which kernel runs instead, and why."""
    capability = torch.cuda.get_device_capability() if device == "cuda" else None
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    why = flash4.lacking(capability=capability, head_dim=width)
    if why is None and not able:
        why = "it needs bf16 or fp16, and a model whose attention can be replaced"
    if why is None and not packed:
        why = "it is for packed rows"
    if why is not None:
        return "auto", f", not {flash4.WORD}: {why}"
    use_packed(module, flash4.register())
    return flash4.WORD, ""


def use_varlen(module: nn.Module) -> None:
    """Switches the decoder to `varlen`."""
    use_packed(module, register())


def use_packed(module: nn.Module, kernel: str) -> None:
    """Switches the decoder to a kernel over packed documents. Only the decoder sees these; a tower keeps its own."""
    set_attention(module, kernel)
    module.takes_bounds = True  # type: ignore[assignment]


def set_attention(module: nn.Module, kernel: str) -> None:
    """Switches the decoder to another kernel."""
    model: Any = module
    text = model.config.get_text_config(decoder=True)
    # Transformers takes "" for the config of the whole model, without its parts.
    part = next((name for name in model.config.sub_configs if getattr(model.config, name) is text), "")
    model.set_attn_implementation({part: kernel})
