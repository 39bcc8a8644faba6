"""A recipe of two stages over a small model, and the ranks that train it: freezing in the first, none in the second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests import bucket
from tests.small import curve, recipe

FROZEN = "model.embed_tokens.*"
STEPS = (4, 6)
RATES = (1e-2, 5e-3)


def settings(folder: Path, name: str, **sections: Any) -> dict[str, Any]:
    """Stage `first` trains everything but the embeddings, stage `second` everything."""
    second = {"optimizer": {"lr": RATES[1]}, "duration": {"steps": STEPS[1]}, **sections.pop("second", {})}
    first = {"model": {"freeze": [FROZEN]}, "duration": {"steps": STEPS[0]}, **sections.pop("first", {})}
    base = recipe(folder, **{"checkpoint": {"every_steps": 2, "keep": None}, **sections}, name=name)
    base["optimizer"] = {"lr": RATES[0], "weight_decay": 0.1, **sections.get("optimizer", {})}
    return {**base, "stages": [{"name": "first", **first}, {"name": "second", **second}]}


bucket.install()


def train_stages(
    settings: dict[str, Any], *, resume: str = "auto", only: str | None = None, anyway: bool = False
) -> dict[str, Any]:
    """One rank of the stages; gives what each has logged. Sent to the rank pool by name."""
    from fullshard.log.metrics import FILE, read
    from fullshard.recipes.read import Reading
    from fullshard.recipes.read import read as read_recipe
    from fullshard.run import execute
    from fullshard.stages.in_turn import Stage, train_in_turn

    whole = read_recipe(settings).recipe
    said: list[str] = []

    def run(stage: Stage, how: str) -> None:
        execute(Reading(stage.recipe, "", "a test", place=stage.place), resume=how)

    how: dict[str, Any] = {"resume": resume, "only": only, "anyway": anyway}
    trained = train_in_turn(whole, run, command=lambda name: name, say=said.append, **how)
    found = {each.name: each.folder / FILE for each in whole.stages or []}
    return {"trained": trained, "said": said, **{name: read(path) for name, path in found.items() if path.exists()}}


def losses(found: dict[str, Any], *stages: str) -> list[tuple[float, ...]]:
    """Loss and gradient norm of every step."""
    return [row for stage in stages for row in curve(found[stage], "loss", "grad_norm")]


def state_at_start(settings: dict[str, Any], stage: int) -> dict[str, Any]:
    """Every tensor of a stage before its first step, whole: `model/NAME` and `optimizer/NAME/KEY`."""
    from torch.distributed.tensor import DTensor

    from fullshard.build import build
    from fullshard.checkpoint.tensors import all_tensors
    from fullshard.contracts.progress import Progress
    from fullshard.log.report import Report
    from fullshard.recipes.read import read
    from fullshard.setup.rank_of_run import as_rank

    recipe = (read(settings).recipe.stages or [])[stage]
    with as_rank(read(_plain(recipe))) as (inputs, world, console):
        report = Report(console, lambda record: None, world)
        built = build(recipe, inputs, world, checkpoint=None, progress=Progress(), report=report)
        learner = built.parts.learner
        tensors = all_tensors(learner.model, learner.optimizer)
        found = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}
        copies = {name: t.detach().clone() for name, t in found.items()}
        built.parts.saves.saver.close()
    return copies


def _plain(recipe: Any) -> dict[str, Any]:
    from fullshard.config.part import plain

    return plain(recipe)
