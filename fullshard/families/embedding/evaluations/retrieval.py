"""How well held-out queries find their positives among all held-out documents: exact recall, MRR and nDCG.

The corpus is every positive and negative of the validation data, each text once. Each rank embeds its share of the
data and scores its share of the queries. Must not know the loss or how the model was trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import Field

from fullshard.contracts.evaluation import Evaluation, EvaluationInputs, Findings
from fullshard.contracts.no_grad import no_grad
from fullshard.contracts.objective import Numbers, Objective
from fullshard.errors import RecipeError
from fullshard.families.embedding.evaluations.retrieval_metrics import quality_sums

if TYPE_CHECKING:
    import torch
    from torch import nn

BLOCK = 2**24
"""Scores in memory at once."""


class Retrieval(Evaluation):
    """Searches the held-out texts with the held-out queries."""

    at: list[int] = Field([1, 10], min_length=1)
    """Depths k of recall@k; MRR and nDCG use the largest."""
    dims: list[int] | None = None
    """Prefixes of the embeddings to evaluate; null: the full width, and the dims of objective.matryoshka."""

    needs_held_out: ClassVar[bool] = True

    def gives(self, objective: Objective, model: nn.Module) -> Numbers | None:
        width = getattr(model, "embedding_width", None)
        if width is None:  # `check` raises
            return None
        suffixes = [self._suffix(dim, width) for dim in self._dims(objective, width)]
        return {name: "max" for suffix in suffixes for name in self._names(suffix)}

    def check(self, objective: Objective, model: nn.Module, held_out: Any) -> None:
        require_embeddings(self, objective)
        bound: Any = model
        self._dims(objective, bound.embedding_width)

    def run(self, inputs: EvaluationInputs) -> Findings:
        if inputs.num_batches == 0:
            return Findings()
        held = collect(inputs)
        numbers: dict[str, float] = {}
        width = held.queries.shape[-1]
        for dim in self._dims(inputs.objective, width):
            found = self._score(held, dim, inputs)
            numbers |= dict(zip(self._names(self._suffix(dim, width)), found, strict=True))
        return Findings(numbers)

    def _suffix(self, dim: int, width: int) -> str:
        return "" if dim == width else f"/{dim}"

    def _names(self, suffix: str) -> list[str]:
        furthest = max(self.at)
        return [*(f"recall@{k}{suffix}" for k in self.at), f"mrr@{furthest}{suffix}", f"ndcg@{furthest}{suffix}"]

    def _dims(self, objective: Any, width: int) -> list[int]:
        matryoshka = getattr(objective, "matryoshka", None)
        dims = self.dims or [dim for dim, _ in (matryoshka.of(width) if matryoshka else [])]
        if wrong := [dim for dim in dims if not 1 <= dim <= width]:
            raise RecipeError(
                f"evaluate: retrieval.dims has {wrong[0]}, but the model's embeddings have {width} dimensions. Each "
                f"must be from 1 to {width}."
            )
        return sorted({*dims, width}, reverse=True)

    @no_grad
    def _score(self, held: SearchTexts, dim: int, inputs: EvaluationInputs) -> list[float]:
        """Averages over all queries; each rank scores some of them."""
        import torch
        import torch.nn.functional as F

        from fullshard.dist import reduce

        ranks, rank = reduce.place()
        queries = F.normalize(held.queries[rank::ranks, :dim], dim=-1)
        documents = F.normalize(held.documents[:, :dim], dim=-1)
        relevant = held.relevant[rank::ranks]
        sums = torch.zeros(len(self.at) + 3, dtype=torch.float64, device=inputs.device)
        step = max(BLOCK // max(len(documents), 1), 1)
        for start in range(0, len(queries), step):
            sums += self._of_some(queries[start : start + step] @ documents.T, relevant[start : start + step])
        *found, count = inputs.sum_over_ranks(sums).tolist()
        return [number / max(count, 1.0) for number in found]

    def _of_some(self, scores: torch.Tensor, relevant: list[np.ndarray]) -> torch.Tensor:
        """Sums over some queries: recall at each depth, reciprocal rank, nDCG, and the number of queries. Equal scores
        rank in the order of the corpus."""
        import torch

        device = scores.device
        counts = torch.tensor([len(each) for each in relevant], device=device)
        query = torch.arange(len(relevant), device=device).repeat_interleave(counts)
        document = torch.from_numpy(np.concatenate(relevant)).to(device)
        own, others = scores[query, document][:, None], scores[query]
        before = torch.arange(scores.shape[1], device=device) < document[:, None]
        place = ((others > own) | ((others == own) & before)).sum(-1).double()
        return quality_sums(place, query, torch.ones_like(place), len(relevant), self.at)


def require_embeddings(evaluation: Evaluation, objective: Objective) -> None:
    """Raises RecipeError unless the objective trains one vector per text."""
    if not hasattr(objective, "embeddings"):
        raise RecipeError(
            f"evaluate: {evaluation.kind()} needs an objective that gives embeddings, not objective.kind = "
            f"{objective.kind()}. Leave it out, or use objective.kind: contrastive."
        )
    loss: Any = getattr(objective, "similarity", None)
    if getattr(loss, "tokens", False):
        raise RecipeError(
            f"evaluate: {evaluation.kind()} compares one vector per text, but objective.loss = {loss.kind()} "
            "trains one per token. Leave it out, and evaluate the loss: evaluate.parts: [loss]."
        )


@dataclass(frozen=True)
class SearchTexts:
    """Queries and documents without duplicates, the same on every rank."""

    queries: torch.Tensor
    documents: torch.Tensor
    relevant: list[np.ndarray]
    """The relevant documents of each query."""


def collect(inputs: EvaluationInputs) -> SearchTexts:
    """Embeds this rank's share of the validation data and gathers all shares."""
    import torch

    held = embed_all(inputs)
    vectors, keys, kinds, owners = held.vectors, held.keys, held.kinds, held.owners
    first = {int(key): index for index, key in reversed(list(enumerate(keys[kinds > 0].tolist())))}
    names = sorted(first)
    place = {key: index for index, key in enumerate(names)}
    documents = vectors[torch.from_numpy(kinds > 0).to(vectors.device)][[first[name] for name in names]]
    own = {int(owner): place[int(key)] for owner, key, kind in zip(owners, keys, kinds, strict=True) if kind == 1}
    wanted: dict[int, list[int]] = {}
    where: dict[int, int] = {}
    for index in np.flatnonzero(kinds == 0):
        wanted.setdefault(int(keys[index]), []).append(own[int(owners[index])])
        where.setdefault(int(keys[index]), int(index))
    order = sorted(wanted)
    return SearchTexts(vectors[[where[key] for key in order]], documents, [np.unique(wanted[key]) for key in order])


