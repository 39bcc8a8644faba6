"""The same recording as jsonl, parquet and a folder of `datasets`, read with the ordinary source of files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from fullshard.data.sources.files import Files
from fullshard.errors import DataError
from fullshard.families.vision.desktop.episodes import Episodes, read_episode
from fullshard.families.vision.desktop.events import Key, RawMouse, Screen
from tests.families.vision.desktop.samples import KEY, RAW, everything, row

PIXEL = "data:image/png;base64,AAEC"
MESSAGES: list[tuple[str, dict[str, Any]]] = [
    ("ScreenCaptured", {"media_ref": {"uri": PIXEL}}),
    ("KeyboardEvent", KEY),
    ("RawMouseEvent", RAW),
]
EVENTS = [Screen(0, b"\0\1\2"), Key(1, 65, True), RawMouse(2, -3, 12, 1)]


def write(place: Path, form: str) -> Path:
    path = place / f"events.{form}"
    made = [row(kind, message, time, name) for name in ("a", "b") for time, (kind, message) in enumerate(MESSAGES)]
    if form == "jsonl":  # objects, as a person writes them
        path.write_text("".join(json.dumps(one | {"message": json.loads(one["message"])}) + "\n" for one in made))
        return path
    wrapped = [{key: one[key] for key in one if key != "message"} for one in made]
    for one, plain in zip(wrapped, made, strict=True):
        envelope = {
            "topic": one["topic"],
            "timestamp": 9,
            "message_type": one["message_type"],
            "message": plain["message"],
        }
        one["mcap_message"] = json.dumps(envelope).encode()
    table = datasets.Dataset.from_list(wrapped)
    if form == "parquet":
        table.to_parquet(str(path))
    else:
        table.save_to_disk(str(path))
    return path


@pytest.mark.parametrize("form", ["jsonl", "parquet", "folder"])
def test_every_kind_of_file(tmp_path: Path, form: str) -> None:
    found = [read_episode(record) for record in everything(Episodes(Files(path=str(write(tmp_path, form))).open()))]
    assert [(episode.path, episode.events) for episode in found] == [("a", EVENTS), ("b", EVENTS)]


def test_an_error_names_file_and_line(tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl")
    path.write_text(path.read_text().replace('"vk": 65', '"vk": 999'))
    record = Episodes(Files(path=str(path)).open())[1]
    with pytest.raises(
        DataError, match=r"events.jsonl:5: 'message.vk' must be a whole number from 0 to 255, found 999"
    ):
        read_episode(record)
