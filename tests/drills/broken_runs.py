"""The recipe that the drills of the tests break: a tiny model on two CPU ranks."""

from __future__ import annotations

from pathlib import Path

from fullshard.drills.drill import Drills
from fullshard.drills.kinds import STEPS
from fullshard.recipes.read import read
from tests.small import model_folder, recipe, token_file

WORLD = 2


def prepared(folder: Path, *, steps: int = STEPS) -> Drills:
    """The runs in a folder, with the one that nobody breaks."""
    model_folder(folder / "model")
    token_file(folder / "train.jsonl", records=96)
    settings = recipe(
        folder,
        name="drill",
        data={"shuffle": True},
        duration={"steps": steps},
        topology={"device": "cpu", "devices": WORLD},
        checkpoint={"every_steps": 2, "at_end": False},
        log={"every_steps": 1, "sample_ids": True, "sinks": []},
    )
    (folder / "runs").mkdir()
    runs = Drills(read(settings).recipe, folder / "runs", WORLD)
    runs.straight()
    return runs
