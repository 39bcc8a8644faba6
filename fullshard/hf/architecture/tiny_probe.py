"""A twin: a small real copy of a model class, to find out by trying what its config does not say.

Must not know model names, weights or ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fullshard.hf.architecture.sizes import config_with, tiny_keys


def build_twin(
    module_class: type[nn.Module], config: Any, *, keep: Mapping[str, Any], seed: int = 0
) -> nn.Module | None:
    """A small model of the class with fixed random weights, in evaluation mode; None when it cannot be made small."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            keys = {**tiny_keys(config), **_layer_types(config), **keep}
            twin = module_class(config_with(type(config), keys))
        except Exception:
            # Any refusal means the same: nothing can be learned this way, and the caller takes the slow, safe path.
            return None
    return twin.eval()


def _layer_types(config: Any) -> dict[str, Any]:
    """One layer of each type that the real model has, so that nothing in it goes untried."""
    types = list(dict.fromkeys(getattr(config, "layer_types", None) or []))
    return {"layer_types": types, "num_hidden_layers": len(types)} if len(types) > 1 else {}


def backbone(module: nn.Module) -> nn.Module | None:
    """The model without its head."""
    model: Any = module
    for found in (model.base_model, model.get_decoder(), getattr(model, "model", None)):
        if isinstance(found, nn.Module) and found is not module:
            return found
    return None
