"""Vision-language models of Transformers: language model, vision tower and projector, with their processor.

Must not know objectives, ranks or sharding.
"""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from fullshard.config.part import did_you_mean
from fullshard.contracts.optimizer import Group
from fullshard.errors import RecipeError
from fullshard.families.vision.fresh_processor import SETTINGS, fresh_processor
from fullshard.families.vision.sizes import tiny_vision
from fullshard.formatting.plural import counted
from fullshard.hf.architecture.config import load_config
from fullshard.hf.architecture.sizes import check_overrides
from fullshard.hf.transformers_model import TransformersModel
from fullshard.multimodal import towers
from fullshard.multimodal.processor import has_processor, load_processor
from fullshard.multimodal.prompts import Files, Row
from fullshard.multimodal.towers import Tower

if TYPE_CHECKING:
    import torch
    from torch import nn

logger = logging.getLogger(__name__)


class Vlm(TransformersModel):
    """An image-text-to-text model of Transformers."""

    auto: ClassVar[str] = "AutoModelForImageTextToText"
    loader: ClassVar[str | None] = "transformers.AutoModelForImageTextToText.from_pretrained"
    forward_methods: ClassVar[tuple[str, ...]] = ("hidden_states_and_head",)
    usual: ClassVar[dict[str, Any] | None] = {"objective": {"kind": "vision_lm"}, "evaluate": {"parts": ["loss"]}}

    prompt_media: ClassVar[tuple[str, ...]] = ("image",)

    towers: dict[str, Tower] = Field(default_factory=dict)
    """Settings of language, vision and projector: {vision: {freeze: true}, projector: {lr: 1e-4}}."""
    min_pixels: int | None = Field(None, ge=1)
    """Images with fewer pixels are scaled up, if the processor can; null: the processor's own limit."""
    max_pixels: int | None = Field(None, ge=1)
    """Images with more pixels are scaled down, if the processor can; null: the processor's own limit."""
    image_processor: dict[str, Any] = Field(default_factory=dict)
    """Settings of the image processor to change, by Transformers' names: {do_image_splitting: false}."""

    @classmethod
    def recognises(cls, folder: Path) -> bool:
        return super().recognises(folder) and has_processor(folder)

    def load_processor(self, folder: Path, *, where: str) -> Any:
        tokenizer = super().load_processor(folder, where=where)
        config = self._config()
        if not has_processor(folder) and self.path is not None:
            folder = self._folder()
        if not has_processor(folder) and self.architecture is not None:
            found = fresh_processor(config, tokenizer)
        else:
            code = self.trust_remote_code
            kind = str(config.model_type)
            found = load_processor(folder, tokenizer, model_type=kind, trust_remote_code=code, where=where)
        found.limit(self.min_pixels, self.max_pixels)
        found.change(self.image_processor)
        found.follow(config)
        return found

    def build(self, *, processor: Any) -> nn.Module:
        from fullshard.families.vision.tower_flops import patches_per_token

        module: Any = super().build(processor=processor)
        towers.check_names(self.towers, module.towers, model=type(module).__name__)
        towers.check_blocks(module, self.towers, module.towers)
        towers.freeze(module, self.towers, module.towers)
        if processor:
            self._freeze_unused(module, processor)
            module.patches_per_token = patches_per_token(module, processor)
        module.reads_prefix = processor is not None and processor.takes_suffix
        return module  # type: ignore[no-any-return]

    def _freeze_unused(self, module: nn.Module, processor: Any) -> None:
        """Freezes parameters that the model never uses: they would get no gradient."""
        from PIL import Image

        from fullshard.multimodal.unused import unused

        found = unused(module, processor.features([Image.new("RGB", (64, 64))]), self.resting(module))
        for name in found:
            module.get_parameter(name).requires_grad_(False)
        if found:
            count = counted(len(found), "parameter")
            logger.info("The model does not use %s of its towers, such as %s: frozen", count, found[0])

    def lay_out(self, text: str | None, messages: Any, files: Files, processor: Any) -> Row | None:
        from fullshard.families.vision.prompts import image_prompt

        return image_prompt(text, messages, files.get("image", ()), processor)

    def choose_kernels(self, module: nn.Module, *, device: str, compute: torch.dtype, packed: bool) -> str:
        from fullshard.multimodal.tower_attention import use_bounds

        model: Any = module
        if packed and getattr(model, "reads_prefix", False):
            raise RecipeError(
                f"data.pack: {type(module).__name__} reads each question in both directions, and in a packed row the "
                "questions would see each other. Set data.pack: false."
            )
        if _takes_types(module):
            if self.attention in ("varlen", "flash_attention_2"):
                raise RecipeError(
                    f"model.attention = {self.attention!r} has no mask, and {type(module).__name__} reads some tokens "
                    "in both directions. Use attention: auto."
                )
            packed = False  # for the choice of a kernel: the one for packed rows has no mask
        chosen = super().choose_kernels(module, device=device, compute=compute, packed=packed)
        if getattr(model, "takes_bounds", False):
            encoders = [name for kind, names in model.towers.items() if kind == "vision" for name in names]
            for name in encoders:
                use_bounds(module.get_submodule(name))
        return chosen

    def groups(self, module: nn.Module) -> list[Group]:
        model: Any = module
        return towers.groups(self.towers, model.towers)

    def flops_per_token(self, module: nn.Module, *, length: int) -> float:
        """Of the language model; the other towers work on images."""
        from fullshard.hf.architecture.flops import flops_per_token

        return flops_per_token(module, length=length, without=self.resting(module))

    def media_flops(self, module: nn.Module) -> dict[str, float]:
        from fullshard.families.vision.tower_flops import flops_per_image_token

        patches = float(getattr(module, "patches_per_token", 1.0))
        adapted = self.adapters(module)
        return {"image_tokens": flops_per_image_token(module, self.resting(module), patches=patches, adapted=adapted)}

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

    def _config(self) -> Any:
        if self.architecture is None:
            return load_config(self._folder(), trust_remote_code=self.trust_remote_code, overrides=self.overrides)
        return _make_config(self.architecture, self.size, self.overrides)

    def _fit_vocabulary(self, config: Any, processor: Any) -> None:
        super()._fit_vocabulary(config, processor)
        if self.architecture is not None:
            for name in ("image_token_id", "image_token_index"):
                if hasattr(config, name):
                    setattr(config, name, processor.image_token_id)


def _takes_types(module: Any) -> bool:
    """Whether the types of tokens decide which of them see each other in both directions."""
    return "token_type_ids" in inspect.signature(module.base_model.forward).parameters


def _make_config(architecture: str, size: str | None, overrides: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    kind = architecture.replace("-", "_").lower()
    if kind not in SETTINGS:
        raise RecipeError(
            f"model.architecture = {architecture!r} is not known as a vision-language model"
            f"{did_you_mean(kind, list(SETTINGS))}. Known: {', '.join(SETTINGS)}. For another one write model.path, a "
            "folder or hub name with weights and processor."
        )
    if size not in (None, "tiny"):
        raise RecipeError(f"model.size = {size!r} is not a known size of {kind}. Known: tiny.")
    config_class = CONFIG_MAPPING[kind]
    default = config_class()
    check_overrides(overrides, default, what=f"the config of {kind}")
    keys = tiny_vision(default) if size == "tiny" else {}
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


__all__ = ["Vlm"]
