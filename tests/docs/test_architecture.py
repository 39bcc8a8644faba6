"""docs/architecture.md lists the layers that tests/arch enforces, and its picture shows them in the same order."""

from __future__ import annotations

import re

from tests.arch.test_layers import LAYERS
from tests.docs.pages import ROOT, blocks

PAGE = (ROOT / "docs" / "architecture.md").read_text()
PICTURE = (ROOT / "docs" / "images" / "house.svg").read_text()


def test_the_layers_are_those_of_the_tests() -> None:
    [listed] = blocks("text", PAGE)
    assert re.findall(r"\w+", listed) == LAYERS


def test_the_picture_shows_every_layer_in_its_order() -> None:
    """From the roof down, each floor from left to right."""
    drawn = re.findall(r">([\w/]+(?: &#160; \w+)?)</text>", PICTURE)
    names = [name.partition("/")[0] for text in drawn for name in text.split(" &#160; ") if text]
    rooms = [name for name in dict.fromkeys(names) if name in LAYERS]
    assert sorted(rooms) == sorted(LAYERS)
    floors = [line.split(", ") for line in blocks("text", PAGE)[0].replace(",\n", "\n").splitlines()]
    floors[-1:] = [["families"], ["cli", "__main__"]]
    assert rooms == [name for floor in reversed(floors) for name in floor]


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


def test_the_picture_shows_every_family() -> None:
    folders = [path.parent.name for path in (ROOT / "fullshard" / "families").glob("*/__init__.py")]
    assert len(folders) >= 3
    assert [name for name in folders if f">families/{name}<" not in PICTURE] == []
