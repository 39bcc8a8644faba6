"""Saves one run: checkpoints with their pointers and retention, and the final export.

Called by the loop on every rank alike. Must not know losses, data or when it is called.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.checkpoint import dcp
from fullshard.checkpoint import folder as files
from fullshard.dist.shard import reshard
from fullshard.dist.values import whole
from fullshard.dist.world import World
from fullshard.log.console import Console
from fullshard.models.base import Family
from fullshard.state import Progress


@dataclass(frozen=True)
class Saver:
    """What is saved, and where."""

    folder: Path
    keep: int | None
    export_best: bool
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None
    identity: dict[str, Any]
    family: Family
    processor: Any
    world: World
    console: Console

    def save(self, progress: Progress, best: bool) -> None:
        """Publishes `checkpoint-STEP`, moves the pointers, removes what retention does not keep."""
        facts = {
            "progress": progress.as_dict(),
            "identity": self.identity,
            "scaler": self.scaler.state_dict() if self.scaler else None,
            "world_size": self.world.size,
        }
        path, seconds = dcp.save(
            self.folder,
            progress.step,
            model=self.model,
            optimizer=self.optimizer,
            facts=facts,
        )

        def tidy() -> None:
            if best:
                files.point(self.folder, "best", path)
            files.tidy(self.folder, keep=self.keep)
            size = sum(file.stat().st_size for file in path.iterdir())
            self.console.saved(path, seconds=seconds, size_bytes=size)

        dcp.together(tidy if self.world.is_main else _nothing, f"{self.folder} cannot be tidied")

    def restore(self, checkpoint: Path) -> None:
        """Loads weights, optimizer state and loss scale."""
        files.check(checkpoint)
        dcp.load(checkpoint, model=self.model, optimizer=self.optimizer)
        state = files.read_state(checkpoint).get("scaler")
        if self.scaler and state:
            self.scaler.load_state_dict(state)

    def export(self, progress: Progress) -> str:
        """Writes `model/` and says whose weights it holds; for the best ones they are loaded back first."""
        best = progress.best_step if self.export_best else None
        if best is not None and best != progress.step:
            dcp.load_weights(self.folder / files.name_of(best), model=self.model)
        which = f"the weights of step {best}, the best" if best is not None else f"the weights of step {progress.step}"
        return f"{self._write_model()} ({which})"

    def _write_model(self) -> Path:
        """Whole tensors, one at a time, from all ranks to rank 0, which writes them as `model/`."""
        reshard(self.model)
        target = self.folder / "model"
        tensors = self._whole_tensors()

        def write() -> None:
            hidden = files.begin_export(self.folder)
            try:
                self.family.export(self.model, tensors, hidden, processor=self.processor)
            finally:  # the other ranks are still gathering: let them end before an error is raised
                _exhaust(tensors)
            files.replace(hidden, target)

        dcp.together(write if self.world.is_main else lambda: _exhaust(tensors), f"{target} cannot be written")
        return target

    def _whole_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            assert isinstance(parameter, DTensor)
            tensor = whole(parameter)
            yield name, tensor.cpu() if self.world.is_main else tensor


def _exhaust(tensors: Iterator[Any]) -> None:
    for _ in tensors:
        pass


def _nothing() -> None:
    pass
