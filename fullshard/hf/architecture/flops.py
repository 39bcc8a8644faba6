"""The cost of one token in a training step of a Transformers model.

Must not know devices, ranks or objectives.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn


def flops_per_token(module: nn.Module, *, length: int, without: Collection[str] = ()) -> float:
    """4·N + 2·T + 6·L·d·s, with N parameters, T of them trained, L layers of width d and sequences of s tokens.

    Without frozen parameters that is the usual 6·N + 6·L·d·s. A frozen one still costs its forward (2) and the gradient
    of its input (2), but no weight gradient. In a mixture of experts only the active ones count. Parameters named in
    `without` do not work on tokens.
    """
    model: Any = module
    config = model.config.get_text_config(decoder=True)
    cost = 0.0
    for name, parameter in module.named_parameters():
        if name in without:
            continue
        share = _active_share(config) if ".experts." in name else 1.0
        cost += share * parameter.numel() * (6.0 if parameter.requires_grad else 4.0)
    return cost + 6.0 * float(config.num_hidden_layers * config.hidden_size * length)


def _active_share(config: Any) -> float:
    chosen = getattr(config, "num_experts_per_tok", None)
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if chosen and (number := getattr(config, key, None)):
            return float(chosen) / float(number)
    return 1.0
