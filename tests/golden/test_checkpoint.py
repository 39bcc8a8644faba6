"""A checkpoint of an older version loads and goes on as that version did: weights, AdamW's state, averaged weights,
data order and learning rate. Two ranks wrote it; one and two ranks read it.

Bit by bit on the machine and with the versions named in `continued.json`; 1e-6 of each loss elsewhere.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path

import pytest

from tests.golden.make import CHECKPOINT, continued

STORED = Path(__file__).parent / "checkpoint"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the stored folder, with the checkpoint unpacked; the current folder, since its paths are relative."""
    copy = shutil.copytree(STORED, tmp_path / "copy")
    with tarfile.open(copy / f"{CHECKPOINT}.tar.xz") as archive:
        archive.extractall(copy, filter="data")
    monkeypatch.chdir(copy)
    return copy


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_old_checkpoint_goes_on_as_it_did(folder: Path, ranks: int) -> None:
    expected = json.loads((folder / "continued.json").read_text())[str(ranks)]
    found = continued("resumed", ranks)
    assert len(found["train"]) == 3
    for kind in ("train", "validation"):
        for one, golden in zip(found[kind], expected[kind], strict=True):
            assert one == pytest.approx(golden, rel=1e-6)
