# ruff: noqa: F401
"""fullshard: PyTorch-native FSDP training. One recipe, one command, one loop.

import fullshard
recipe = fullshard.read("recipe.yaml", "optimizer.lr=3e-4")
result = fullshard.train(recipe)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fullshard.contracts.data import (
        Collator,
        Encoded,
        Encoder,
        OpenEncoder,
        Quantity,
        Records,
        Source,
        token_samples,
    )
    from fullshard.contracts.evaluation import Evaluation, EvaluationInputs, Findings
    from fullshard.contracts.launcher import Launcher, Ranks
    from fullshard.contracts.model import Family, Weights
    from fullshard.contracts.objective import Objective, Term, Terms
    from fullshard.contracts.optimizer import Optimizer
    from fullshard.contracts.schedule import Schedule
    from fullshard.contracts.sink import OpenSink, Sink
    from fullshard.errors import CheckpointError, DataError, FullshardError, NumericalError, RecipeError, SetupError
    from fullshard.own_loop.checkpoint import load, save
    from fullshard.own_loop.ranks import init
    from fullshard.own_loop.result import Result
    from fullshard.own_loop.sharding import clip_grad_norm, shard
    from fullshard.own_loop.train import train_recipe as train
    from fullshard.recipe import Recipe
    from fullshard.recipes.read import read_recipe as read
    from fullshard.similarity.base import Embedded, SimilarityLoss

# The module of each public name. Each is imported on first use, so that `import fullshard` costs nothing.
_MODULES = {
    "contracts.data": "Collator Encoded Encoder OpenEncoder Quantity Records Source token_samples",
    "contracts.evaluation": "Evaluation EvaluationInputs Findings",
    "contracts.launcher": "Launcher Ranks",
    "contracts.model": "Family Weights",
    "contracts.objective": "Objective Term Terms",
    "contracts.optimizer": "Optimizer",
    "contracts.schedule": "Schedule",
    "contracts.sink": "OpenSink Sink",
    "errors": "CheckpointError DataError FullshardError NumericalError RecipeError SetupError",
    "own_loop.checkpoint": "load save",
    "own_loop.ranks": "init",
    "own_loop.result": "Result",
    "own_loop.sharding": "clip_grad_norm shard",
    "own_loop.train": "train",
    "recipe": "Recipe",
    "recipes.read": "read",
    "similarity.base": "Embedded SimilarityLoss",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'fullshard' has no attribute {name!r}")
    import importlib

    module = importlib.import_module(f"fullshard.{_MODULE_OF[name]}")
    return getattr(module, f"{name}_recipe" if name in ("read", "train") else name)


def __dir__() -> list[str]:
    return __all__
