"""What is tried again, how often, and what is raised in the end."""

from __future__ import annotations

import pytest

from fullshard.errors import CheckpointError
from fullshard.faults import patience
from fullshard.faults.patience import patiently


@pytest.mark.parametrize(("for_s", "waits"), [(0.0, []), (0.9, []), (1.0, [1.0]), (60.0, [1.0, 2.0, 4.0, 8.0, 16.0])])
def test_the_last_error_is_raised_after_all_waits(
    for_s: float, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    tries: list[int] = []
    monkeypatch.setattr(patience.time, "sleep", waited.append)

    def fail() -> None:
        tries.append(len(tries))
        raise CheckpointError(f"try {len(tries)}.")

    said: list[str] = []
    with pytest.raises(CheckpointError, match=f"try {len(waits) + 1}"):
        patiently(fail, for_s=for_s, say=said.append)
    assert waited == waits
    assert said == [f"try {number}. Trying again in {wait:g} s." for number, wait in enumerate(waits, start=1)]


def test_an_error_of_our_own_code_is_raised_at_once() -> None:
    with pytest.raises(ZeroDivisionError):
        patiently(lambda: 1 / 0, for_s=60.0, say=print)
