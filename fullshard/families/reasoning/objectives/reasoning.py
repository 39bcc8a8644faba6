"""Reasoning: cross-entropy of reasoning and answer, plus a contrastive term that pulls the embedding of a reasoning to
that of its own answer and away from all other answers of the step.

Two named terms, each divided by its own count over all ranks. The second couples micro-batches: with several, the model
runs twice, first without gradients for all embeddings. Must not know data sources, optimizers or FSDP.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from fullshard.config.part import decode
from fullshard.contracts.data import IGNORE
from fullshard.contracts.no_grad import no_grad
from fullshard.contracts.objective import Batch, Numbers, Term, Terms
from fullshard.errors import RecipeError, SetupError
from fullshard.similarity.base import Embedded, SimilarityLoss
from fullshard.text.next_token import TOLERANCE, NextToken

if TYPE_CHECKING:
    import torch
    from torch import nn


class Reasoning(NextToken):
    """Cross-entropy of reasoning and answer, plus a contrastive term between the two."""

    encoder: ClassVar[str | None] = "reasoning"
    needs: ClassVar[tuple[str, ...]] = ("input_ids", "position_ids", "labels", "spans", "keys")
    numbers: ClassVar[Numbers | None] = {
        "loss": "min",
        "cross_entropy": "min",
        "contrastive": "min",
        "accuracy": "max",
        "matched": "max",
        "perplexity": "min",
    }

    contrast: float = Field(0.1, ge=0)
    """The weight of the contrastive term; cross-entropy has weight 1."""
    similarity: SimilarityLoss = Field(
        default_factory=lambda: decode(
            SimilarityLoss, {"kind": "infonce", "temperature": 0.07}, where="objective.similarity"
        )
    )
    """How embeddings are compared."""

    def extend(self, module: nn.Module) -> None:
        rule = getattr(module, "head_rule", None)
        if self.full_logits or getattr(rule, "whole", True) or self.similarity.learned() or self.similarity.tokens:
            raise RecipeError(
                "objective.kind = reasoning compares hidden states: it needs a model whose head is one linear layer, "
                "without objective.full_logits, and a similarity of whole texts without learned scalars, such as "
                f"infonce. Found {type(module).__name__} and {self.similarity.kind()}."
            )

    def count(self, batch: Batch) -> dict[str, int]:  # type: ignore[override]
        real = int((batch["sample_ids"] >= 0).sum())
        return {"contrastive": real, "cross_entropy": int((batch["labels"] != IGNORE).sum())}

    def loss(self, model: nn.Module, batch: Batch, aux: dict[str, nn.Module]) -> Terms:
        tokens, vectors = self._both(model, batch)
        embedded = _embedded([batch], vectors)
        matched = {} if "accuracy" not in tokens.metrics else {"matched": _matched(embedded)}
        return self._terms(tokens, self.similarity.loss(embedded), matched)

    def predictions(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The logits behind the first term, which proofs look at."""
        return super().predictions(model, batch)

    @no_grad
    def check(self, model: Any, batch: Batch, *, packed: bool, compute: torch.dtype) -> list[str]:
        """Also, the embeddings of reasoning and answer do not depend on the conversation before them."""
        import torch

        from fullshard.dist.reduce import gather_objects

        lines = super().check(model, batch, packed=packed, compute=compute)
        ids, places = batch["input_ids"], torch.arange(batch["input_ids"].shape[1], device=batch["input_ids"].device)
        other = torch.where(places < batch["spans"][:, :1], ids.roll(1, 1), ids)
        model.eval()
        with torch.compiler.set_stance("force_eager"):
            one, two = (self._both(model, {**batch, "input_ids": each})[1] for each in (ids, other))
        apart = max(gather_objects(float((one - two).norm(dim=-1).max() / one.norm(dim=-1).max().clamp(min=1e-6))))
        if not apart <= TOLERANCE[str(compute).removeprefix("torch.")]:
            raise SetupError(
                f"Another question moves the embeddings of reasoning and answer by {apart:.1e}: the model's attention "
                "does not keep the documents of a row apart. Use model.attention: sdpa, or another model."
            )
        return [*lines, f"reasoning and answer are compared without their question ({apart:.1e})"]

    def derived(self, numbers: dict[str, float]) -> dict[str, float]:
        return {"perplexity": math.exp(min(numbers["cross_entropy"], 80.0))}

    def backward(
        self,
        model: nn.Module,
        batches: Iterable[Batch],
        total: torch.Tensor,
        aux: dict[str, nn.Module],
        scale: Callable[[torch.Tensor], torch.Tensor],
    ) -> list[Terms]:
        import torch

        from fullshard.dist.gradients import one_by_one

        every = list(batches)
        if len(every) == 1:
            return super().backward(model, every, total, aux, scale)
        leaf = self._all_vectors(model, every).requires_grad_()
        contrastive = self.similarity.loss(_embedded(every, leaf))
        scale(self._terms(Terms(contrastive.new_zeros(())), contrastive, {}).over(total)).backward()
        assert leaf.grad is not None
        found: list[Terms] = []
        begun = 0
        for batch in one_by_one(model, every):
            tokens, vectors = self._both(model, batch)
            gradient = leaf.grad[begun : begun + len(vectors)]
            begun += len(vectors)
            alone = self._terms(tokens, torch.zeros_like(contrastive), {})
            # The gradient of the second term is known: the surrogate hands it to the embeddings.
            (scale(alone.over(total)) + (vectors * gradient).sum()).backward()
            found.append(
                self._terms(tokens, contrastive if not found else torch.zeros_like(contrastive), {}).detached()
            )
        return found

    def _terms(self, tokens: Terms, contrastive: torch.Tensor, metrics: dict[str, Any]) -> Terms:
        named = {"cross_entropy": Term(tokens.loss_sum), "contrastive": Term(contrastive, self.contrast)}
        return Terms.several(named, {**tokens.metrics, **metrics})

    def _both(self, model: nn.Module, batch: Batch) -> tuple[Terms, torch.Tensor]:
        """The first term, and (samples, 2, width): the embeddings of reasoning and answer, from one forward pass."""
        kept: list[torch.Tensor] = []
        tokens = super().loss(_Watched(model, lambda hidden: kept.append(_pooled(hidden, batch["spans"]))), batch, {})  # type: ignore[arg-type]
        return tokens, kept[0]

    def _all_vectors(self, model: nn.Module, batches: Sequence[Batch]) -> torch.Tensor:
        """The embeddings of all micro-batches; dropout draws the same numbers again in the second pass."""
        import torch

        device = batches[0]["input_ids"].device
        with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            return torch.cat([self._both(model, batch)[1] for batch in batches])


