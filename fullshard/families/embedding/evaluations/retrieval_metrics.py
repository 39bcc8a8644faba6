"""Recall, reciprocal rank and nDCG from the ranks of relevant documents. Must not know scores or processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def quality_sums(
    place: torch.Tensor, query: torch.Tensor, gain: torch.Tensor, num_queries: int, at: Sequence[int]
) -> torch.Tensor:
    """Sums over some queries: recall at each depth, reciprocal rank and nDCG at the largest, and their number.

    One entry per query and relevant document, in the order of the queries: the document's place in the list (from 0),
    the query's number and the document's gain. Gains are used directly, as in trec_eval; every query has at least one
    document."""
    import torch

    device, furthest = place.device, max(at)
    place, gain = place.double(), gain.double()

    def per_query(values: torch.Tensor, of: torch.Tensor = query) -> torch.Tensor:
        return torch.zeros(num_queries, dtype=torch.float64, device=device).index_add(0, of, values.double())

    counts = per_query(torch.ones_like(place))
    recall = [(per_query(place < k) / counts).sum() for k in at]
    best = torch.full((num_queries,), torch.inf, dtype=torch.float64, device=device)
    best = best.scatter_reduce(0, query, place, "amin")
    reciprocal = torch.where(best < furthest, 1 / (best + 1), 0.0).sum()
    found = per_query(torch.where(place < furthest, gain / torch.log2(place + 2), 0.0))
    # The ideal list has the largest gains first.
    order = torch.argsort(gain, descending=True, stable=True)
    order = order[torch.argsort(query[order], stable=True)]
    first = counts.cumsum(0) - counts
    within = torch.arange(len(place), device=device) - first[query[order]]
    ideal = per_query(gain[order] / torch.log2(within + 2) * (within < furthest), query[order])
    return torch.stack([*recall, reciprocal, (found / ideal).sum(), torch.ones_like(best).sum()])
