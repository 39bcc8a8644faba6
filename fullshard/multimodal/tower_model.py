"""Models of Transformers with towers, for any family: their settings by tower, and shapes from scratch.

Must not know media, objectives, ranks or sharding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from pydantic import Field

from fullshard.config.part import did_you_mean
from fullshard.contracts.optimizer import Group
from fullshard.errors import RecipeError
from fullshard.formatting.plural import counted
from fullshard.hf.architecture.sizes import check_overrides
from fullshard.hf.transformers_model import TransformersModel
from fullshard.multimodal import towers
from fullshard.multimodal.towers import Tower

if TYPE_CHECKING:
    import torch
    from torch import nn

logger = logging.getLogger(__name__)


class TowerModel(TransformersModel):
    """A model with parts that only some samples need."""

    towers: dict[str, Tower] = Field(default_factory=dict)
    """Settings of language, vision or audio, and projector: {vision: {freeze: true}, projector: {lr: 1e-4}}."""

    def build(self, *, processor: Any) -> nn.Module:
        module: Any = super().build(processor=processor)
        towers.check_names(self.towers, module.towers, model=type(module).__name__)
        towers.check_blocks(module, self.towers, module.towers)
        towers.freeze(module, self.towers, module.towers)
        found = self._unused(module, processor) if processor is not None else []
        for name in found:
            module.get_parameter(name).requires_grad_(False)
        towers.check_rates(module, self.towers, module.towers)
        if found:
            count = counted(len(found), "parameter")
            logger.info("The model does not use %s of its towers, such as %s: frozen", count, found[0])
        return module  # type: ignore[no-any-return]

    def _unused(self, module: nn.Module, processor: Any) -> list[str]:
        """Parameters that the model never uses: they would get no gradient."""
        return []

    def flops_per_token(self, module: nn.Module, *, length: int) -> float:
        """Of the language model; the other towers do not work on tokens. A family may count them in `media_flops`."""
        from fullshard.hf.architecture.flops import flops_per_token

        return flops_per_token(module, length=length, without=self.resting(module))

    def choose_kernels(self, module: nn.Module, *, device: str, compute: torch.dtype, packed: bool) -> str:
        from fullshard.multimodal.depthwise import use_own_kernel

        chosen = super().choose_kernels(module, device=device, compute=compute, packed=packed)
        switched = use_own_kernel(module, device=device, compute=compute)
        return f"{chosen}; {counted(switched, 'depthwise convolution')} without cuDNN" if switched else chosen

    def groups(self, module: nn.Module) -> list[Group]:
        model: Any = module
        return towers.groups(self.towers, model.towers)

    def resting(self, module: nn.Module) -> set[str]:
        model: Any = module
        return {name for name, _ in module.named_parameters() if towers.tower_of(name, model.towers) != "language"}

    def _bind(self, module: nn.Module) -> None:
        super()._bind(module)
        # Before adapters, which have configs of their own.
        module.towers = towers.find(module)  # type: ignore[assignment]

    def _without_adapters(self, module: nn.Module) -> list[str]:
        model: Any = module
        return towers.without_adapters(self.towers, model.towers)


def config_from_scratch(
    architecture: str,
    size: str | None,
    overrides: dict[str, Any],
    *,
    known: Collection[str],
    what: str,
    tiny: Callable[[Any], dict[str, Any]],
) -> Any:
    """The config of a model without weights; `what` it is, for messages."""
    from transformers import CONFIG_MAPPING

    kind = architecture.replace("-", "_").lower()
    if kind not in known:
        raise RecipeError(
            f"model.architecture = {architecture!r} is not known as {what}{did_you_mean(kind, list(known))}. Known: "
            f"{', '.join(known)}. For another one write model.path, a folder or hub name with weights and processor."
        )
    if size not in (None, "tiny"):
        raise RecipeError(f"model.size = {size!r} is not a known size of {kind}. Known: tiny.")
    config_class = CONFIG_MAPPING[kind]
    default = config_class()
    check_overrides(overrides, default, what=f"the config of {kind}")
    keys = tiny(default) if size == "tiny" else {}
    try:
        return config_class(**_merged(keys, overrides))
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise RecipeError(
            f"model.architecture = {kind!r}, size = {size!r}: Transformers does not accept this shape: {reason}. Give "
            "the keys that it asks for in model.overrides."
        ) from error


def _merged(keys: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    both = {k: {**keys[k], **v} for k, v in overrides.items() if isinstance(keys.get(k), dict) and isinstance(v, dict)}
    return {**keys, **overrides, **both}


__all__ = ["TowerModel", "config_from_scratch"]
