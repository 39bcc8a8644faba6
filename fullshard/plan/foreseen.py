"""One sentence about the memory of a run, for `fullshard check` and the header of a run.

Must not know how findings are shown.
"""

from __future__ import annotations

import contextlib
import sys

from torch import nn

from fullshard.contracts.launcher import Ranks
from fullshard.errors import FullshardError, first_line
from fullshard.formatting.readable import size
from fullshard.plan.hardware import gpu_here
from fullshard.plan.predict import Place, Planner, Prediction
from fullshard.plan.report import needs, verdict
from fullshard.recipe import Recipe


def foreseen(recipe: Recipe, ranks: Ranks, module: nn.Module) -> tuple[str, str]:
    """What is predicted, and what to do if it does not fit, or cannot be predicted; empty if it fits."""
    try:
        return _foreseen(recipe, ranks, module)
    except FullshardError:
        raise
    except Exception as error:  # a prediction that fails must not end a check
        failed = f"it cannot be predicted: {type(error).__name__}: {first_line(error)}"
        return failed, "Watch the memory of the first steps."


def _foreseen(recipe: Recipe, ranks: Ranks, module: nn.Module) -> tuple[str, str]:
    place = Place(ranks.per_node, ranks.nodes, gpu_here(recipe.topology.device))
    with contextlib.redirect_stdout(sys.stderr):  # an objective of the user's own may print: not into the report
        found = Planner(module).predict(recipe, place)
    if found.room is None or found.room >= 0:
        return sentence(found), ""
    return sentence(found), "Run fullshard plan with the same recipe: it says what to change."


def sentence(found: Prediction) -> str:
    """What a rank holds and needs, and whether it fits on its GPU."""
    held = found.held
    kinds = {"parameters": held.parameters, "gradients": held.gradients, "optimizer state": held.optimizer}
    kinds |= {"average": held.ema} if held.ema else {}
    parts = ", ".join(f"{name} {size(amount)}" for name, amount in kinds.items())
    text = f"a rank holds {parts}; at its peak, {found.peak.name}, {needs(found, found.peak.memory.total)}"
    return text if found.room is None else f"{text}. {verdict(found)[:-1]}"
