"""A tiny model of the same class, to find out by trying what a config does not say.

Must not know model names, weights or ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fullshard.hf.architecture.sizes import config_with, tiny_keys


def build_probe(
    module_class: type[nn.Module], config: Any, *, keep: Mapping[str, Any], seed: int = 0
) -> nn.Module | None:
    """A small model of the class with fixed random weights, in evaluation mode; None if it cannot be made small."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            keys = {**tiny_keys(config), **_layer_types(config), **keep}
            probe = module_class(config_with(type(config), keys))
        except Exception:
            # Whatever the error, there is nothing to try, and the caller takes the slow, safe path.
            return None
    return probe.eval()


def _layer_types(config: Any) -> dict[str, Any]:
    """One layer of each type that the real model has, so that every type is tried."""
    types = list(dict.fromkeys(getattr(config, "layer_types", None) or []))
    return {"layer_types": types, "num_hidden_layers": len(types)} if len(types) > 1 else {}


def backbone(module: nn.Module) -> nn.Module | None:
    """The model without its head."""
    model: Any = module
    for found in (model.base_model, model.get_decoder(), getattr(model, "model", None)):
        if isinstance(found, nn.Module) and found is not module:
            return found
    return None
