"""The recipe without what makes runs on other ranks differ by right: half precision, dropout, 8-bit optimizer states.

Their numbers depend on which rank holds which sample or which slice. Must not know runs or ranks.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from fullshard.config.part import decode, plain
from fullshard.contracts.model import Family
from fullshard.contracts.optimizer import Optimizer
from fullshard.recipe import Recipe
from fullshard.setup.dropout import dropout_layers

_HALF_ONLY = ("varlen", "flash_attention_2")
"""Attention kernels that compute in half precision only."""
_NOISE = ("drop", "jitter")
"""What the keys of a model's config that draw random numbers are called after."""


def still(recipe: Recipe, module: nn.Module, processor: Any, *, half: bool) -> tuple[Recipe, list[str], str | None]:
    """The recipe in fp32 and without noise; what had to change for it; and what could not be changed, if anything."""
    changed: dict[str, Any] = {}
    removed: list[str] = []
    if half:
        changed["precision"] = "fp32"
        removed.append("in fp32")
    model = _without_noise(plain(recipe.model), module, half=half)
    if model != plain(recipe.model):
        changed["model"] = decode(Family, model, where="model")
    quiet = changed["model"].build(processor=processor) if "model" in changed else module
    if _noisy_settings(module) or dropout_layers(module):
        removed.append("without dropout")
    if recipe.optimizer.kind() == "adamw_8bit":
        changed["optimizer"] = decode(Optimizer, {**plain(recipe.optimizer), "kind": "adamw"}, where="optimizer")
        removed.append("with AdamW's states in fp32")
    name = next(iter(dropout_layers(quiet)), None)
    left = f"{name} is a dropout that no setting of the model turns off, and other ranks draw other numbers"
    return recipe.model_copy(update=changed), removed, left if name else None


def _without_noise(model: dict[str, Any], module: nn.Module, *, half: bool) -> dict[str, Any]:
    """The settings of a model of Transformers, or of another family that has the same keys, with its noise off."""
    changed = dict(model)
    if half and model.get("attention") in _HALF_ONLY:
        changed["attention"] = "auto"
    if isinstance(model.get("overrides"), dict):
        changed["overrides"] = {**model["overrides"], **dict.fromkeys(_noisy_settings(module), 0.0)}
    if isinstance(model.get("lora"), dict) and "dropout" in model["lora"]:
        changed["lora"] = {**model["lora"], "dropout": 0.0}
    return changed


def _noisy_settings(module: nn.Module) -> list[str]:
    """Keys of the model's config that are the probability or size of a noise."""
    config = getattr(module, "config", None)
    settings = vars(config) if config is not None else {}
    return [
        key
        for key, value in settings.items()
        if any(word in key for word in _NOISE) and isinstance(value, float) and value > 0
    ]


__all__ = ["still"]
