"""Folders of diffusers: configuration and weights of one model, alone or inside a pipeline; read, and written whole.

Must not know losses, ranks or recipes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.errors import CheckpointError, RecipeError
from fullshard.hf.stored import open_folder
from fullshard.stream import SafetensorsStream

WEIGHTS = "diffusion_pytorch_model.safetensors"
CONFIG = "config.json"
_INSIDE = ("transformer", "unet")
"""Where a pipeline keeps its denoiser."""


def model_folder(folder: Path) -> Path:
    """The folder of the denoiser: `folder` itself, or a pipeline's part."""
    if (folder / CONFIG).is_file():
        return folder
    for name in _INSIDE:
        if (folder / name / CONFIG).is_file():
            return folder / name
    raise RecipeError(
        f"model.path: {folder} has no {CONFIG}, and neither has its {' or '.join(_INSIDE)}. Name the folder of a "
        "denoiser or of a pipeline of diffusers."
    )


def read_config(folder: Path) -> dict[str, Any]:
    """The settings of a stored model, its class under `_class_name`."""
    try:
        found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecipeError(f"model.path: {folder / CONFIG} cannot be read ({error}). Save the model again.") from error
    if not isinstance(found, dict) or "_class_name" not in found:
        raise RecipeError(f"model.path: {folder / CONFIG} does not say which class of diffusers the model is.")
    return found


class FolderWeights:
    """Stored tensors under the module's own names."""

    def __init__(self, folder: Path, module: nn.Module) -> None:
        self._stored = open_folder(folder)
        wanted = {name: tuple(tensor.shape) for name, tensor in module.state_dict(keep_vars=True).items()}
        missing, unexpected = sorted(wanted.keys() - self._stored.keys()), sorted(self._stored.keys() - wanted.keys())
        if missing or unexpected:
            raise CheckpointError(
                f"{folder}: its tensors are not those of {type(module).__name__}: missing {missing[:3] or 'none'}, "
                f"unexpected {unexpected[:3] or 'none'}. Check model.path and model.overrides."
            )
        for name, shape in wanted.items():
            if self._stored[name].shape != shape:
                raise CheckpointError(
                    f"{folder}: {name} is stored as {list(self._stored[name].shape)}, and the model has {list(shape)}. "
                    "Check model.overrides and model.classes."
                )

    def names(self) -> set[str]:
        return set(self._stored)

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self._stored.read(name, start, stop)


def write_model(
    module: Any, tensors: Iterator[tuple[str, torch.Tensor]], folder: Path, *, dtype: torch.dtype | None
) -> None:
    """Configuration and weights, as `from_pretrained` of the model's class reads them."""
    module.save_config(folder)
    # FSDP gives a sharded module a class of its own, and from_pretrained is told the name of the class.
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    config["_class_name"] = config["_class_name"].removeprefix("FSDP")
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    buffers = [(name, t) for name, t in module.state_dict().items() if name not in parameters]
    with SafetensorsStream(folder / WEIGHTS) as stream:
        for name, buffer in buffers:
            stream.add(name, buffer)
        for name, tensor in tensors:
            stream.add(name, tensor if dtype is None else tensor.to(dtype))


__all__ = ["FolderWeights", "model_folder", "read_config", "write_model"]
