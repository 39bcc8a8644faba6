"""The recipe's `checkpoint` section. Must not know torch or how anything is saved."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, model_validator

from fullshard.config.part import Section


class Best(Section):
    """Which checkpoint is the best."""

    metric: str = "loss"
    """The validation number that decides."""
    mode: Literal["min", "max"] | None = None
    """Whether lower or higher is better; null: as the evaluation that reports the number declares."""

    @classmethod
    def from_short(cls, value: Any) -> Any:
        return {"metric": value} if isinstance(value, str) else value


class Checkpoint(Section):
    """When and how the run is saved."""

    every_steps: int | None = Field(None, ge=1)
    """Steps between two saves."""
    every_epochs: int | None = Field(1, ge=1)
    """Epochs between two saves, each at the end of one."""
    every_minutes: float | None = Field(None, gt=0)
    """Minutes between two saves."""
    at_end: bool = True
    """Save and export when the run ends; false for trials and benchmarks."""
    format: Literal["sharded", "full"] = "sharded"
    """sharded: every rank writes its slices (DCP); full: one file for the model and one for the optimizer."""
    asynchronous: bool | None = None
    """Write in the background while training goes on; null: on a GPU if host memory allows, never on a CPU."""
    store: str | None = None
    """A remote folder for checkpoints and the exported model: s3://bucket/runs, gs://..., any fsspec URL."""
    export: Literal["last", "best"] = "last"
    """Which weights `model/` holds: those of the last step, or of the best checkpoint."""
    keep: int | None = Field(3, ge=1)
    """How many checkpoints to keep; `best` and `last` are always kept. null keeps all."""
    best: Best | None = Field(default_factory=Best)
    """The number that decides `best`; null for no best checkpoint."""

    @model_validator(mode="after")
    def _possible(self) -> Checkpoint:
        if self.store is not None and "://" not in self.store:
            raise ValueError(
                f"checkpoint.store = {self.store!r} is not a URL like s3://bucket/runs; for a local folder use output"
            )
        if self.store is not None and self.format == "full":
            raise ValueError(
                "checkpoint.format = full cannot be read in part from a remote store; use sharded there, and "
                "`fullshard export` for a full state"
            )
        return self


class Start(Section):
    """What a run takes over from an earlier one; a stage takes it from the stage before it."""

    source: str | None = Field(None, alias="from")
    """A run or one of its checkpoints; in a stage also the name of an earlier stage. null: the stage before it."""
    weights: Literal["last", "best"] = "last"
    """Of a run, the last checkpoint or the best one."""
    optimizer: Literal["carry", "fresh"] | None = None
    """carry: parameters trained there and here keep their optimizer state; fresh: none does; null: carry, unless the
    kind of optimizer has changed."""


def remote_output(recipe: dict[str, Any]) -> dict[str, Any]:
    """A recipe whose `output` is a URL, with the URL where it belongs: checkpoints go there, logs stay local."""
    output, checkpoint = str(recipe.get("output")), recipe.get("checkpoint") or {}
    if re.match(r"[a-z][a-z0-9]+:/(?!/)", output):
        raise ValueError(f"output = {output!r} is a URL that has lost a slash; give it as a string, not as a Path")
    settings = checkpoint.model_dump() if isinstance(checkpoint, Checkpoint) else checkpoint
    if "://" not in output or not isinstance(settings, dict):
        return recipe
    if settings.get("store") not in (None, output):
        raise ValueError(
            f"output = {output} and checkpoint.store = {settings['store']} are two stores; give one of them"
        )
    rest = {key: given for key, given in recipe.items() if key != "output"}
    return rest | {"checkpoint": {**settings, "store": output}}
