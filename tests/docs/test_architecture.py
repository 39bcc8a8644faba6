"""docs/architecture.md lists the layers that tests/arch enforces, and its picture is drawn from them."""

from __future__ import annotations

import re

from tests.arch.test_layers import LAYERS
from tests.docs.house import CAPTIONS, FLOORS, PICTURE, ROOF, house, rows
from tests.docs.pages import ROOT, blocks

PAGE = (ROOT / "docs" / "architecture.md").read_text()


def test_the_layers_are_those_of_the_tests() -> None:
    [listed] = blocks("text", PAGE)
    assert re.findall(r"\w+", listed) == LAYERS


def test_the_picture_is_drawn_from_the_layers() -> None:
    assert PICTURE.read_text() == house(), "draw it again: python -m tests.docs.house"


def test_every_layer_and_every_family_has_one_room() -> None:
    families = [path.parent.name for path in (ROOT / "fullshard" / "families").glob("*/__init__.py")]
    assert len(families) >= 3
    rooms = re.findall(r'<text class="room".*>(\w+)</text>', house())
    assert sorted(rooms) == sorted([*(set(LAYERS) - {"families", *ROOF}), *families]) == sorted(CAPTIONS)


def test_each_floor_is_a_line_of_the_list() -> None:
    floors = [", ".join(name for row in rows(floor) for name in row) for floor in FLOORS]
    assert blocks("text", PAGE)[0].replace(",\n", "\n").splitlines()[:-1] == floors[:-1]


def test_every_package_has_a_line() -> None:
    packages = {path.parent.name for path in (ROOT / "fullshard").glob("*/__init__.py")}
    assert packages - set(re.findall(r"`fullshard/(\w+)/`", PAGE)) <= {
        "errors",
        "formatting",
        "optim",
        "schedules",
        "evaluations",
        "recipes",
    }
