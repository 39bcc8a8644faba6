"""The contract of an evaluation: numbers (and texts) about the model as it is now.

Runs on all ranks, in step with each other. Must not update weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from fullshard.config.part import Part
from fullshard.contracts.objective import Batch, Numbers, Objective

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class EvaluationInputs:
    """What an evaluation may use. `batches` starts a fresh pass over this rank's share of the validation data."""

    model: nn.Module
    objective: Objective
    aux: dict[str, nn.Module]
    batches: Callable[[], Iterable[Batch]]
    num_batches: int
    processor: Any
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor]
    device: torch.device
    bar: Callable[[int], Any]
    """A progress bar over n batches: `with bar(n) as b: b.advance(running_loss)`."""
    show: Callable[..., Any]
    """Saves a grid of images in the run folder: `show(name, images, columns=8)`, on rank 0, returns the file's path."""
    encoder: Any = None
    """The run's OpenEncoder, for evaluations with their own records."""
    collator: Any = None
    """The run's Collator."""


@dataclass(frozen=True)
class Findings:
    """The same on every rank."""

    numbers: dict[str, float] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)


class Evaluation(Part):
    """Something to find out about the model at each validation."""

    folder: ClassVar[str] = "fullshard.evaluations"
    required: ClassVar[tuple[str, ...]] = ("run",)
    numbers: ClassVar[Numbers | None] = None
    """What it finds, and whether lower or higher is better: {"fid": "min", "recall": "max"}; None: not said, and
    `checkpoint.best` by one of them must state its mode."""
    needs_held_out: ClassVar[bool] = False
    """Without validation data it finds nothing."""
    needs_tokenizer: ClassVar[bool] = False
    """Without a tokenizer it cannot run."""

    only_at_end: bool = False
    """Run once, when training is over, instead of at every validation."""

    def gives(self, objective: Objective, model: nn.Module) -> Numbers | None:
        """`numbers`, if they depend on the settings, the objective or the (empty) model."""
        return self.numbers

    def check(self, objective: Objective, model: nn.Module, held_out: Any) -> None:
        """Raises what would stop it at the first validation. Called before ranks meet, with the empty model and the
        encoded validation data, if there is any."""

    def check_encoder(self, objective: Objective, model: nn.Module, encoder: Any) -> None:
        """The same for the settings of the encoder."""

    def run(self, inputs: EvaluationInputs) -> Findings:
        """Looks at the model; called on every rank with the same settings."""
        raise NotImplementedError
