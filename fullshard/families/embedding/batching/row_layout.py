"""How texts of different lengths become rows of one length: padded, or several to a row so that little is padding.

Works on lengths alone, on the host. Must not know tokens, models or ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fullshard.data.best_fit import best_fit

PADDING = -1


@dataclass(frozen=True)
class Layout:
    """Rows for some texts, whose tokens lie one after the other."""

    source: np.ndarray
    """(rows, length): which token stands where; PADDING where none does."""
    positions: np.ndarray
    """(rows, length): places within a text; padding counts as a text of its own."""
    places: np.ndarray
    """(tokens): where the tokens stand in the rows laid end to end, text by text."""
    lengths: np.ndarray
    """(texts): tokens of each."""

    @property
    def padding(self) -> int:
        """Places without a token."""
        return self.source.size - len(self.places)


def lay_out(lengths: np.ndarray, *, packed: bool) -> Layout:
    """One row for each text, or whole texts side by side, in rows as long as the longest."""
    longest = int(lengths.max())
    rows = best_fit(lengths, length=longest) if packed else np.arange(len(lengths))
    before = np.zeros(len(lengths), dtype=np.int64)
    room = np.zeros(int(rows.max()) + 1, dtype=np.int64)
    for text, row in enumerate(rows):
        before[text] = room[row]
        room[row] += lengths[text]
    starts = np.cumsum(lengths) - lengths
    within = np.arange(int(lengths.sum())) - np.repeat(starts, lengths)
    places = np.repeat(rows * longest + before, lengths) + within
    source = np.full(len(room) * longest, PADDING, dtype=np.int64)
    source[places] = np.arange(len(places))
    positions = np.arange(longest)[None] - room[:, None]
    positions = np.where(positions >= 0, positions, 0).reshape(-1)
    positions[places] = within
    shape = (len(room), longest)
    return Layout(source.reshape(shape), positions.reshape(shape), places, lengths)
