"""Generated episodes: their rows, and that each action follows from the screen before it."""

from __future__ import annotations

import numpy as np
import pytest

from fullshard.config.part import decode
from fullshard.contracts.data import Source
from fullshard.errors import RecipeError
from fullshard.families.vision.desktop.actions import baseline, meanings
from fullshard.families.vision.desktop.episodes import Episodes, read_episode
from fullshard.families.vision.desktop.events import Event, Key, RawMouse, Screen
from fullshard.families.vision.desktop.formats import FORMATS
from fullshard.families.vision.desktop.rows import form_of
from fullshard.families.vision.desktop.screens import load
from fullshard.families.vision.sources.desktop_episodes import DesktopEpisodes
from tests.families.vision.desktop.samples import everything


def recordings(**settings: int) -> list[list[Event]]:
    return [read_episode(record).events for record in everything(Episodes(DesktopEpisodes(**settings).open()))]


def test_records_are_rows_of_events() -> None:
    rows = everything(DesktopEpisodes(episodes=3).open())
    assert {form_of(row) for row in rows} == {"events"}
    assert {row["episode_path"] for row in rows} == {f"generated/episode-{number:06d}" for number in range(3)}
    assert {row["topic"] for row in rows} == {"screen", "keyboard", "mouse/raw"}
    assert all(row["message"].startswith(b"\x89PNG") for row in rows if row["topic"] == "screen")


def test_every_action_has_a_screen_before_it() -> None:
    for events in recordings(episodes=20):
        assert all(isinstance(one, Screen) for one in events[::2])
        assert all(isinstance(one, Key | RawMouse) for one in events[1::2])
        assert [two.timestamp_ns - one.timestamp_ns for one, two in zip(events, events[1:], strict=False)] == [
            50_000_000
        ] * (len(events) - 1)
        downs = [(one.key, one.pressed) for one in events if isinstance(one, Key)]
        assert [pressed for _, pressed in downs] == [True, False] * 2
        assert [one.flags for one in events if isinstance(one, RawMouse) and one.flags] == [1, 2] * 2
        for one in events[1::2]:  # nothing is rounded away
            assert FORMATS["factorized"].rounded(one)[0] == one.__class__(
                **{**one.__dict__, "timestamp_ns": one.timestamp_ns % 10_000_000_000}
            )


def test_the_same_settings_give_the_same_episodes() -> None:
    first, again = (everything(DesktopEpisodes(episodes=4, seed=7).open()) for _ in range(2))
    assert first == again
    # An episode is its number and the seed, wherever a source starts.
    later = everything(DesktopEpisodes(episodes=2, start=2, seed=7).open())
    assert later == [row for row in first if row["episode_path"] >= "generated/episode-000002"]
    other = everything(DesktopEpisodes(episodes=4, seed=8).open())
    assert [row["message"] for row in other] != [row["message"] for row in first]
    marks = {DesktopEpisodes(**one).open().fingerprint() for one in ({}, {"seed": 1}, {"start": 1}, {"episodes": 9})}
    assert len(marks) == 4


def test_held_out_screens_are_new() -> None:
    def pictures(start: int) -> set[bytes]:
        return {
            one.image for events in recordings(episodes=50, start=start) for one in events if isinstance(one, Screen)
        }

    assert not pictures(0) & pictures(50)


@pytest.mark.parametrize("cells", [4, 8])
def test_the_action_can_be_read_off_the_screen(cells: int) -> None:
    """By a rule on pixels: where the white cross and the coloured button are, what is yellow, the colour of the "
    "letter."""
    letters = {"A": (220, 60, 60), "B": (60, 160, 70), "C": (60, 90, 220), "D": (200, 150, 30)}
    cell = 64 // cells
    for events in recordings(episodes=40, cells=cells):
        for screen, action in zip(events[::2], events[1::2], strict=True):
            assert isinstance(screen, Screen)
            assert screen.image is not None
            shown = np.asarray(load(screen.image, root=None)).astype(int)
            assert shown.shape == (64, 64, 3)
            down = not (shown == (255, 255, 0)).all(-1).any()
            asked = [letter for letter, colour in letters.items() if (shown == colour).all(-1).sum() > 4]
            if isinstance(action, Key):
                assert [chr(action.key)] == asked
                assert action.pressed == down
                continue
            assert not asked
            cross = np.argwhere((shown == 245).all(-1))
            button = np.argwhere((shown[..., 2] >= 150) & (shown != 245).any(-1) | (shown == (255, 255, 0)).all(-1))
            to = np.sign(button.mean(0) // cell - np.median(cross, 0) // cell).astype(int)
            assert (action.dy, action.dx) == tuple(cell * to)
            assert action.flags == (0 if to.any() else 1 if down else 2)


def test_guessing_gets_little() -> None:
    seen, held = ([one for events in recordings(episodes=100, start=at) for one in meanings(events)] for at in (0, 100))
    guess = baseline(held, seen)
    assert guess["movement"].share < 0.3
    assert guess["key"].share < 0.25
    assert guess["all"].share < 0.3
    assert {one.value for one in seen if one and one.type == "movement"} == {
        *("right", "down right", "down", "down left", "left", "up left", "up", "up right")
    }


def test_settings() -> None:
    source = decode(Source, {"kind": "desktop_episodes", "episodes": 1, "size": 128}, where="data.train")
    (events,) = (read_episode(record).events for record in everything(Episodes(source.open())))
    assert isinstance(events[0], Screen)
    assert events[0].image is not None
    assert load(events[0].image, root=None).size == (128, 128)
    assert {abs(one.dx) for one in events if isinstance(one, RawMouse)} <= {0, 16}
    for bad in ({"episodes": 0}, {"size": 65}, {"start": -1}):
        with pytest.raises(RecipeError, match=rf"data.train.{next(iter(bad))} = "):
            decode(Source, {"kind": "desktop_episodes"} | bad, where="data.train")
