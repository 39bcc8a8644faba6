"""What is tried again, how often, and what is raised in the end."""

from __future__ import annotations

import pytest

from fullshard.errors import CheckpointError
from fullshard.faults import patience
from fullshard.faults.patience import patiently, tell_wait


@pytest.mark.parametrize(("for_s", "waits"), [(0.0, []), (0.9, []), (1.0, [1.0]), (60.0, [1.0, 2.0, 4.0, 8.0, 16.0])])
def test_the_last_error_is_raised_after_all_waits(
    for_s: float, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    tries: list[int] = []
    monkeypatch.setattr(patience.time, "sleep", waited.append)

    def fail(lost_s: float) -> None:
        tries.append(len(tries))
        raise CheckpointError(f"try {len(tries)}.")

    said: list[str] = []
    with pytest.raises(CheckpointError, match=f"try {len(waits) + 1}"):
        patiently(fail, for_s=for_s, say=said.append)
    assert waited == waits
    assert said == [f"try {number}. Trying again in {wait:g} s." for number, wait in enumerate(waits, start=1)]


def test_an_error_of_our_own_code_is_raised_at_once() -> None:
    with pytest.raises(ZeroDivisionError):
        patiently(lambda lost_s: 1 / 0, for_s=60.0, say=print)


def test_what_is_tried_hears_how_much_time_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    now, lost = [100.0], []
    monkeypatch.setattr(patience.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(patience.time, "sleep", lambda seconds: now.append(now.pop() + seconds))

    def fails_twice(lost_s: float) -> str:
        lost.append(lost_s)
        now[0] += 10.0  # an answer may take long, too
        if len(lost) < 3:
            raise CheckpointError("503 SlowDown.")
        return "done"

    assert patiently(fails_twice, for_s=60.0, say=str) == "done"
    assert lost == [0.0, 11.0, 23.0]


@pytest.mark.parametrize(
    ("waited_s", "lost_s", "for_next", "said"),
    [
        (0.9, 23.0, True, ""),
        (30.0, 0.0, True, "Training waited 30.0 s for the previous save: save less often."),
        (30.0, 0.0, False, ""),
        (30.0, 23.0, True, "Training waited 30.0 s for the previous save, which lost 23 s as the store was gone."),
        (30.0, 23.0, False, "Training waited 30.0 s for the previous save, which lost 23 s as the store was gone."),
    ],
)
def test_a_wait_for_a_save_is_explained(waited_s: float, lost_s: float, for_next: bool, said: str) -> None:
    found: list[str] = []
    tell_wait(waited_s, lost_s, for_next=for_next, say=found.append)
    assert "".join(found) == said
