"""How well queries find their documents in a separate corpus: exact recall, MRR and graded nDCG.

Ranks share the corpus: each embeds its part, once per evaluation, and keeps it; every query is compared with all parts.
Must not know the loss or how the model was trained.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field, PrivateAttr

from fullshard.contracts.data import Source
from fullshard.contracts.evaluation import Evaluation, EvaluationInputs, Findings
from fullshard.contracts.no_grad import no_grad
from fullshard.contracts.objective import Numbers, Objective
from fullshard.errors import RecipeError
from fullshard.families.embedding.encoders.pairs import Pairs
from fullshard.families.embedding.evaluations.retrieval import BLOCK, Retrieval, require_embeddings
from fullshard.families.embedding.evaluations.retrieval_metrics import quality_sums
from fullshard.families.embedding.relevance_files import Judgements, read_judgements

if TYPE_CHECKING:
    import torch
    from torch import nn

logger = logging.getLogger(__name__)


class Search(Evaluation):
    """Searches a corpus with queries whose relevant documents are known."""

    corpus: Source
    """Documents with an id (_id), a text and perhaps a title: BEIR's corpus.jsonl, or any file of records."""
    queries: Source
    """Queries with an id and a text: BEIR's queries.jsonl, or any file of records."""
    qrels: str
    """Which documents answer which query, and how well: BEIR's qrels/test.tsv (query-id, corpus-id, score), TREC's four
    columns, or a .csv, .jsonl or .parquet with these columns. A score of 0 or less means: not relevant."""
    name: str = Field("search", min_length=1, pattern=r"^[\w.-]+$")
    """The prefix of its metrics: search/recall@10."""
    at: list[int] = Field([1, 10, 100], min_length=1)
    """Depths k of recall@k."""
    ndcg_at: int = Field(10, ge=1)
    """The depth of MRR and nDCG."""
    dims: list[int] | None = None
    """Prefixes of the embeddings to evaluate; null: the full width, and the dims of objective.matryoshka."""
    batch_size: int = Field(32, ge=1)
    """Texts that each rank embeds at once."""

    _judged: Judgements | None = PrivateAttr(None)

    def gives(self, objective: Objective, model: nn.Module) -> Numbers | None:
        width = getattr(model, "embedding_width", None)
        if width is None:  # `check` raises
            return None
        return {name: "max" for dim in self._dims(objective, width) for name in self._names(dim, width)}

    def check(self, objective: Objective, model: nn.Module, held_out: Any) -> None:
        require_embeddings(self, objective)
        bound: Any = model
        self._dims(objective, bound.embedding_width)
        self._read()

    def check_encoder(self, objective: Objective, model: nn.Module, encoder: Any) -> None:
        if not isinstance(encoder, Pairs):
            raise RecipeError(
                f"evaluate: search embeds single texts, which data.encode = {encoder.kind()} cannot encode. "
                "Use data.encode: pairs."
            )

    def run(self, inputs: EvaluationInputs) -> Findings:
        import torch

        from fullshard.dist import reduce
        from fullshard.dist.gather import gather_uneven

        judged = self._read()
        turns = sum(self._num_batches(len(texts)) for texts in (judged.queries, judged.documents))
        with inputs.bar(turns) as bar:
            # Queries are few, and every rank needs all of them.
            queries = self._embed(judged.queries, "query", inputs, bar)
            documents = self._embed(judged.documents, "document", inputs, bar)
        ranks, _ = reduce.place()
        gathered = gather_uneven(queries)
        order = np.concatenate([np.arange(rank, len(judged.queries), ranks) for rank in range(ranks)])
        queries = gathered[torch.from_numpy(np.argsort(order)).to(gathered.device)]
        numbers: dict[str, float] = {}
        for dim in self._dims(inputs.objective, queries.shape[-1]):
            found = self._score(judged, queries[:, :dim], documents[:, :dim], inputs)
            numbers |= dict(zip(self._names(dim, queries.shape[-1]), found, strict=True))
        return Findings(numbers)

    def _read(self) -> Judgements:
        if self._judged is None:
            self._judged = read_judgements(self.corpus, self.queries, self.qrels)
            for note in self._judged.notes:
                logger.warning("evaluate: %s: %s", self.name, note)
        return self._judged

    def _names(self, dim: int, width: int) -> list[str]:
        suffix = "" if dim == width else f"/{dim}"
        names = [*(f"recall@{k}" for k in self.at), f"mrr@{self.ndcg_at}", f"ndcg@{self.ndcg_at}"]
        return [f"{self.name}/{name}{suffix}" for name in names]

    def _dims(self, objective: Any, width: int) -> list[int]:
        return Retrieval(dims=self.dims)._dims(objective, width)

    def _num_batches(self, texts: int) -> int:
        from fullshard.dist import reduce

        ranks, _ = reduce.place()
        return -(-texts // (ranks * self.batch_size))

    @no_grad
    def _embed(self, texts: Sequence[str], side: str, inputs: EvaluationInputs, bar: Any) -> torch.Tensor:
        """(texts of this rank, width): ranks take texts in turn, and all run the same number of batches."""
        import torch

        from fullshard.dist import reduce
        from fullshard.dist.upload import to_device

        ranks, rank = reduce.place()
        objective: Any = inputs.objective
        mine, found = texts[rank::ranks], []
        for turn in range(self._num_batches(len(texts))):
            some = mine[turn * self.batch_size :][: self.batch_size]
            # A rank without texts left embeds one again, and its result is ignored.
            samples = inputs.encoder.single_texts(some or texts[:1], side)
            batch = inputs.collator.collate(samples, length=None)
            batch["sample_ids"] = torch.arange(len(samples))
            _, vectors = objective.embeddings(inputs.model, to_device(batch, inputs.device))
            found.append(vectors[: len(some)].float())
            bar.advance()
        return torch.cat(found)

    @no_grad
    def _score(
        self, judged: Judgements, queries: torch.Tensor, documents: torch.Tensor, inputs: EvaluationInputs
    ) -> list[float]:
        """The averages over all queries; some queries at a time, each compared with the documents of every rank."""
        import torch
        import torch.nn.functional as F

        from fullshard.dist import reduce

        queries, documents = F.normalize(queries, dim=-1), F.normalize(documents, dim=-1)
        ranks, _ = reduce.place()
        step = max(BLOCK // -(-len(judged.documents) // ranks), 1)
        sums = torch.zeros(len(self.at) + 1, dtype=torch.float64, device=inputs.device)
        graded = torch.zeros(4, dtype=torch.float64, device=inputs.device)
        for start in range(0, len(queries), step):
            relevant, gains = judged.relevant[start : start + step], judged.gains[start : start + step]
            query = torch.from_numpy(np.repeat(np.arange(len(relevant)), [len(each) for each in relevant]))
            query, gain = query.to(inputs.device), torch.from_numpy(np.concatenate(gains)).to(inputs.device)
            wanted = torch.from_numpy(np.concatenate(relevant)).to(inputs.device)
            scores = queries[start : start + step] @ documents.T
            place = self._places(scores, query, wanted, step, inputs)
            sums += quality_sums(place, query, gain, len(relevant), self.at)[[*range(len(self.at)), -1]]
            graded += quality_sums(place, query, gain, len(relevant), [self.ndcg_at])
        # Every rank has counted the same places.
        count = float(sums[-1])
        return [number / count for number in [*sums[:-1].tolist(), *graded[1:3].tolist()]]

    def _places(
        self, scores: torch.Tensor, query: torch.Tensor, wanted: torch.Tensor, step: int, inputs: EvaluationInputs
    ) -> torch.Tensor:
        """The place of each relevant document in the list of its query, over the documents of all ranks. Equal scores
        are in the order of the corpus."""
        import torch

        from fullshard.dist import reduce

        ranks, rank = reduce.place()
        here = wanted % ranks == rank
        own = torch.zeros(len(wanted), dtype=scores.dtype, device=scores.device)
        own[here] = scores[query[here], wanted[here] // ranks]
        own = inputs.sum_over_ranks(own)
        numbers = torch.arange(scores.shape[1], device=scores.device) * ranks + rank
        before = torch.zeros(len(wanted), dtype=torch.int64, device=scores.device)
        for some in torch.arange(len(wanted), device=scores.device).split(step):
            others, mine = scores[query[some]], own[some][:, None]
            earlier = (others == mine) & (numbers < wanted[some][:, None])
            before[some] = ((others > mine) | earlier).sum(-1)
        return inputs.sum_over_ranks(before)


__all__ = ["Search"]
