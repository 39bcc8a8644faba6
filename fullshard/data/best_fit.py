"""Best-fit packing: which lengths share a row. Must not know what they are lengths of."""

from __future__ import annotations

import bisect
from collections import defaultdict

import numpy as np


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
