"""TensorBoard, in the run's folder `logs/`: `tensorboard --logdir RUN/logs`.

A tag is the record's kind and the number's name: `train/loss`, `validation/loss`, `time/data`.
Must not know what the numbers mean.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fullshard.contracts.sink import OpenSink, Sink
from fullshard.log.metrics import FILE, last_step, scalars

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard(Sink):
    """Curves for TensorBoard."""

    def packages(self) -> Mapping[str, str]:
        return {"tensorboard": "tensorboard"}

    def viewer(self, folder: Path) -> str:
        return f"tensorboard --logdir {shlex.quote(str(folder / 'logs'))}"

    def open(self, folder: Path, *, name: str, recipe: dict[str, Any]) -> OpenSink:
        from torch.utils.tensorboard import SummaryWriter

        # metrics.jsonl already ends at the step that the run resumes from; later points of TensorBoard are hidden.
        kept = last_step(folder / FILE)
        writer = SummaryWriter(str(folder / "logs"), purge_step=0 if kept is None else kept + 1, flush_secs=10)
        return _Open(writer, folder)


class _Open(OpenSink):
    def __init__(self, writer: SummaryWriter, folder: Path) -> None:
        self._writer, self._folder = writer, folder

    def write(self, record: dict[str, Any]) -> None:
        if record.get("event") == "picture":
            from PIL import Image

            with Image.open(self._folder / record["file"]) as image:
                self._writer.add_image(record["name"], np.asarray(image), record["step"], dataformats="HWC")
            if (text := (self._folder / record["file"]).with_suffix(".md")).is_file():
                self._writer.add_text(record["name"], text.read_text(encoding="utf-8"), record["step"])
        for tag, value in scalars(record).items():
            self._writer.add_scalar(tag, value, record["step"])

    def close(self) -> None:
        self._writer.close()


__all__ = ["TensorBoard"]
