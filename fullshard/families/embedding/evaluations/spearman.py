"""How well similarities follow the labels of held-out pairs: Spearman's rank correlation.

Must not know the loss or how the model was trained.
"""

from __future__ import annotations

import importlib.util
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fullshard.contracts.evaluation import Evaluation, EvaluationInputs, Findings
from fullshard.contracts.objective import Numbers, Objective
from fullshard.dist import reduce
from fullshard.errors import DataError, missing_package
from fullshard.families.embedding.evaluations.retrieval import embed_all, require_embeddings


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
                f"{place}: evaluate: spearman needs a label in every validation record, and {missing.size:,} of "
                f"{len(labels):,} have none. Name its column in data.encode.column_mapping, or leave spearman out."
            )

    def run(self, inputs: EvaluationInputs) -> Findings:
        from scipy.stats import spearmanr

        if inputs.num_batches == 0:
            return Findings()
        vectors, keys, kinds, owners = embed_all(inputs)
        labels = self._labels(inputs)
        first = _first_of_equals(keys, owners)
        queries, positives = (
            F.normalize(vectors[torch.from_numpy(first[_places(kinds, owners, kind)]).to(vectors.device)], dim=-1)
            for kind in (0, 1)
        )
        cosines = (queries * positives).sum(-1).cpu().numpy()
        return Findings({"spearman": float(spearmanr(cosines, labels).statistic)})

    def _labels(self, inputs: EvaluationInputs) -> np.ndarray:
        """In the order of the samples."""
        batches = [(batch["sample_ids"], batch["label"]) for batch in inputs.batches()]
        ids, values = (torch.cat(each).double() for each in zip(*batches, strict=True))
        mine = torch.stack([ids, values], dim=1)[ids >= 0].to(inputs.device)
        table = reduce.gather_uneven(mine).cpu().numpy()
        return np.asarray(table[np.argsort(table[:, 0]), 1])


def _first_of_equals(keys: np.ndarray, owners: np.ndarray) -> np.ndarray:
    """For each text, where the first of its equals stands. Equal texts in batches of other lengths differ by rounding,
    which would break the tie of equal pairs at random."""
    order = np.argsort(owners, kind="stable")
    _, first, which = np.unique(keys[order], return_index=True, return_inverse=True)
    places = np.empty_like(order)
    places[order] = order[first][which]
    return places


def _places(kinds: np.ndarray, owners: np.ndarray, kind: int) -> np.ndarray:
    found = np.flatnonzero(kinds == kind)
    return np.asarray(found[np.argsort(owners[found], kind="stable")])


__all__ = ["Spearman"]
