"""The output head: how hidden states become logits, so that a loss can use both without the full logits.

`bind` gives a causal LM the method `hidden_states_and_head`. Must not know losses, model names or ranks.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from fullshard.hf.architecture.tiny_probe import backbone, build_probe

T = TypeVar("T")


@dataclass(frozen=True)
class Head:
    """One linear layer that turns hidden states into logits: softcap · tanh(scale · (h · weightᵀ + bias) / softcap)."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of any leading shape of hidden states."""
        logits = F.linear(hidden, self.weight, self.bias)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits


@dataclass(frozen=True)
class HeadRule:
    """How a model computes its logits; `whole` runs its own forward, which cannot be chunked."""

    whole: bool
    scale: float = 1.0
    softcap: float | None = None
    reason: str = ""


SCALES: dict[str, Callable[[Any], float]] = {
    "": lambda c: 1.0,
    "logit_scale": lambda c: c.logit_scale,
    "logits_scaling": lambda c: 1.0 / c.logits_scaling,
    "logits_scaling ": lambda c: c.logits_scaling,
    "lm_head_multiplier": lambda c: c.lm_head_multiplier,
    "dim_model_base": lambda c: c.dim_model_base / c.hidden_size,
}
"""Config key -> factor. One key has two meanings: some architectures divide by it, others multiply."""

SOFTCAPS = ("", "final_logit_softcapping", "output_logit_soft_cap")
"""Config keys of a soft cap."""

_TELLING = {"logit_scale": 0.37, "logits_scaling": 1.7, "lm_head_multiplier": 0.37, "dim_model_base": 48}
"""Values for the tiny probe that tell the formulas apart even if the real config has 1."""


def find_rule(module: nn.Module) -> HeadRule:
    """The formula that gives the model's own logits, tried on a tiny probe; else the model's whole forward."""
    model: Any = module
    output = model.get_output_embeddings()
    if backbone(module) is None:
        return HeadRule(whole=True, reason="the model has no separate backbone")
    if not _is_linear(output) or not any(child is output for child in module.children()):
        return HeadRule(whole=True, reason="the output head is not one linear layer")
    config = model.config.get_text_config(decoder=True)
    scales = {key: formula for key, formula in SCALES.items() if not key or _number(config, key.strip()) is not None}
    softcaps = [key for key in SOFTCAPS if not key or _number(config, key) is not None]
    found = _try_on_probe(type(module), model.config, scales, softcaps)
    if found is None:
        return HeadRule(whole=True, reason="no known formula gives this architecture's logits")
    scale, softcap = found
    return HeadRule(
        whole=False,
        scale=float(SCALES[scale](config)),
        softcap=_number(config, softcap) if softcap else None,
        reason="hidden states and one linear layer",
    )


@torch.no_grad()
def _try_on_probe(
    module_class: type[nn.Module], config: Any, scales: dict[str, Callable[[Any], float]], softcaps: list[str]
) -> tuple[str, str] | None:
    keep: dict[str, Any] = {key.strip(): _TELLING[key.strip()] for key in scales if key}
    keep |= {key: 20.0 for key in softcaps if key}
    probe: Any = build_probe(module_class, config, keep=keep if config.get_text_config(decoder=True) is config else {})
    if probe is None:
        return None
    text = probe.config.get_text_config(decoder=True)
    output = probe.get_output_embeddings()
    # Large logits: a soft cap hardly changes small ones.
    output.weight.mul_(40.0 / output.weight.std() / output.weight.shape[1] ** 0.5)
    ids = torch.arange(16).mul(7).remainder(97).add(3).unsqueeze(0)
    try:
        base: Any = backbone(probe)
        hidden = base(input_ids=ids, use_cache=False).last_hidden_state
        expected = probe(input_ids=ids, use_cache=False).logits
    except Exception:
        return None
    for scale, formula in scales.items():
        for softcap in softcaps:
            head = Head(output.weight, output.bias, formula(text), _number(text, softcap) if softcap else None)
            if _same(head.logits(hidden), expected):
                return scale, softcap
    return None


def _same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    return torch.allclose(found.float(), expected.float(), rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def _number(config: Any, key: str) -> float | None:
    value = getattr(config, key, None)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _is_linear(layer: Any) -> bool:
    return isinstance(getattr(layer, "base_layer", layer), nn.Linear)


def bind(module: nn.Module) -> HeadRule:
    """Gives the module its method `hidden_states_and_head`, and says how it works."""
    rule = find_rule(module)
    bound: Any = module
    bound.head_rule = rule
    bound.hidden_states_and_head = types.MethodType(hidden_states_and_head, module)
    return rule


def hidden_states_and_head(
    module: Any,
    reduce: Callable[[torch.Tensor, Head | None], T],
    *,
    bounds: torch.Tensor | None = None,
    full_logits: bool = False,
    **inputs: Any,
) -> T:
    """Runs the model up to its head and returns `reduce(hidden, head)`.

    If the head is more than one linear layer, or with `full_logits`, returns `reduce(logits, None)`. `reduce` runs
    inside the call because the weight of a sharded head is complete only there. `bounds` are the
    cumulative document lengths, for an attention kernel that takes them.
    """
    rule: HeadRule = module.head_rule
    if bounds is not None and getattr(module, "takes_bounds", False):
        inputs["cu_seq_lens_q"] = bounds
    output = module.get_output_embeddings()
    # An adapted head has several weights; its own forward combines them.
    if full_logits or rule.whole or hasattr(output, "base_layer"):
        return reduce(module.forward(use_cache=False, **inputs).logits, None)
    base: Any = backbone(module)
    hidden = base(use_cache=False, **inputs).last_hidden_state
    return reduce(hidden, Head(output.weight, output.bias, rule.scale, rule.softcap))
