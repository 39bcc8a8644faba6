"""Pictures of a run: a grid of images as one PNG file in the run folder, and a record about it.

Must not know what the pictures show or how they were made.
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
"""Smaller images are enlarged by a whole factor."""


@dataclass(frozen=True)
class Gallery:
    """Where the pictures of one run go."""

    folder: Path
    progress: Progress
    write: Callable[[dict[str, Any]], None]

    def show(
        self, name: str, images: torch.Tensor, *, columns: int, array: torch.Tensor | None = None, text: str = ""
    ) -> Path:
        """Writes `pictures/NAME-STEP.png` and a record about it, on rank 0; beside it `array` in a .npy file, and a
        text in Markdown in a .md file."""
        step = self.progress.step
        path = self.folder / FOLDER / f"{name}-{step}.png"
        if array is not None:
            save_array(array, path.with_suffix(".npy"))
        save_grid(images, path, columns=columns)
        if text:
            path.with_suffix(".md").write_text(text, encoding="utf-8")
        self.write({"kind": "event", "event": "picture", "step": step, "name": name, "file": f"{FOLDER}/{path.name}"})
        return path


def save_array(values: torch.Tensor, path: Path) -> None:
    """As fp32, in one array."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, values.float().cpu().numpy())


def save_grid(images: torch.Tensor, path: Path, *, columns: int) -> None:
    """Writes images (N, 1 or 3 channels, H, W) with values from -1 to 1, row by row."""
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
