"""The encoder is chosen by the first record among all that are installed, those of other packages too."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fullshard.data.prepare import choose_encoder
from fullshard.errors import DataError

SOUND = """
from fullshard.contracts.data import Encoder


class Sound(Encoder):
    forms = 'sound: {"wave": [...]}'

    @staticmethod
    def accepts(record):
        return "wave" in record

    def encode(self, record, processor, *, length):
        return []

    def collate(self, samples, *, length):
        return {}


__all__ = ["Sound"]
"""
CHOOSE = """
from fullshard.data.prepare import choose_encoder
from fullshard.errors import DataError
print(choose_encoder({"wave": [0.5], "id": 1}).kind(), choose_encoder({"text": "x"}).kind())
for record in ({"wave": [0.5], "text": "x"}, {"id": 1}):
    try:
        choose_encoder(record)
    except DataError as error:
        print(error)
"""


def test_an_encoder_of_an_installed_package_is_chosen(tmp_path: Path) -> None:
    for folder in ("sounds", "sounds/encoders"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "sounds/encoders/sound.py").write_text(SOUND)
    (tmp_path / "sounds-1.0.dist-info").mkdir()
    (tmp_path / "sounds-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: sounds\nVersion: 1.0\n")
    (tmp_path / "sounds-1.0.dist-info/entry_points.txt").write_text("[fullshard.families]\nsounds = sounds\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", CHOOSE], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    chosen, both, none = done.stdout.splitlines()
    assert chosen == "sound text"
    assert both.startswith("the record has the form of several encoders: sound and text. Keys found: 'wave', 'text'.")
    assert none.startswith("the record has no known form. Keys found: 'id'.")
    assert 'sound: {"wave": [...]}' in none
    choices = none.partition("Choose with data.encode: ")[2]
    assert {"chat", "sound", "text"} <= set(re.findall(r"\w+", choices))


def test_a_last_resort_is_chosen_only_if_no_other_encoder_accepts() -> None:
    assert choose_encoder({"query": "a", "positive": "b"}).kind() == "pairs"
    assert choose_encoder({"query": "a", "positive": "b", "text": "c"}).kind() == "text"
    with pytest.raises(DataError, match="several encoders: chat and text"):
        choose_encoder({"text": "a", "messages": [{"role": "user", "content": "b"}]})
