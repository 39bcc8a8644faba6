"""What `fullshard.train` returns: progress, the best checkpoint, every metric, and the trained model.

Metrics and checkpoints are read from the run folder when they are asked for. Must not train anything.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullshard.card.load_code import importing
from fullshard.checkpoint import folder as files
from fullshard.contracts.progress import Result as Ended
from fullshard.errors import CheckpointError, SetupError
from fullshard.formatting.plural import counted
from fullshard.log.metrics import FILE, read
from fullshard.recipe import Recipe

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class BestCheckpoint:
    """The checkpoint with the best validation."""

    path: Path
    step: int
    value: float
    metric: str
    """What was compared, such as `min loss`."""


@dataclass(frozen=True)
class Result(Ended):
    """How far the run got (`step`, `epoch`, `samples`, `tokens`, `seconds`), why it `stopped` (done, patience or
    signal), its last `validation`, and ways to its checkpoints, metrics and model."""

    recipe: Recipe = field(default=None, repr=False)  # type: ignore[assignment]
    _module: nn.Module | None = field(default=None, repr=False, compare=False)

    @property
    def best_checkpoint(self) -> BestCheckpoint | None:
        """Path, step, value and metric of the best checkpoint; None if the run keeps none (`checkpoint.best`)."""
        if self.best is None or self.best_step is None:
            return None
        path = files.pointed(self.recipe.checkpoints, "best")
        if path is None or files.step_of(path) != self.best_step:
            return None
        return BestCheckpoint(path, self.best_step, self.best, self.best_by or "")

    @property
    def last_checkpoint(self) -> Path | None:
        """The checkpoint that was saved last."""
        return files.pointed(self.recipe.checkpoints, "last")

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Every logged step and validation, in order, one flat dict each: `pandas.DataFrame(result.metrics)`.

        `kind` is train or validation; a group of numbers, such as the seconds of each phase, is `time.data`, ..."""
        path = Path(self.folder) / FILE
        records = read(path) if path.exists() else []
        return [_flat(record) for record in records if record.get("kind") != "event"]

    @property
    def model_folder(self) -> Path:
        """The exported model: a folder that Transformers, peft, sentence-transformers or diffusers loads."""
        folder = Path(self.folder) / "model"
        if not folder.is_dir():
            raise CheckpointError(self._not_exported())
        return folder

    @property
    def model(self) -> nn.Module:
        """The sharded model as training left it, on its device, if the ranks are this process: one rank, or a launcher
        that started this program on each. `load` reads the exported one anywhere."""
        if self._module is None:
            raise SetupError(
                "The live model ended with the processes that trained it: this run's ranks are not this process, or "
                "it was finished before. Read the exported model: result.load()."
            )
        return self._module

    def load(self, **options: Any) -> Any:
        """The exported model, read by its ecosystem's own class in one process; options go to its loader, such as
        `dtype` and `device_map` of Transformers."""
        folder = str(self.model_folder.resolve())
        line = self.recipe.model.load_with(folder, adapter=self.adapted)
        if line is None:
            way = f": fullshard export {shlex.quote(self.folder)} OUT --as merged" if self.adapted else ""
            raise SetupError(
                f"model.kind = {self.recipe.model.kind()} names no class that loads its "
                f"{'adapters without their base' if self.adapted else 'export'}. The files are in {folder}{way}."
            )
        # The line that the run itself prints for loading its model.
        names: dict[str, Any] = {"options": options}
        exec(importing(f"{line[:-1]}, **options)" if options else line), names)
        return names["model"] if "model" in names else names["pipeline"]

    def _not_exported(self) -> str:
        store = self.recipe.checkpoints
        if files.is_remote(store):
            return f"The exported model is in {store / 'model'}, not on this machine. Copy it, then load the copy."
        if self.stopped == "signal":
            done = counted(self.step, "step")
            return (
                f"The run in {self.folder} was stopped after {done}, and a model is exported at its end. Call "
                "fullshard.train again to continue it, or export its last checkpoint: "
                f"fullshard export {shlex.quote(self.folder)}/last OUT."
            )
        return f"{self.folder} has no exported model: checkpoint.at_end is false. Set it to true and train again."


def of(ended: Ended, recipe: Recipe, *, module: nn.Module | None = None) -> Result:
    """The result of a run with its recipe, and with its model if that is in this process."""
    return Result(**vars(ended), recipe=recipe, _module=module)


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in record.items():
        flat |= {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, dict) else {name: value}
    return flat
