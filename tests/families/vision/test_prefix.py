"""Models that read some tokens in both directions: what they must not see is refused before step 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fullshard.errors import FullshardError
from tests.families.vision.small import model_folder, settings, write_records
from tests.ranks import RankPool
from tests.slow import only_first
from tests.small import train


def refusal(chosen: dict[str, Any], token_type: int | None) -> str:
    """Why a run is refused whose tokens all have one type."""
    from fullshard.families.vision.encoders import image_chat

    original = image_chat.image_sample

    def leaking(*arguments: Any, **named: Any) -> Any:
        sample = original(*arguments, **named)
        return {**sample, "token_type_ids": np.full_like(sample["token_type_ids"], token_type)}

    try:
        image_chat.image_sample = leaking if token_type is not None else original  # type: ignore[attr-defined]
        train(chosen)
    except FullshardError as error:
        return str(error)
    finally:
        image_chat.image_sample = original  # type: ignore[attr-defined]
    return "not refused"


@pytest.mark.parametrize(("architecture", "both_ways"), only_first([("paligemma", 0), ("gemma3", 1)]))
def test_an_answer_that_is_read_in_both_directions_is_refused(
    ranks: RankPool, tmp_path: Path, architecture: str, both_ways: int
) -> None:
    model_folder(tmp_path / "model", architecture)
    write_records(tmp_path, [1] * 8)
    [said] = ranks.run(refusal, settings(tmp_path, "run"), both_ways, world=1)
    assert "a position that carries a loss sees later tokens" in said


def test_packed_questions_would_see_each_other(ranks: RankPool, tmp_path: Path) -> None:
    model_folder(tmp_path / "model", "paligemma")
    write_records(tmp_path, [1] * 8)
    [said] = ranks.run(refusal, settings(tmp_path, "run", data={"pack": True}), None, world=1)
    assert said.startswith("data.pack: PaliGemmaForConditionalGeneration reads each question in both directions")
    assert said.endswith("Set data.pack: false.")
