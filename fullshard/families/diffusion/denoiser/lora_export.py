"""Adapters of a denoiser, written as diffusers reads them, or as PEFT does where diffusers reads none for the class.

Must not know losses, ranks, recipes or how tensors were gathered.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint.tensor_files import SafetensorsStream
from fullshard.families.diffusion.denoiser.architectures import UNET_TEXT
from fullshard.hf.adapters.edits import adapter_config, is_adapter
from fullshard.hf.adapters.peft_folder import stored_names
from fullshard.hf.export import export_adapter, require_complete

WEIGHTS = "pytorch_lora_weights.safetensors"
_HEAD = ("proj_out", "proj_out_1", "proj_out_2")
"""The last projection of a transformer, and what scales its input."""
_SETTINGS = "lora_adapter_metadata"
"""Where diffusers looks for the settings, in the file's header."""
_PEFT = "base_model.model."


def every_linear(module: nn.Module) -> list[str]:
    """What `all-linear` means here: the names of all linear layers but the head's. peft knows no head of a denoiser."""
    return [name for name, part in module.named_modules() if isinstance(part, nn.Linear) and name not in _HEAD]


def prefix_of(class_name: str) -> str:
    """What the names of tensors begin with: a pipeline finds its part by this."""
    return "unet" if class_name == UNET_TEXT else "transformer"


def write_adapter(
    module: Any, tensors: Iterator[tuple[str, torch.Tensor]], folder: Path, *, dtype: torch.dtype | None
) -> None:
    """What `load_lora_weights` of a pipeline and `load_lora_adapter` of the model read, as trained or in `dtype`.

    Classes without that method (DiT, PixArt, UNet2DModel) get PEFT's own layout, for `PeftModel.from_pretrained`."""
    if not hasattr(module, "load_lora_adapter"):
        export_adapter(module, tensors, folder, processor=None, dtype=dtype)
        return
    folder.mkdir(parents=True, exist_ok=True)
    prefix = prefix_of(module.class_name)
    stored, seen = stored_names(module), set()
    with SafetensorsStream(folder / WEIGHTS, metadata={_SETTINGS: _settings(module, prefix)}) as stream:
        for name, tensor in tensors:
            if is_adapter(name):
                seen.add(name)
                given = f"{prefix}.{stored[name].removeprefix(_PEFT)}"
                stream.add(given, tensor if dtype is None else tensor.to(dtype))
        require_complete(folder, stored, seen, "adapter tensors")


def _settings(module: Any, prefix: str) -> str:
    """The adapters' settings as diffusers writes them: their scale does not follow from the tensors."""
    found = {**adapter_config(module).to_dict(), "inference_mode": True}
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in found.items()}
    return json.dumps({f"{prefix}.{key}": value for key, value in plain.items()}, indent=2, sort_keys=True)


__all__ = ["WEIGHTS", "every_linear", "prefix_of", "write_adapter"]
