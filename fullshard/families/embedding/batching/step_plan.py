"""What all ranks share in one step: the number of chunks, and the padded number of negatives and tokens.

Must not know losses or models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fullshard.contracts.objective import Batch
from fullshard.dist import reduce
from fullshard.dist.upload import upload
from fullshard.families.embedding.batching.chunks import Chunk, Texts, cut, fill_up, have_images, on_device, see
from fullshard.families.embedding.batching.row_layout import lay_out


@dataclass(frozen=True)
class StepPlan:
    """The work of one step on this rank."""

    texts: Texts
    chunks: list[Chunk]
    negatives: int
    """The largest number of negatives of a sample, over all ranks."""
    longest: int
    """Tokens of the longest text, over all ranks."""

    @staticmethod
    def of(batches: Sequence[Batch], *, size: int | None, tokens: int | None) -> StepPlan:
        """`size` and `tokens` limit a chunk; without either, a chunk is a micro-batch. Every rank must call this."""
        texts = Texts.of(batches)
        chunks = cut(texts, size=size, tokens=tokens)
        mine = [len(chunks), int(texts.per_sample.max()) - 2, int(texts.lengths.max())]
        count, negatives, longest = reduce.max_over_ranks(mine, texts.device)
        chunks = fill_up(chunks, count)
        if texts.images is not None:
            seen = reduce.max_over_ranks([int(has) for has in have_images(texts, chunks)], texts.device)
            chunks = see(chunks, [bool(has) for has in seen])
        return StepPlan(texts, chunks, negatives, longest)

    def inverse(self) -> torch.Tensor:
        """The index of each text's embedding among those of the concatenated chunks."""
        order = np.concatenate([chunk.texts for chunk in self.chunks if not chunk.filler])
        return on_device(np.argsort(order), self.texts.device)

    def padding(self, *, packed: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions without a token, and all positions that were computed."""
        layouts = [lay_out(self.texts.lengths[c.texts], packed=packed and not c.sees) for c in self.chunks]
        numbers = [sum(layout.padding for layout in layouts), sum(layout.source.size for layout in layouts)]
        padding, places = upload(torch.tensor(numbers, dtype=torch.float64), self.texts.device)
        return padding, places
