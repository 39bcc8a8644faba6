"""fullshard: PyTorch-native FSDP training. One recipe, one command, one loop.

import fullshard
recipe = fullshard.load("recipe.yaml", "optimizer.lr=3e-4")
result = fullshard.train(recipe)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fullshard.contracts.data import Collator, Encoded, Encoder, OpenEncoder, Records, Source, token_samples
    from fullshard.contracts.evaluation import Evaluation, EvaluationInputs, Findings
    from fullshard.contracts.launcher import Launcher, Ranks
    from fullshard.contracts.model import Family, Weights
    from fullshard.contracts.objective import Objective, Term, Terms
    from fullshard.contracts.optimizer import Optimizer
    from fullshard.contracts.progress import Result
    from fullshard.contracts.schedule import Schedule
    from fullshard.contracts.sink import OpenSink, Sink
    from fullshard.errors import CheckpointError, DataError, FullshardError, NumericalError, RecipeError, SetupError
    from fullshard.recipe import Recipe
    from fullshard.recipes.read import load
    from fullshard.run import train_recipe as train
    from fullshard.similarity.base import Embedded, SimilarityLoss

# Where each public name lives. They are imported on first use, so that `import fullshard` costs nothing.
_HOMES = {
    "CheckpointError": "errors",
    "Collator": "contracts.data",
    "DataError": "errors",
    "Embedded": "similarity.base",
    "Encoded": "contracts.data",
    "Encoder": "contracts.data",
    "Evaluation": "contracts.evaluation",
    "EvaluationInputs": "contracts.evaluation",
    "Family": "contracts.model",
    "Findings": "contracts.evaluation",
    "FullshardError": "errors",
    "Launcher": "contracts.launcher",
    "NumericalError": "errors",
    "Objective": "contracts.objective",
    "OpenEncoder": "contracts.data",
    "OpenSink": "contracts.sink",
    "Optimizer": "contracts.optimizer",
    "Ranks": "contracts.launcher",
    "Recipe": "recipe",
    "RecipeError": "errors",
    "Records": "contracts.data",
    "Result": "contracts.progress",
    "Schedule": "contracts.schedule",
    "SetupError": "errors",
    "SimilarityLoss": "similarity.base",
    "Sink": "contracts.sink",
    "Source": "contracts.data",
    "Term": "contracts.objective",
    "Terms": "contracts.objective",
    "Weights": "contracts.model",
    "load": "recipes.read",
    "token_samples": "contracts.data",
    "train": "run",
}

__all__ = [
    "CheckpointError",
    "Collator",
    "DataError",
    "Embedded",
    "Encoded",
    "Encoder",
    "Evaluation",
    "EvaluationInputs",
    "Family",
    "Findings",
    "FullshardError",
    "Launcher",
    "NumericalError",
    "Objective",
    "OpenEncoder",
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
    "Term",
    "Terms",
    "Weights",
    "load",
    "token_samples",
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
