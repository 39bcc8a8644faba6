"""Exports the adapters of a denoiser as diffusers reads them, or as PEFT does for classes without LoRA in diffusers.

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
"""The last projection of a transformer, and the scale of its input."""
_SETTINGS = "lora_adapter_metadata"
"""The metadata key under which diffusers looks for the settings."""
_PEFT = "base_model.model."


def every_linear(module: nn.Module) -> list[str]:
    """What `all-linear` means: all linear layers except the head. peft does not know a denoiser's head."""
    return [name for name, part in module.named_modules() if isinstance(part, nn.Linear) and name not in _HEAD]


def prefix_of(class_name: str) -> str:
    """The prefix of tensor names, by which a pipeline finds its part."""
    return "unet" if class_name == UNET_TEXT else "transformer"


def write_adapter(
    module: Any, tensors: Iterator[tuple[str, torch.Tensor]], folder: Path, *, dtype: torch.dtype | None
) -> None:
    """Writes what a pipeline's `load_lora_weights` and the model's `load_lora_adapter` read, as trained or in `dtype`.

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
    """The adapters' settings as diffusers writes them: the tensors do not determine the scale."""
    found = {**adapter_config(module).to_dict(), "inference_mode": True}
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in found.items()}
    return json.dumps({f"{prefix}.{key}": value for key, value in plain.items()}, indent=2, sort_keys=True)
