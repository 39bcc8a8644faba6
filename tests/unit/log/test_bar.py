from __future__ import annotations

import pytest
from tqdm import tqdm  # type: ignore[import-untyped]

from fullshard.formatting import readable
from fullshard.log.bar import Pace, line


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_no_time_left_is_shown_before_the_second_step() -> None:
    clock = Clock()
    pace = Pace(100, clock=clock)
    assert pace.left is None
    clock.now = 50.0
    pace.step()
    assert pace.left is None
    assert pace.left_text() == "?"
    clock.now = 52.0
    pace.step()
    assert pace.left == 98 * 2.0


def test_the_warm_up_step_is_left_out_and_the_rest_is_averaged() -> None:
    clock = Clock()
    pace = Pace(10, clock=clock)
    for seconds in (300.0, 1.0, 3.0):
        clock.now += seconds
        pace.step()
    assert pace.seconds_per_step == 2.0
    assert pace.left == 7 * 2.0
    assert pace.elapsed == 304.0


def test_pauses_between_steps_count() -> None:
    clock = Clock()
    pace = Pace(6, clock=clock)
    for seconds in (1.0, 1.0, 1.0 + 10.0):
        clock.now += seconds
        pace.step()
    assert pace.left == 3 * 6.0


def test_a_120_step_run_at_15_25_seconds_ends_in_half_an_hour() -> None:
    clock = Clock()
    pace = Pace(120, clock=clock)
    for _ in range(60):
        clock.now += 15.25
        pace.step()
    shown = line("Training", pace, loss_name="loss", loss=6.98, width=100, drawn=10)
    assert shown == "Training:  50%|█████     |  60/120 [15:15<15:15, 15.25s/it, loss=6.9800]"


def test_a_resumed_run_measures_only_its_own_steps() -> None:
    clock = Clock()
    pace = Pace(100, clock=clock, done=90)
    assert pace.left is None
    for _ in range(3):
        clock.now += 4.0
        pace.step()
    assert pace.done == 93
    assert pace.left == 7 * 4.0


def test_a_full_bar_of_one_step_shows_its_own_time() -> None:
    clock = Clock()
    pace = Pace(1, clock=clock)
    clock.now = 4.0
    pace.step()
    assert line("Validation", pace, loss_name="val_loss", loss=1.0, width=60, drawn=4).endswith(
        "1/1 [00:04<00:00, 4.00s/it, val_loss=1.0000]"
    )


@pytest.mark.parametrize("width", [30, 60, 70, 80, 120, 200])
def test_a_line_never_exceeds_a_sensible_width(width: int) -> None:
    clock = Clock()
    pace = Pace(625, clock=clock)
    for _ in range(281):
        clock.now += 0.25
        pace.step()
    shown = line("Training", pace, loss_name="loss", loss=0.1234, width=width)
    assert len(shown) <= max(width, 62)
    assert shown.endswith("281/625 [01:10<01:26, 4.00it/s, loss=0.1234]")


@pytest.mark.parametrize("done", [0, 1, 13, 50, 99, 100])
def test_the_bar_is_drawn_as_by_tqdm(done: int) -> None:
    clock = Clock()
    pace = Pace(100, clock=clock, done=done)
    ours = line("Training", pace, loss_name="loss", loss=None, width=100, drawn=10).split("|")[1]
    theirs = tqdm.format_meter(done, 100, 1.0, bar_format="{bar}", ncols=10)
    assert ours == theirs


@pytest.mark.parametrize("seconds", [0, 9, 59, 60, 154, 3599, 3600, 13500, 86399])
def test_durations_read_as_those_of_tqdm(seconds: int) -> None:
    assert readable.duration(seconds) == tqdm.format_interval(seconds)


def test_long_durations_have_days() -> None:
    assert readable.duration(2 * 86400 + 3 * 3600 + 5) == "2d 03:00:05"


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (3.5, "3.50"), (950, "950"), (9512, "9.51k"), (45012, "45.0k"), (489_900, "490k"), (1.2e6, "1.20M")],
)
def test_short_numbers(number: float, text: str) -> None:
    assert readable.short(number) == text


def test_a_tiny_loss_is_not_shown_as_zero() -> None:
    assert readable.loss(1.2e-5) == "1.20e-05"
    assert readable.loss(float("nan")) == "nan"
