"""Which windows of data are left."""

from __future__ import annotations

from itertools import islice

import pytest

from fullshard.faults.watch import kept_windows


@pytest.mark.parametrize(
    ("start", "left_out", "expected"),
    [(0, (), [0, 1, 2, 3]), (2, (), [2, 3, 4, 5]), (0, {1, 3}, [0, 2, 4, 5]), (2, {1, 3}, [4, 5, 6, 7])],
)
def test_a_window_that_is_left_out_is_no_step(start: int, left_out: set[int], expected: list[int]) -> None:
    assert list(islice(kept_windows(start, left_out), 4)) == expected
