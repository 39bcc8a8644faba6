"""Packed rows with images: the loss of each document is what it is alone, and a model that mixes them up is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.families.vision.small import MODELS, model_folder, settings, write_records
from tests.ranks import RankPool
from tests.slow import one_in
from tests.small import train

IMAGES = [1, 2, 0, 1, 1, 0, 3, 1, 0, 2, 1, 1]
PACKED = [name for name in MODELS if "paligemma" not in name]


def held_out(ranks: RankPool, folder: Path, name: str, **data: Any) -> float:
    """The validation loss of a run that changes next to nothing."""
    chosen = settings(
        folder, name, duration={"steps": 1}, optimizer={"lr": 1e-12}, batch={"per_device": 1, "global": 2}
    )
    chosen["data"] |= {"validation": str(folder / "chats.jsonl"), "sequence_length": 400, **data}
    chosen["evaluate"] = {"parts": ["loss"]}
    records = ranks.run(train, chosen, world=2)[0]
    return float(next(record["loss"] for record in reversed(records) if record["kind"] == "validation"))


@pytest.mark.parametrize("architecture", one_in(5, PACKED))
def test_documents_in_a_packed_row_have_the_losses_they_have_alone(
    ranks: RankPool, tmp_path: Path, architecture: str
) -> None:
    model_folder(tmp_path / "model", architecture)
    write_records(tmp_path, IMAGES)
    alone = held_out(ranks, tmp_path, "alone", pack=False)
    assert held_out(ranks, tmp_path, "packed", pack=True) == pytest.approx(alone, rel=1e-6)
