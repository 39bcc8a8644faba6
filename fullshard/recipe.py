"""The recipe: every setting of a run, in sections, frozen.

A recipe states only what differs from the defaults. `None` means auto: build.py chooses a value and records it.
Must not know YAML, torch, ranks or any concrete part.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from fullshard.checkpoint import folder
from fullshard.checkpoint.settings import Checkpoint, Start, remote_output
from fullshard.config.part import Section, decode
from fullshard.contracts.data import Encoder, Source
from fullshard.contracts.ema import Ema
from fullshard.contracts.evaluation import Evaluation
from fullshard.contracts.launcher import Topology
from fullshard.contracts.model import Family
from fullshard.contracts.objective import Objective
from fullshard.contracts.optimizer import Optimizer
from fullshard.contracts.schedule import Schedule
from fullshard.contracts.sink import Sink
from fullshard.dialects.foreign_keys import NO_EFFECT, NoEffect
from fullshard.dist.precision import check_word
from fullshard.faults.guard import Guard

Precision = Annotated[str, BeforeValidator(check_word)]


class Data(Section):
    """What the run learns from."""

    train: Source
    """A path, a list of paths, or a source with its settings."""
    validation: Source | None = None
    """The same for validation; null: `holdout` of the training records."""
    encode: Encoder | None = None
    """How records become samples; null: chosen by the keys of the first record."""
    sequence_length: int = Field(1024, ge=2)
    """The longest sample, in tokens."""
    pack: bool = True
    """Put several documents into one row; they never attend to each other."""
    shuffle: bool = True
    """A new global order every epoch; false keeps the order of the source."""
    balance: Literal["none", "batches", "steps"] | None = None
    """batches: in a step, rows of similar length share a micro-batch, and ranks get equally many images; steps: also,
    all steps have equally many rows with images; none: neither; null: batches for unpacked rows with images."""
    holdout: float = Field(0.05, ge=0, lt=1)
    """Share of the training records held out for validation if `validation` is not set; 0: none."""
    workers: int | None = Field(None, ge=0)
    """Loader processes per rank; null: 2 with a GPU, 0 on a CPU."""
    cache: Path | None = None
    """Where encoded data is cached; null: the user's cache folder."""


class Batch(Section):
    """How many rows a step has: global = per_device x accumulate x ranks. Without packing a row is a sample."""

    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = (("accumulate", "global"),)

    per_device: Annotated[int, Field(ge=1)] | Literal["auto"] = 8
    """Rows in one micro-batch of one rank; auto: as many as fit, tried before step 1 (needs `global`)."""
    accumulate: int | None = Field(None, ge=1)
    """Micro-batches per step; null: 1, or what `global` asks for."""
    global_size: int | None = Field(None, ge=1, alias="global")
    """Rows per step over all ranks, whatever their number."""
    on_oom: Literal["stop", "split"] = "stop"
    """If a rank runs out of memory. split: all ranks repeat the step, and go on, in micro-batches of half the rows."""


class Duration(Section):
    """How long the run is."""

    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = (("epochs", "steps"),)

    epochs: float | None = Field(None, gt=0)
    """Passes over the training data."""
    steps: int | None = Field(None, ge=1)
    """Optimizer steps."""

    @model_validator(mode="after")
    def _given(self) -> Duration:
        if self.epochs is None and self.steps is None:
            raise ValueError("give exactly one of duration.epochs and duration.steps")
        return self


