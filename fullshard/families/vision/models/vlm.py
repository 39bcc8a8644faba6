"""Vision-language models of Transformers: language model, vision tower and projector, with their processor.

Must not know objectives, ranks or sharding.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from fullshard.errors import RecipeError
from fullshard.families.vision.fresh_processor import SETTINGS, fresh_processor
from fullshard.families.vision.sizes import tiny_vision
from fullshard.hf.architecture.config import load_config
from fullshard.multimodal.processor import has_processor, load_processor, takes_audio
from fullshard.multimodal.prompts import Files, Row
from fullshard.multimodal.tower_model import TowerModel, config_from_scratch

if TYPE_CHECKING:
    import torch
    from torch import nn


class Vlm(TowerModel):
    """An image-text-to-text model of Transformers."""

    auto: ClassVar[str] = "AutoModelForImageTextToText"
    loader: ClassVar[str | None] = "transformers.AutoModelForImageTextToText.from_pretrained"
    forward_methods: ClassVar[tuple[str, ...]] = ("hidden_states_and_head",)
    usual: ClassVar[dict[str, Any] | None] = {"objective": {"kind": "vision_lm"}, "evaluate": {"parts": ["loss"]}}
    prompt_media: ClassVar[tuple[str, ...]] = ("image",)

    min_pixels: int | None = Field(None, ge=1)
    """Images with fewer pixels are scaled up, if the processor can; null: the processor's own limit."""
    max_pixels: int | None = Field(None, ge=1)
    """Images with more pixels are scaled down, if the processor can; null: the processor's own limit."""
    image_processor: dict[str, Any] = Field(default_factory=dict)
    """Settings of the image processor to change, by Transformers' names: {do_image_splitting: false}."""

    @classmethod
    def recognises(cls, folder: Path) -> bool:
        return super().recognises(folder) and has_processor(folder) and not takes_audio(folder)

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
        if processor:
            module.patches_per_token = patches_per_token(module, processor)
        module.reads_prefix = processor is not None and processor.takes_suffix
        return module  # type: ignore[no-any-return]

    def _unused(self, module: nn.Module, processor: Any) -> list[str]:
        from PIL import Image

        from fullshard.multimodal.unused import unused

        return unused(module, processor.features([Image.new("RGB", (64, 64))]), self.resting(module))

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
            if self.attention in ("varlen", "flash_attention_2", "flash_attention_4"):
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

    def media_flops(self, module: nn.Module) -> dict[str, float]:
        from fullshard.families.vision.tower_flops import flops_per_image_token

        patches = float(getattr(module, "patches_per_token", 1.0))
        adapted = self.adapters(module)
        return {"image_tokens": flops_per_image_token(module, self.resting(module), patches=patches, adapted=adapted)}

    def _config(self) -> Any:
        if self.architecture is None:
            return load_config(self._folder(), trust_remote_code=self.trust_remote_code, overrides=self.overrides)
        what = "a vision-language model"
        return config_from_scratch(
            self.architecture, self.size, self.overrides, known=SETTINGS, what=what, tiny=tiny_vision
        )

    def _fit_vocabulary(self, config: Any, processor: Any) -> None:
        super()._fit_vocabulary(config, processor)
        if self.architecture is not None:
            for name in ("image_token_id", "image_token_index"):
                if hasattr(config, name):
                    setattr(config, name, processor.image_token_id)


def _takes_types(module: Any) -> bool:
    """Whether the types of tokens decide which of them see each other in both directions."""
    return "token_type_ids" in inspect.signature(module.base_model.forward).parameters


__all__ = ["Vlm"]
