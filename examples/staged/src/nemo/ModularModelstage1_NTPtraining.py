"""The training module of a staged language-model project: a command, and a function that returns what was trained."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import fullshard
from fullshard.__main__ import main

RECIPE = str(Path(__file__).parents[2] / "recipe.yaml")


def train_production_mode(model_config_key: str, stage: str, devices: int, precision: str, *settings: str) -> Any:
    """Trains the stages of the recipe; returns the result of one of them, and its model."""
    size = model_config_key.removeprefix("model_config_")
    chosen = (f"model.size={size}", f"topology.devices={devices}", f"precision={precision}")
    result = fullshard.train(RECIPE, *chosen, *settings).stages[stage]
    return result, result.load()


if __name__ == "__main__":
    sys.argv[1:1] = ["train", RECIPE]
    main()