class Wrap(Section):
    """Which modules become FSDP units; by default the model's own blocks, found by structure."""

    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = (("classes", "min_params", "whole"),)

    classes: list[str] | None = None
    """Class names of the modules to wrap."""
    min_params: int | None = Field(None, ge=1)
    """Wrap by size instead: modules with at least this many parameters."""
    whole: bool = False
    """One unit for the whole model."""

    @classmethod
    def from_short(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = [value]
        return {"classes": value} if isinstance(value, list) else value


class Sharding(Section):
    """How the model is sharded over the ranks."""

    no_effect: ClassVar[Mapping[str, NoEffect]] = NO_EFFECT["sharding"]

    strategy: Literal["auto", "full", "grad_op", "hybrid", "none"] = "auto"
    """full: parameters, gradients and optimizer state; grad_op: parameters stay gathered from forward to backward;
    hybrid: sharded within a node, replicated across nodes; none: replicated."""
    wrap: Wrap | None = None
    """Which modules become units; null: by structure."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory."""
    forward_prefetch: bool = False
    """Gather the next block's parameters before this one has run."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Recompute in the backward pass: all but attention and every second matrix product, or each block as a whole."""
    compile: bool | None = None
    """Compile each block; null: on CUDA only."""
    sync_batchnorm: bool = False
    """Compute batch-norm statistics over all ranks."""

    @classmethod
    def from_short(cls, value: Any) -> Any:
        return {"strategy": value} if isinstance(value, str) else value


class Evaluate(Section):
    """When and how the model is validated."""

    every_steps: int | None = Field(None, ge=1)
    """Steps between two validations."""
    every_epochs: int | None = Field(1, ge=1)
    """Epochs between two validations, each at the end of one."""
    at_start: bool = False
    """Also validate before the first step."""
    per_device: int | None = Field(None, ge=1)
    """Samples in one validation batch of one rank; null: as in training."""
    parts: list[Evaluation] = Field(
        default_factory=lambda: [decode(Evaluation, {"kind": "loss"}, where="evaluate.parts[0]")]
    )
    """The evaluations to run."""
    patience: int | None = Field(None, ge=1)
    """Stop after this many validations in a row without a new best (`checkpoint.best`)."""


class Log(Section):
    """What is logged during the run."""

    every_steps: int = Field(10, ge=1)
    """Steps between two logged lines."""
    sinks: list[Sink] = Field(default_factory=lambda: [decode(Sink, {"kind": "tensorboard"}, where="log.sinks[0]")])
    """Where the numbers go besides metrics.jsonl."""
    sample_ids: bool = False
    """Write the ids of the rows of every step to metrics.jsonl."""
    debug: bool | Literal["trace"] = False
    """Write debug messages to log.txt, and what NCCL does to a file per rank; trace: in NCCL's finest detail."""


class Recipe(Section):
    """Every setting of a run."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """The name of the run folder inside `output`."""
    output: Path = Path("runs")
    """The folder that holds run folders; a URL (s3://bucket/runs) is short for checkpoint.store."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the data order, new weights and dropout."""
    model: Family
    """The model."""
    objective: Objective = Field(default_factory=lambda: decode(Objective, {}, where="objective"))
    """The loss to minimise."""
    data: Data
    """What the run learns from."""
    batch: Batch = Field(default_factory=Batch)
    """Rows per step."""
    duration: Duration = Field(default_factory=lambda: Duration(epochs=1))
    """How long the run is."""
    optimizer: Optimizer = Field(default_factory=lambda: decode(Optimizer, {}, where="optimizer"))
    """The optimizer."""
    schedule: Schedule = Field(default_factory=lambda: decode(Schedule, {}, where="schedule"))
    """The learning rate over the run."""
    ema: Ema | None = None
    """Keep an exponential moving average of the weights: true, a decay, or settings."""
    precision: Precision = "auto"
    """auto, bf16, fp16, fp32 or float8; other common spellings, such as bfloat16, work too."""
    sharding: Sharding = Field(default_factory=Sharding)
    """How the model is sharded over the ranks."""
    topology: Topology = Field(default_factory=Topology)
    """Which devices."""
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    """When and how the run is saved."""
    evaluate: Evaluate = Field(default_factory=Evaluate)
    """When and how the model is validated."""
    log: Log = Field(default_factory=Log)
    """What is logged during the run."""
    guard: Guard = Field(default_factory=Guard)
    """What to do about NaN, Inf and loss spikes."""
    start: Start | None = None
    """What the run takes over from an earlier one."""
    stages: list[Recipe] | None = None
    """Runs in a row, each with a name and the settings that differ from those beside `stages`."""

    @model_validator(mode="before")
    @classmethod
    def _remote_output(cls, value: Any) -> Any:
        return remote_output(value) if isinstance(value, dict) else value

    @property
    def folder(self) -> Path:
        return self.output / self.name

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints and the exported model: the run folder, or its remote counterpart."""
        store = self.checkpoint.store
        return folder.place(f"{store.rstrip('/')}/{self.name}") if store else self.folder


IN_FORCE = ("data.encode", "data.balance")
"""Chosen by the data if the recipe leaves them out, so the identity has what they became."""


def unset(*recipes: dict[str, Any]) -> tuple[str, ...]:
    """Those of `IN_FORCE` that some recipe leaves out: its choice cannot be compared by the recipes alone."""
    return tuple(key for key in IN_FORCE if any(recipe.get(key, "") is None for recipe in recipes))
