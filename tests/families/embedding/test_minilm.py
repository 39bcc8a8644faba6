"""The real all-MiniLM-L6-v2 learns to find functions by what they do: a few steps of the built-in recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.small import train

STEPS = 4


@pytest.mark.slow
def test_recall_on_modules_that_were_not_trained_on_rises(ranks: Any, tmp_path: Path) -> None:
    import yaml

    from fullshard.config.families import recipes

    recipe = yaml.safe_load(recipes()["embedding"].read_text())
    recipe |= {"output": str(tmp_path), "duration": {"steps": STEPS}, "log": {"sinks": [], "every_steps": 1}}
    recipe["topology"] = {"device": "cpu"}
    recipe["data"]["sequence_length"] = 24  # less work
    recipe["checkpoint"] = {"best": None, "every_epochs": None, "at_end": False}
    records = ranks.run(train, recipe, world=2)[0]
    before, after = (record for record in records if record["kind"] == "validation")
    assert (before["step"], after["step"]) == (0, STEPS)
    print(before, after)
    for name, margin in {"recall@1": 0.02, "recall@10": 0.02, "recall@10/64": 0.04}.items():
        assert after[name] > before[name] + margin, name
