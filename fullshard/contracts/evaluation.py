"""The contract of an evaluation: numbers (and texts) about the model as it is now.

Runs on all ranks in lockstep. Must not update weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from fullshard.config.part import Part
from fullshard.contracts.objective import Batch, Numbers, Objective
from fullshard.errors import RecipeError

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
    """Saves a grid of images in the run folder, with a text: `show(name, images, columns=8, text=...)`; on rank 0."""
    encoder: Any = None
    """The run's OpenEncoder, for evaluations with their own records."""
    collator: Any = None
    """The run's Collator."""
    held_out: Any = None
    """The encoded validation data, if there is any."""
    family: Any = None
    """The run's Family."""


@dataclass(frozen=True)
class Findings:
    """The same on every rank."""

    numbers: dict[str, float] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)


class Evaluation(Part):
    """Something to measure at each validation."""

    folder: ClassVar[str] = "fullshard.evaluations"
    required: ClassVar[tuple[str, ...]] = ("run",)
    numbers: ClassVar[Numbers | None] = None
    """The numbers it reports, and whether lower or higher is better: {"fid": "min", "recall": "max"}; None: not
    declared, and then `checkpoint.best` must state the mode."""
    needs_held_out: ClassVar[bool] = False
    """It needs validation data."""
    needs_tokenizer: ClassVar[bool] = False
    """It needs a tokenizer."""

    only_at_end: bool = False
    """Run once, when training is over, instead of at every validation."""

    def gives(self, objective: Objective, model: nn.Module) -> Numbers | None:
        """The same as `numbers`; override it if they depend on the settings, the objective or the (empty) model."""
        return self.numbers

    def check(self, objective: Objective, model: nn.Module, held_out: Any) -> None:
        """Raises what would stop it later. Called before ranks meet, with the empty model and validation data."""

    def check_encoder(self, objective: Objective, model: nn.Module, encoder: Any) -> None:
        """The same for the settings of the encoder."""

    def run(self, inputs: EvaluationInputs) -> Findings:
        """Measures the model; called on every rank with the same settings."""
        raise NotImplementedError


def refuse_same_name(owners: dict[str, str], part: str, names: Iterable[str]) -> None:
    """Notes in `owners` that `part` reports these numbers; raises if another part does."""
    for name in names:
        if name in owners:
            raise RecipeError(
                f"{owners[name]} and {part} both report a number called {name!r}, and one would overwrite the other. "
                "Remove one of them, or rename it: with its key `name` if it has one, in its class if it is your own."
            )
        owners[name] = part
