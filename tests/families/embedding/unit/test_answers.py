"""What the sentence-transformers family answers when the engine and the tools ask about a model."""

from __future__ import annotations

from pathlib import Path

from fullshard.config.part import decode
from fullshard.contracts.model import Family
from fullshard.contracts.objective import Objective


def test_no_tokens_are_predicted() -> None:
    assert not decode(Objective, {"kind": "contrastive"}).predicts_tokens


def test_folders_of_sentence_transformers(tmp_path: Path) -> None:
    family = type(decode(Family, {"kind": "sentence_transformer", "path": "a"}))
    (tmp_path / "config.json").write_text("{}")
    assert not family.recognises(tmp_path)
    (tmp_path / "modules.json").write_text("[]")
    assert family.recognises(tmp_path)