@dataclass(frozen=True)
class HeldOut:
    """Every text of the validation data, over all ranks; one entry per text."""

    vectors: torch.Tensor
    keys: np.ndarray
    kinds: np.ndarray
    """0 query, 1 positive, 2 negative."""
    owners: np.ndarray
    """The sample that the text belongs to."""
    labels: np.ndarray
    """The label of that sample."""


def embed_all(inputs: EvaluationInputs) -> HeldOut:
    """One pass over the validation data, on all ranks together."""
    import torch

    from fullshard.dist.gather import gather_uneven
    from fullshard.dist.upload import to_device

    objective: Any = inputs.objective
    found: list[torch.Tensor] = []
    facts: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    with inputs.bar(inputs.num_batches) as bar:
        for batch in inputs.batches():
            texts, vectors = objective.embeddings(inputs.model, to_device(batch, inputs.device))
            number = np.concatenate([np.arange(count) for count in texts.per_sample])
            owner = np.repeat(batch["sample_ids"].cpu().numpy(), texts.per_sample)
            kept = np.flatnonzero(owner >= 0)
            found.append(vectors[torch.from_numpy(kept).to(vectors.device)])
            facts.append(np.stack([texts.keys.cpu().numpy(), np.minimum(number, 2), owner])[:, kept])
            labels.append(np.repeat(texts.labels.double().cpu().numpy(), texts.per_sample)[kept])
            bar.advance()
    mine = torch.from_numpy(np.concatenate(facts, axis=1).T.copy()).to(inputs.device)
    keys, kinds, owners = gather_uneven(mine).cpu().numpy().T
    own_labels = torch.from_numpy(np.concatenate(labels)).to(inputs.device)
    all_labels = gather_uneven(own_labels).cpu().numpy()
    return HeldOut(gather_uneven(torch.cat(found)), keys, kinds, owners, all_labels)


__all__ = ["Retrieval"]
