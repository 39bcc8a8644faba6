"""A twin: a small real copy of a model class, to find out by trying what its config does not say.

Two questions are answered here: how logits follow from hidden states, and whether packed documents stay apart.
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


@torch.no_grad()
def isolates_documents(module_class: type[nn.Module], config: Any) -> bool:
    """Whether restarting position ids keep documents in one row apart, without an attention mask.

    Changes the first document of a packed row and looks whether the second one's hidden states move, and whether they
    equal those of the second document alone.
    """
    twin = build_twin(module_class, config, keep={})
    if twin is None:
        return False
    length, cut = 24, 10
    ids = torch.arange(length).mul(7).remainder(97).add(3).unsqueeze(0)
    changed = ids.clone()
    changed[:, :cut] += 50
    positions = torch.cat([torch.arange(cut), torch.arange(length - cut)]).unsqueeze(0)
    try:
        first, second = (_hidden(twin, x, position_ids=positions)[:, cut:] for x in (ids, changed))
        alone = _hidden(twin, ids[:, cut:], position_ids=positions[:, cut:])
    except Exception:
        return False
    # Not bitwise: the experts of a mixture see another batch when the first document changes.
    return torch.allclose(first, second, atol=1e-5) and torch.allclose(first, alone, atol=1e-5, rtol=1e-4)


def backbone(module: nn.Module) -> nn.Module | None:
    """The model without its head."""
    model: Any = module
    for found in (model.base_model, model.get_decoder(), getattr(model, "model", None)):
        if isinstance(found, nn.Module) and found is not module:
            return found
    return None


def _hidden(twin: nn.Module, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    base: Any = backbone(twin)
    hidden: torch.Tensor = base(input_ids=ids, use_cache=False, **inputs).last_hidden_state
    return hidden
