"""The contract of an objective: what is minimised, and nothing about how.

An objective answers with sums and counts; the step divides by the count over all ranks and micro-batches. That makes
the result the same for any world size and any split into micro-batches. Must not know data sources, optimizers or FSDP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from fullshard.config.part import Part
from fullshard.errors import RecipeError

if TYPE_CHECKING:
    import torch
    from torch import nn

Batch = dict[str, Any]
"""One micro-batch: tensors by name. `sample_ids` is always there; -1 marks a filler sample."""
Direction = Literal["min", "max"]
"""Which values of a number are better: lower (min) or higher (max)."""
Numbers = Mapping[str, Direction]
"""What a validation reports: each number by name, with its direction."""


@dataclass(frozen=True)
class Term:
    """One of several terms of a loss, over one micro-batch. Its average enters the loss with `weight`."""

    sum: torch.Tensor
    weight: float = 1.0


@dataclass(frozen=True)
class Terms:
    """The sum over the loss terms of one micro-batch, and metrics as (sum, count) pairs of tensors.

    A loss of several terms is `Terms.several({"caption": Term(a), "contrast": Term(b, weight=0.1)})`."""

    loss_sum: torch.Tensor
    metrics: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    named: dict[str, Term] = field(default_factory=dict)
    """Several terms, in the order of their names; empty: a single one."""

    @classmethod
    def several(
        cls, named: Mapping[str, Term], metrics: dict[str, tuple[torch.Tensor, torch.Tensor]] | None = None
    ) -> Terms:
        """Each term is divided by its own count, so `count` returns one for each of these names."""
        import torch

        ordered = dict(sorted(named.items()))
        weighted = torch.stack([term.weight * term.sum for term in ordered.values()])
        return cls(weighted.sum(), metrics or {}, ordered)

    def over(self, total: torch.Tensor) -> torch.Tensor:
        """This micro-batch's share of the loss: each sum divided by its count over all ranks and micro-batches."""
        import torch

        if not self.named:
            return self.loss_sum / total
        return (torch.stack([term.weight * term.sum for term in self.named.values()]) / total).sum()

    def detached(self) -> Terms:
        named = {name: Term(term.sum.detach(), term.weight) for name, term in self.named.items()}
        metrics = {name: (s.detach(), c.detach()) for name, (s, c) in self.metrics.items()}
        return Terms(self.loss_sum.detach(), metrics, named)


class Objective(Part):
    """What a run minimises."""

    folder: ClassVar[str] = "fullshard.objectives"
    default_kind: ClassVar[str | None] = "causal_lm"
    required: ClassVar[tuple[str, ...]] = ("count", "loss")
    needs: ClassVar[tuple[str, ...]] = ()
    """The batch keys it reads. If it lists input_ids, or no key, the engine proves before step 1 that documents in a
    packed row do not change each other's terms; with labels too, that each counts at its own position, that no
    position sees later tokens, and that padding changes nothing (fullshard/proofs/before_step_one.py)."""
    bidirectional: ClassVar[bool] = False
    """Whether positions with a loss may see later tokens: only where labels are not the next tokens."""
    encoder: ClassVar[str | None] = None
    """The kind of encoder to use if the recipe names none; None: chosen by the first record."""
    numbers: ClassVar[Numbers | None] = None
    """The numbers of a validation, the loss included: {"loss": "min", "accuracy": "max"}; None: not declared."""

    def count(self, batch: Batch) -> int | Mapping[str, int]:
        """How many values the sum of the micro-batch has, from the batch alone (on the CPU, before any forward pass). A
        loss of several terms returns a number for each name, 0 for a term that the micro-batch lacks."""
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Batch, aux: dict[str, nn.Module]) -> Terms:
        """The sum over those terms.

        `labels` are shifted already: labels[:, i] is the target of position i, or -100. Compare
        logits[:, i] with labels[:, i]; do not shift again. In a packed row `position_ids` restart at 0 with each
        document: pass them to the model, which uses them to keep documents apart."""
        raise NotImplementedError

    def predictions(self, model: nn.Module, batch: Batch) -> torch.Tensor | None:
        """(rows, positions, vocabulary): the logits behind `loss`, for proofs of each position; None: not available."""
        return None

    @property
    def predicts_tokens(self) -> bool:
        """Whether it has `next_token_logits`."""
        return type(self).next_token_logits is not Objective.next_token_logits

    def next_token_logits(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """(rows, vocabulary) of what may follow each row; only for objectives that predict tokens."""
        raise RecipeError(
            f"objective.kind = {self.kind()} does not predict tokens: remove evaluations that sample text."
        )

    def extend(self, module: nn.Module) -> None:
        """Adds what this objective trains to a module with parameters on meta; raises if the module does not fit."""

    def frozen(self) -> dict[str, Any]:
        """Families of frozen models that it uses; `loss` gets them, sharded, as `aux`."""
        return {}

    def check_data(self, stored: Any, *, module: nn.Module, samples_per_step: int) -> None:
        """Raises if it cannot learn from the encoded data with this model; called before ranks meet."""

    def gives(self) -> Numbers | None:
        """The same as `numbers`; override it if they depend on the settings."""
        return self.numbers

    def derived(self, numbers: dict[str, float]) -> dict[str, float]:
        """Numbers that follow from the averages, such as perplexity from the loss."""
        return {}

    def check(self, model: nn.Module, batch: Batch, *, packed: bool, compute: torch.dtype) -> list[str]:
        """Proves on a first batch, before step 1, what this loss relies on; raises if it does not hold. Returns lines
        that say what was proven. Every rank must run the same forward passes."""
        return []

    def backward(
        self,
        model: nn.Module,
        batches: Iterable[Batch],
        total: torch.Tensor,
        aux: dict[str, nn.Module],
        scale: Callable[[torch.Tensor], torch.Tensor],
    ) -> list[Terms]:
        """Adds the gradient of `sum / total` over all micro-batches. Override only when terms couple across them.

        `total` is one count, or one for each of several terms, in the order of their names."""
        results = []
        for batch in batches:
            terms = self.loss(model, batch, aux)
            scale(terms.over(total)).backward()
            results.append(terms.detached())
        return results
