"""The built-in recipe `staged` as shipped: each stage improves its own held-out numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

import fullshard
from fullshard.log.metrics import FILE, read


@pytest.mark.slow  # three minutes
@pytest.mark.timeout(1500)
def test_every_stage_improves_its_held_out_numbers(tmp_path: Path) -> None:
    """Margins are at most about half of what was seen: losses of 7.65 to 5.38 and 6.05 to 4.46; for reasoning,
    cross-entropy 5.53 to 2.36, the contrastive term 3.20 to 0.22, and matched 0.21 to 0.95."""
    result = fullshard.train(fullshard.read("staged", f"output={tmp_path}"))
    numbers = {
        name: [row for row in read(Path(stage.folder) / FILE) if row["kind"] == "validation"]
        for name, stage in result.stages.items()  # type: ignore[attr-defined]
    }
    assert list(numbers) == ["pretrain", "sft", "reasoning"]
    first, last = ({name: rows[at] for name, rows in numbers.items()} for at in (0, -1))
    assert last["pretrain"]["loss"] < first["pretrain"]["loss"] - 1.0
    assert last["sft"]["loss"] < first["sft"]["loss"] - 0.7
    assert last["reasoning"]["cross_entropy"] < first["reasoning"]["cross_entropy"] - 1.5
    assert last["reasoning"]["contrastive"] < first["reasoning"]["contrastive"] - 1.0
    assert last["reasoning"]["matched"] > first["reasoning"]["matched"] + 0.3
