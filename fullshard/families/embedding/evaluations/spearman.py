"""Spearman's rank correlation of similarities with the labels of held-out pairs.

Must not know the loss or how the model was trained.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from fullshard.contracts.evaluation import Evaluation, EvaluationInputs, Findings
from fullshard.contracts.objective import Numbers, Objective
from fullshard.errors import DataError, missing_package
from fullshard.families.embedding.evaluations.retrieval import HeldOut, embed_all, require_embeddings

if TYPE_CHECKING:
    from torch import nn


class Spearman(Evaluation):
    """Compares the order of cosines with the order of labels."""

    numbers: ClassVar[Numbers | None] = {"spearman": "max"}
    needs_held_out: ClassVar[bool] = True

    def check(self, objective: Objective, model: nn.Module, held_out: Any) -> None:
        require_embeddings(self, objective)
        if importlib.util.find_spec("scipy") is None:
            raise missing_package("scipy", extra="embedding", needed_by="evaluate: spearman")
        if held_out is None:
            return
        labels = held_out.store.flat("label")[held_out.chosen]
        missing = held_out.chosen[np.isnan(labels)]
        if missing.size:
            place = held_out.records.where(int(held_out.store.records[missing[0]]))
            raise DataError(
                f"{place}: evaluate: spearman needs a label in every validation record, but {missing.size:,} of "
                f"{len(labels):,} have no label. Name its column in data.encode.column_mapping, or leave spearman out."
            )

    def run(self, inputs: EvaluationInputs) -> Findings:
        import torch
        import torch.nn.functional as F
        from scipy.stats import spearmanr

        if inputs.num_batches == 0:
            return Findings()
        held = embed_all(inputs)
        first = _first_of_equals(held.keys, held.owners)
        places = [_places(held, kind) for kind in (0, 1)]
        queries, positives = (
            F.normalize(held.vectors[torch.from_numpy(first[some]).to(held.vectors.device)], dim=-1) for some in places
        )
        labels = held.labels[places[0]]
        cosines = (queries * positives).sum(-1).cpu().numpy()
        return Findings({"spearman": float(spearmanr(cosines, labels).statistic)})


def _first_of_equals(keys: np.ndarray, owners: np.ndarray) -> np.ndarray:
    """For each text, the index of the first equal text. Embeddings of equal texts from other batches differ by
    rounding, which would break ties of equal pairs at random."""
    order = np.argsort(owners, kind="stable")
    _, first, which = np.unique(keys[order], return_index=True, return_inverse=True)
    places = np.empty_like(order)
    places[order] = order[first][which]
    return places


def _places(held: HeldOut, kind: int) -> np.ndarray:
    """Texts of a kind, in the order of their samples."""
    found = np.flatnonzero(held.kinds == kind)
    return np.asarray(found[np.argsort(held.owners[found], kind="stable")])


__all__ = ["Spearman"]
