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


def test_a_key_that_waits_for_spikes_in_vain_is_named() -> None:
    from fullshard.faults.guard import Guard

    assert Guard(threshold=8.0, window=100).unused() == [], "as in a resolved recipe, which has every key"
    assert Guard(threshold=4.0, spike="skip").unused() == []
    assert Guard(threshold=4.0).unused() == [
        "guard.threshold has no effect: guard.spike is null, so nothing looks for spikes."
    ]
