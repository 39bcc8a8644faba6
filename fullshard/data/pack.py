"""Packing: which samples share a row. Computed once from the lengths, with the same result on every rank.

Running text is concatenated and cut into full rows; other samples stay whole and are placed by best fit. Positions
restart at 0 with every document in a row. Must not know what tokens mean, files or ranks.
"""

from __future__ import annotations

import bisect
from collections import defaultdict

import numpy as np

from fullshard.contracts.data import Features
from fullshard.data.store import Store


class Samples:
    """Samples of a store, arranged in rows for micro-batches: one or several in each."""

    fixed_length: int | None = None
    """The length that all rows are padded to; None: the longest row of each micro-batch."""

    def __init__(self, store: Store, chosen: np.ndarray) -> None:
        self._store, self._chosen = store, chosen
        self.num_tokens = int(store.lengths[chosen].sum())
        """Real tokens over all rows."""

    @property
    def lengths(self) -> np.ndarray:
        """Real tokens of each row."""
        return self.per_row(self._store.lengths).astype(np.int64)

    def entries(self, feature: str) -> np.ndarray:
        """The number of entries of a feature in each row."""
        return self.per_row(self._store.sizes(feature))

    def per_row(self, amounts: np.ndarray) -> np.ndarray:
        """How much of a quantity each row holds, given how much each stored sample holds."""
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> Features:
        raise NotImplementedError


class Plain(Samples):
    """Samples as stored, one in each row."""

    def __len__(self) -> int:
        return len(self._chosen)

    def per_row(self, amounts: np.ndarray) -> np.ndarray:
        return np.asarray(amounts[self._chosen])

    def __getitem__(self, index: int) -> Features:
        features = self._store[int(self._chosen[index])]
        if "input_ids" in features:
            features["position_ids"] = np.arange(len(features["input_ids"]), dtype=np.int32)
        return features


class Wrapped(Samples):
    """Documents concatenated in order and cut into rows of `length`; only the last row may be shorter.

    A document that is cut continues in the next row with positions from 0. Its last label before the cut is the true
    next token, so every token is read once and predicted once.
    """

    def __init__(self, store: Store, chosen: np.ndarray, *, length: int) -> None:
        super().__init__(store, chosen)
        self.fixed_length: int = length
        self._starts = np.concatenate([[0], np.cumsum(store.lengths[chosen])])

    def __len__(self) -> int:
        return -(-self.num_tokens // self.fixed_length)

    def per_row(self, amounts: np.ndarray) -> np.ndarray:
        # A document that is cut counts in each row with the share of its tokens there.
        total = np.concatenate([[0], np.cumsum(amounts[self._chosen])])
        ends = np.minimum(np.arange(len(self) + 1) * self.fixed_length, self.num_tokens)
        return np.diff(np.interp(ends, self._starts, total))

    def __getitem__(self, index: int) -> Features:
        if not 0 <= index < len(self):
            raise IndexError(index)
        begin = index * self.fixed_length
        end = min(begin + self.fixed_length, self.num_tokens)
        first = int(np.searchsorted(self._starts, begin, side="right")) - 1
        last = int(np.searchsorted(self._starts, end, side="left"))
        documents = zip(self._chosen[first:last], self._starts[first:last], self._starts[first + 1 :], strict=False)
        return row_of([self._store.slice(int(d), max(begin - at, 0), min(end, to) - at) for d, at, to in documents])


class Fitted(Samples):
    """Whole samples, several to a row of `length`, placed by best fit."""

    def __init__(self, store: Store, chosen: np.ndarray, *, length: int) -> None:
        super().__init__(store, chosen)
        self.fixed_length: int = length
        rows = self._rows = best_fit(store.lengths[chosen], length=length)
        # Stable: samples within a row keep the order of the source.
        order = np.argsort(rows, kind="stable")
        self._members = chosen[order]
        self._starts = np.searchsorted(rows[order], np.arange(int(rows.max()) + 2))

    def __len__(self) -> int:
        return len(self._starts) - 1

    def per_row(self, amounts: np.ndarray) -> np.ndarray:
        return np.bincount(self._rows, weights=amounts[self._chosen])

    def __getitem__(self, index: int) -> Features:
        if not 0 <= index < len(self):
            raise IndexError(index)
        members = self._members[self._starts[index] : self._starts[index + 1]]
        return row_of([self._store[int(member)] for member in members])


def row_of(pieces: list[Features]) -> Features:
    """Concatenated documents, each with positions from 0."""
    row = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
    row["position_ids"] = np.concatenate([np.arange(len(piece["input_ids"]), dtype=np.int32) for piece in pieces])
    return row


def best_fit(lengths: np.ndarray, *, length: int) -> np.ndarray:
    """The row of each sample by best-fit decreasing: longest first, each into the fullest row with enough space.

    Samples of equal length and rows with equal space are handled together, so the work grows with the number of
    different lengths. Rows are numbered by their first sample.
    """
    order = np.argsort(-lengths, kind="stable")
    sizes, first = np.unique(-lengths[order], return_index=True)
    ends = np.append(first[1:], len(order))
    room: defaultdict[int, list[np.ndarray]] = defaultdict(list)
    rooms: list[int] = []
    rows = np.empty(len(lengths), dtype=np.int64)
    num_rows = 0
    for size, begin, end in zip((-sizes).tolist(), first.tolist(), ends.tolist(), strict=True):
        at = begin
        while at < end:
            fit = bisect.bisect_left(rooms, size)
            free = rooms.pop(fit) if fit < len(rooms) else length
            each = free // size
            wanted = -(-(end - at) // each)
            if free in room:
                open_rows = np.concatenate(room.pop(free))
            else:
                open_rows = np.arange(num_rows, num_rows + wanted)
                num_rows += wanted
            used, rest = open_rows[:wanted], open_rows[wanted:]
            count = min(end - at, len(used) * each)
            rows[order[at : at + count]] = np.repeat(used, each)[:count]
            at += count
            # All used rows are filled equally, except the last.
            last = count - (len(used) - 1) * each
            for left, group in ((free, rest), (free - each * size, used[:-1]), (free - last * size, used[-1:])):
                if left and len(group):
                    if left not in room:
                        bisect.insort(rooms, left)
                    room[left].append(group)
    _, first_sample, renamed = np.unique(rows, return_index=True, return_inverse=True)
    rank = np.empty(len(first_sample), dtype=np.int64)
    rank[np.argsort(first_sample, kind="stable")] = np.arange(len(first_sample))
    return rank[renamed]
