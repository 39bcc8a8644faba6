"""Model folders of diffusers: config and weights of a denoiser, alone or inside a pipeline; read and written.

Must not know losses, ranks or recipes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint.tensor_files import SafetensorsStream, TensorEntry
from fullshard.errors import RecipeError
from fullshard.families.diffusion.denoiser.architectures import DIT, PIXART, settings_of
from fullshard.hf.adapters.edits import base_name, is_adapter
from fullshard.hf.adapters.merge import Merge, merged_rows
from fullshard.hf.export import require_complete
from fullshard.hf.scalars import is_scalar
from fullshard.hf.weights.safetensors_folder import open_folder
from fullshard.hf.weights.stored_weights import NamedWeights

WEIGHTS = "diffusion_pytorch_model.safetensors"
CONFIG = "config.json"
_INSIDE = ("transformer", "unet")
"""Where a pipeline has its denoiser."""
_OLD_CLASS = "Transformer2DModel"
"""The class under which the first DiT and PixArt models were saved, with the same tensor names."""
_BY_NORM_TYPE = {"ada_norm_zero": DIT, "ada_norm_single": PIXART}
"""Their current class."""


def model_folder(folder: Path) -> Path:
    """The folder of the denoiser: `folder` itself, or a pipeline's part."""
    if (folder / CONFIG).is_file():
        return folder
    for name in _INSIDE:
        if (folder / name / CONFIG).is_file():
            return folder / name
    raise RecipeError(
        f"model.path: {folder} has no {CONFIG}, and no {' or '.join(_INSIDE)} with one. Name the folder of a denoiser "
        "or a pipeline of diffusers."
    )


def read_config(folder: Path) -> tuple[str, dict[str, Any]]:
    """The class name of a stored model, and its settings."""
    try:
        found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecipeError(f"model.path: {folder / CONFIG} cannot be read ({error}). Save the model again.") from error
    if not isinstance(found, dict) or "_class_name" not in found:
        raise RecipeError(f"model.path: {folder / CONFIG} does not name the model's class in diffusers.")
    name = found["_class_name"]
    if name == _OLD_CLASS:
        name = _BY_NORM_TYPE.get(str(found.get("norm_type")), name)
    known = settings_of(name, where=f"{folder / CONFIG}: _class_name")
    settings = {key: value for key, value in found.items() if not key.startswith("_")}
    unknown = [key for key in settings if key not in known]
    if unknown and found["_class_name"] != _OLD_CLASS:
        raise RecipeError(
            f"{folder / CONFIG}: {', '.join(unknown)} is not a setting of {name} in the installed diffusers; the model "
            f"was saved by {found.get('_diffusers_version', 'another version')}. Install that: pip install -U diffusers"
        )
    # The old class had more settings.
    return name, {key: value for key, value in settings.items() if key in known}


def folder_weights(folder: Path, module: nn.Module) -> NamedWeights:
    """Stored tensors by the module's parameter names, without adapters."""
    own = {n: t for n, t in module.state_dict(keep_vars=True).items() if not is_adapter(n) and not is_scalar(n)}
    return NamedWeights(
        open_folder(folder),
        {name: base_name(name) for name in own},
        {name: tuple(tensor.shape) for name, tensor in own.items()},
        what=f"{folder} does not hold the tensors of {_class_name(module)}",
        advice="Check model.path, model.overrides and model.classes.",
    )


def write_model(
    module: Any,
    tensors: Iterator[tuple[str, torch.Tensor]],
    folder: Path,
    *,
    dtype: torch.dtype | None,
    merged: bool = False,
) -> None:
    """Config and weights, as the class's `from_pretrained` reads them. `merged`: adapters come first and are added to
    the weights."""
    _write_config(module, folder)
    merge = Merge(module) if merged else None
    own = [name for name, _ in module.named_parameters() if not is_adapter(name) and not is_scalar(name)]
    expected, seen = {base_name(name) for name in own}, set()
    with SafetensorsStream(folder / WEIGHTS) as stream:
        for given, tensor in tensors:
            if merge is not None and is_adapter(given):
                merge.take(given, tensor)
                continue
            name = base_name(given)
            seen.add(name)
            # A buffer keeps its dtype: it may hold positions.
            chosen = dtype if dtype is not None and name in expected else tensor.dtype
            stream.add_rows(name, TensorEntry(chosen, tuple(tensor.shape)), merged_rows(name, tensor, chosen, merge))
        require_complete(folder, expected, seen, "parameters")
        for name, buffer in module.state_dict().items():
            if base_name(name) not in seen and name not in own and not is_adapter(name) and not is_scalar(name):
                stream.add(base_name(name), buffer)


def _write_config(module: Any, folder: Path) -> None:
    module.save_config(folder)
    # Sharding renames the class.
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    config["_class_name"] = _class_name(module)
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _class_name(module: Any) -> str:
    return str(getattr(module, "class_name", type(module).__name__))
