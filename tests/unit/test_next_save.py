"""When a save is near: by steps, by the pace so far, by minutes; never if no save can come."""

from __future__ import annotations

import pytest

from fullshard.control.triggers import AHEAD_S, SOON_STEPS, Due, NextSave

NEVER = Due(None, None)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def next_save(due: Due, *, clock: Clock | None = None, at_end: bool = False, num_bytes: int = 0) -> NextSave:
    return NextSave([due], at_end, steps_per_epoch=100, total_steps=1000, num_bytes=num_bytes, clock=clock or Clock())


def first_near(asked: NextSave, clock: Clock, *, step_s: float, first_s: float = 0.0) -> int | None:
    """The first step before which a save is near, in a run with such steps."""
    for step in range(1000):
        if asked.near(step, since_save_s=clock.now):
            return step
        clock.now += step_s if step else first_s
    return None


def test_without_saves_no_save_is_near() -> None:
    clock = Clock()
    assert first_near(next_save(NEVER, clock=clock), clock, step_s=1.0) is None
    assert not any(next_save(NEVER).soon(step) for step in range(1000))


@pytest.mark.parametrize(
    ("due", "at_end", "saved"),
    [(Due(200, None), False, 200), (Due(None, 2), False, 200), (Due(300, 1), False, 100), (NEVER, True, 1000)],
)
def test_a_save_is_near_when_its_memory_must_be_taken(due: Due, at_end: bool, saved: int) -> None:
    for step_s, num_bytes in ((1.0, 0), (0.5, 0), (1.0, 20_000_000_000)):
        clock = Clock()
        asked = next_save(due, clock=clock, at_end=at_end, num_bytes=num_bytes)
        steps = (AHEAD_S + num_bytes / 1e9) / step_s
        near = first_near(asked, clock, step_s=step_s, first_s=90.0)  # compiling says nothing about the pace
        assert near == saved - steps


def test_with_slow_steps_a_few_steps_are_near_enough() -> None:
    clock = Clock()
    assert first_near(next_save(Due(50, None), clock=clock), clock, step_s=600.0) == 50 - SOON_STEPS
    assert [next_save(Due(50, None)).soon(step) for step in (0, 46, 47, 49, 50)] == [False, False, True, True, False]


def test_minutes_are_counted_by_the_clock() -> None:
    clock = Clock()
    near = first_near(next_save(Due(None, None, every_minutes=10), clock=clock), clock, step_s=1.0)
    assert near == pytest.approx(600 - AHEAD_S, abs=1)


def test_a_save_after_the_first_step_is_soon_from_the_start() -> None:
    assert next_save(Due(1, None)).soon(0)
    assert not next_save(Due(10, None)).soon(0)
