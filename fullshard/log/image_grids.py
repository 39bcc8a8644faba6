"""Pictures that a run shows: a grid of images as one PNG file in the run folder, told to whoever keeps records.

Must not know what is in the pictures or how they were made.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fullshard.contracts.progress import Progress

FOLDER = "pictures"
_LEAST_SIDE = 64
"""Images smaller than this are shown larger, by a whole factor, so that a person can see them."""


@dataclass(frozen=True)
class Gallery:
    """Where the pictures of one run go."""

    folder: Path
    progress: Progress
    write: Callable[[dict[str, Any]], None]
    encoder: Any
    """What the data was made by: `shown` takes its scaling off, and `shows_latents` says whether that is no picture."""

    def show(self, name: str, images: torch.Tensor, *, columns: int) -> Path:
        """Writes `pictures/NAME-STEP.png` and a record that says so; on rank 0. Latents are kept as they are, too, in
        `pictures/NAME-STEP.npy`."""
        step = self.progress.step
        path = self.folder / FOLDER / f"{name}-{step}.png"
        shown = self.encoder.shown(images)
        if is_latent := is_no_picture(shown, self.encoder):
            save_latents(shown, path.with_suffix(".npy"))
        save_grid(as_strips(shown) if is_latent else shown, path, columns=columns)
        told = {"kind": "event", "event": "picture", "step": step, "name": name, "file": f"{FOLDER}/{path.name}"}
        self.write(told)
        return path


def is_no_picture(images: torch.Tensor, encoder: Any) -> bool:
    """Whether what is shown is latents: by the data, or by channels that no picture has."""
    return bool(encoder.shows_latents) or images.shape[1] not in (1, 3)


def as_strips(latents: torch.Tensor) -> torch.Tensor:
    """Latents (N, C, H, W) as grey pictures (N, 1, H, C * W): channels side by side, each brought to -1 to 1 by what it
    has least and most of over all of them."""
    values = latents.float()
    least, most = values.amin((0, 2, 3), keepdim=True), values.amax((0, 2, 3), keepdim=True)
    grey = 2 * (values - least) / (most - least).clamp(min=1e-12) - 1
    count, channels, height, width = grey.shape
    return grey.permute(0, 2, 1, 3).reshape(count, 1, height, channels * width)


def save_latents(latents: torch.Tensor, path: Path) -> None:
    """As fp32, all in one array."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, latents.float().cpu().numpy())


def save_grid(images: torch.Tensor, path: Path, *, columns: int) -> None:
    """(images, 1 or 3 channels, H, W), values from -1 to 1, row by row."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = ((images.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).cpu().numpy()
    count, channels, height, width = pixels.shape
    rows = math.ceil(count / columns)
    grid = np.full((rows * (height + 1) - 1, columns * (width + 1) - 1, 3), 255, dtype=np.uint8)
    for index, image in enumerate(pixels):
        top, left = index // columns * (height + 1), index % columns * (width + 1)
        coloured = image if channels == 3 else np.repeat(image[:1], 3, axis=0)
        grid[top : top + height, left : left + width] = coloured.transpose(1, 2, 0)
    factor = max(math.ceil(_LEAST_SIDE / height), 1)
    Image.fromarray(grid).resize((grid.shape[1] * factor, grid.shape[0] * factor), Image.Resampling.NEAREST).save(path)
