"""How well similarities follow the labels of held-out pairs: Spearman's rank correlation.

Must not know the loss or how the model was trained.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from fullshard.dist import reduce
from fullshard.errors import DataError
from fullshard.evaluate.base import Evaluation, EvaluationInputs, Findings
from fullshard.evaluate.retrieval import embed_all
from fullshard.objectives.base import Objective


class Spearman(Evaluation):
    """Compares the order of cosines with the order of labels."""

    def gives(self, objective: Objective) -> tuple[str, ...] | None:
        return ("spearman",)

    def run(self, inputs: EvaluationInputs) -> Findings:
        from scipy.stats import spearmanr

        if inputs.num_batches == 0:
            return Findings()
        vectors, _, kinds, owners = embed_all(inputs)
        labels = self._labels(inputs)
        queries, positives = (
            F.normalize(vectors[torch.from_numpy(_places(kinds, owners, kind)).to(vectors.device)], dim=-1)
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
        found = table[np.argsort(table[:, 0]), 1]
        if np.isnan(found).any():
            raise DataError(
                f"evaluate: spearman needs a label in every validation record, and {int(np.isnan(found).sum()):,} of "
                f"{len(found):,} have none."
            )
        return np.asarray(found)


def _places(kinds: np.ndarray, owners: np.ndarray, kind: int) -> np.ndarray:
    found = np.flatnonzero(kinds == kind)
    return np.asarray(found[np.argsort(owners[found], kind="stable")])


__all__ = ["Spearman"]
