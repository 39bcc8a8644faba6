"""A frozen part of a diffusers pipeline (VAE, text encoder): its folder, its files and its device.

A part may be alone or inside a pipeline, on disk or on the hub. Must not know data, losses or ranks.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from fullshard.errors import RecipeError
from fullshard.hf.hub import fetch

if TYPE_CHECKING:
    import torch

CONFIG = "config.json"
_CONTENT = ("*.json", "*.txt", "*.model", "*.safetensors")
"""Files that decide what a part computes."""


def part_folder(path: str, part: str, *, revision: str | None, where: str) -> Path:
    """The folder with the part's config and weights: `path` itself, or `part` inside the pipeline there."""
    folder = fetch(path, revision=revision, code=False, weights=False, where=where)
    is_alone = (folder / CONFIG).is_file()
    found = folder if is_alone else folder / part
    if not (found / CONFIG).is_file():
        raise RecipeError(
            f"{where}: {folder} has no {CONFIG}, and no {part}/{CONFIG} either. Name the folder of the model itself, "
            f"or of a pipeline of diffusers that has a part {part}."
        )
    if not any(found.glob("*.safetensors")) and not _is_local(path):
        import huggingface_hub

        wanted = "*.safetensors" if is_alone else f"{part}/*.safetensors"
        huggingface_hub.snapshot_download(path, revision=revision, allow_patterns=[wanted])
    return found


def _is_local(path: str) -> bool:
    return path.startswith("package:") or Path(path).expanduser().is_dir()


def content(folder: Path) -> list[Path]:
    """The files whose bytes identify the part, by name."""
    return sorted({file for pattern in _CONTENT for file in folder.glob(pattern)})


def device() -> torch.device:
    """This process's GPU, or the CPU. Works before the ranks are connected."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def release_memory() -> None:
    """Returns unused memory to the GPU."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
