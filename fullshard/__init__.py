"""fullshard: PyTorch-native FSDP training. One recipe, one command, one loop.

import fullshard
recipe = fullshard.load("recipe.yaml", "optimizer.lr=3e-4")
result = fullshard.train(recipe)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fullshard.data.base import Encoder, Records, Source
    from fullshard.errors import CheckpointError, DataError, FullshardError, NumericalError, RecipeError, SetupError
    from fullshard.evaluate.base import Evaluation, EvaluationInputs, Findings
    from fullshard.launch.base import Launcher, Ranks
    from fullshard.models.base import Family, Weights
    from fullshard.objectives.base import Objective, Terms
    from fullshard.optim.base import Optimizer
    from fullshard.read import load
    from fullshard.recipe import Recipe
    from fullshard.run import train_recipe as train
    from fullshard.schedules.base import Schedule
    from fullshard.similarity.base import Embedded, SimilarityLoss
    from fullshard.sinks.base import OpenSink, Sink
    from fullshard.state import Result

# Where each public name lives. They are imported on first use, so that `import fullshard` costs nothing.
_HOMES = {
    "CheckpointError": "errors",
    "DataError": "errors",
    "Embedded": "similarity.base",
    "Encoder": "data.base",
    "Evaluation": "evaluate.base",
    "EvaluationInputs": "evaluate.base",
    "Family": "models.base",
    "Findings": "evaluate.base",
    "FullshardError": "errors",
    "Launcher": "launch.base",
    "NumericalError": "errors",
    "Objective": "objectives.base",
    "OpenSink": "sinks.base",
    "Optimizer": "optim.base",
    "Ranks": "launch.base",
    "Recipe": "recipe",
    "RecipeError": "errors",
    "Records": "data.base",
    "Result": "state",
    "Schedule": "schedules.base",
    "SetupError": "errors",
    "SimilarityLoss": "similarity.base",
    "Sink": "sinks.base",
    "Source": "data.base",
    "Terms": "objectives.base",
    "Weights": "models.base",
    "load": "read",
    "train": "run",
}

__all__ = [
    "CheckpointError",
    "DataError",
    "Embedded",
    "Encoder",
    "Evaluation",
    "EvaluationInputs",
    "Family",
    "Findings",
    "FullshardError",
    "Launcher",
    "NumericalError",
    "Objective",
    "OpenSink",
    "Optimizer",
    "Ranks",
    "Recipe",
    "RecipeError",
    "Records",
    "Result",
    "Schedule",
    "SetupError",
    "SimilarityLoss",
    "Sink",
    "Source",
    "Terms",
    "Weights",
    "load",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fullshard' has no attribute {name!r}")
    import importlib

    home = importlib.import_module(f"fullshard.{_HOMES[name]}")
    return home.train_recipe if name == "train" else getattr(home, name)


def __dir__() -> list[str]:
    return __all__
