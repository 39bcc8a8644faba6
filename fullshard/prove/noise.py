"""The recipe without what makes correct runs differ: half precision, dropout, quantised optimizer states.

Their numbers depend on which rank holds which sample or which slice. Must not know runs or ranks.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from fullshard.config.part import plain
from fullshard.recipe import Recipe
from fullshard.setup.run_summary import dropout_layers


def still(recipe: Recipe, module: nn.Module, processor: Any, *, half: bool) -> tuple[Recipe, list[str], str | None]:
    """The recipe in fp32 and without noise; what was changed for that; and what could not be changed, if anything."""
    changed: dict[str, Any] = {}
    removed: list[str] = []
    if half:
        changed["precision"] = "fp32"
        removed.append("in fp32")
    model = recipe.model.without_noise(module, fp32=half)
    quiet = module
    if plain(model) != plain(recipe.model):
        changed["model"] = model
        quiet = model.build(processor=processor)
    if dropout_layers(module) or plain(recipe.model.without_noise(module, fp32=False)) != plain(recipe.model):
        removed.append("without dropout")
    if (optimizer := recipe.optimizer.unquantised()) is not recipe.optimizer:
        changed["optimizer"] = optimizer
        removed.append("with the optimizer's state in fp32")
    name = next(iter(dropout_layers(quiet)), None)
    left = f"no setting of the model turns off the dropout {name}, and other ranks draw other random numbers"
    return recipe.model_copy(update=changed), removed, left if name else None
