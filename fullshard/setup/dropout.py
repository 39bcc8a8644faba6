"""Which dropout is at work in a module. Its draws belong to a rank and a micro-batch, so losses differ with either.

Must not know recipes, ranks or model classes.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.dropout import _DropoutNd


def dropout_layers(module: nn.Module) -> dict[str, float]:
    """The probability of each layer that drops out, by name."""
    return {name: part.p for name, part in module.named_modules() if isinstance(part, _DropoutNd) and part.p > 0}


def active_dropout(module: nn.Module) -> dict[str, float]:
    """The same, with what layers keep as a number of their own for a function, such as attention."""
    found = dropout_layers(module)
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if "drop" in key and isinstance(value, float) and 0 < value < 1:
                found[f"{name}.{key}"] = value
    return found