class _Watched:
    """A model that shows its hidden states to `look` on their way to the loss."""

    def __init__(self, model: Any, look: Callable[[torch.Tensor], None]) -> None:
        self._model, self._look = model, look

    def hidden_states_and_head(self, reduce: Any, **inputs: Any) -> Any:
        def seen(hidden: torch.Tensor, head: Any) -> Any:
            self._look(hidden)
            return reduce(hidden, head)

        return self._model.hidden_states_and_head(seen, **inputs)


def _pooled(hidden: torch.Tensor, spans: torch.Tensor) -> torch.Tensor:
    """(samples, 2, width): the mean hidden state of the reasoning alone and of the answer alone."""
    import torch

    places = torch.arange(hidden.shape[1], device=hidden.device)
    begins, ends = spans[:, 0::2, None], spans[:, 1::2, None]
    inside = ((places >= begins) & (places < ends)).float()
    return torch.bmm(inside, hidden.float()) / inside.sum(-1, keepdim=True).clamp(min=1)


def _embedded(batches: Sequence[Batch], vectors: torch.Tensor) -> Embedded:
    """The embeddings of the step over all ranks, in the same order on each."""
    import torch

    from fullshard.dist import reduce
    from fullshard.dist.gather import gather_rows

    device, size = vectors.device, len(vectors)
    real = torch.cat([batch["sample_ids"] >= 0 for batch in batches]).to(device)
    keys = gather_rows(torch.cat([batch["keys"] for batch in batches]).to(device))
    every = gather_rows(vectors)
    rank = reduce.place()[1]
    return Embedded(
        queries=every[:, 0],
        positives=every[:, 1],
        negatives=every.new_zeros((len(every), 0, every.shape[-1])),
        has_negative=torch.zeros((len(every), 0), dtype=torch.bool, device=device),
        real=gather_rows(real.to(torch.uint8)).bool(),
        own=slice(rank * size, (rank + 1) * size),
        labels=torch.full((len(every),), math.nan, dtype=torch.float64, device=device),
        query_keys=keys[:, 0],
        positive_keys=keys[:, 1],
        negative_keys=torch.zeros((len(every), 0), dtype=torch.int64, device=device),
    )


def _matched(embedded: Embedded) -> tuple[torch.Tensor, torch.Tensor]:
    """How many of this rank's reasonings are closest to their own answer, and how many there are."""
    import torch.nn.functional as F

    queries, answers = (F.normalize(each, dim=-1) for each in (embedded.queries, embedded.positives))
    scores = (queries[embedded.own] @ answers.T).masked_fill(~embedded.real, -2.0)
    keys = embedded.positive_keys
    right = (keys[scores.argmax(-1)] == keys[embedded.own]) & embedded.real[embedded.own]
    return right.sum(), embedded.real[embedded.own].sum()


__all__ = ["Reasoning"]
