"""How texts of different lengths fill rows of one length: one text per row, or packed so that little is padding.

Works on lengths only, on the host. Must not know tokens, models or ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fullshard.data.pack import best_fit

PADDING = -1


@dataclass(frozen=True)
class Layout:
    """Rows for texts whose tokens are concatenated."""

    source: np.ndarray
    """(rows, length): the index of the token at each position, or PADDING."""
    positions: np.ndarray
    """(rows, length): position within the text; padding counts as a separate text."""
    places: np.ndarray
    """(tokens): the index of each token in the flattened rows, text by text."""
    lengths: np.ndarray
    """(texts): tokens of each."""

    @property
    def padding(self) -> int:
        """Positions without a token."""
        return self.source.size - len(self.places)


def lay_out(lengths: np.ndarray, *, packed: bool) -> Layout:
    """One row per text, or several whole texts per row; rows are as long as the longest text."""
    longest = int(lengths.max())
    rows = best_fit(lengths, length=longest) if packed else np.arange(len(lengths))
    before = np.zeros(len(lengths), dtype=np.int64)
    used = np.zeros(int(rows.max()) + 1, dtype=np.int64)
    for text, row in enumerate(rows):
        before[text] = used[row]
        used[row] += lengths[text]
    starts = np.cumsum(lengths) - lengths
    within = np.arange(int(lengths.sum())) - np.repeat(starts, lengths)
    places = np.repeat(rows * longest + before, lengths) + within
    source = np.full(len(used) * longest, PADDING, dtype=np.int64)
    source[places] = np.arange(len(places))
    positions = np.arange(longest)[None] - used[:, None]
    positions = np.where(positions >= 0, positions, 0).reshape(-1)
    positions[places] = within
    shape = (len(used), longest)
    return Layout(source.reshape(shape), positions.reshape(shape), places, lengths)
