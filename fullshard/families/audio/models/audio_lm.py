"""Audio language models of Transformers: language model, audio tower and projector, with their feature extractor.

Speech encoder-decoders are built as well: the encoder is the audio tower, the decoder the language model. Must not know
objectives, ranks or sharding.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fullshard.families.audio.fresh_processor import SETTINGS, fit_tokens, fresh_processor
from fullshard.families.audio.processor import load_audio_processor
from fullshard.families.audio.sizes import tiny_audio
from fullshard.hf.architecture.config import load_config
from fullshard.multimodal.processor import has_processor
from fullshard.multimodal.tower_model import TowerModel, config_from_scratch

if TYPE_CHECKING:
    from torch import nn


class AudioLM(TowerModel):
    """A model of Transformers that reads audio and writes text."""

    auto: ClassVar[str] = "AutoModelForMultimodalLM"
    loader: ClassVar[str | None] = "transformers.AutoModelForMultimodalLM.from_pretrained"
    forward_methods: ClassVar[tuple[str, ...]] = ("hidden_states_and_head",)
    usual: ClassVar[dict[str, Any] | None] = {"objective": {"kind": "audio_lm"}, "evaluate": {"parts": ["loss"]}}

    def load_processor(self, folder: Path, *, where: str) -> Any:
        tokenizer = super().load_processor(folder, where=where)
        config = self._config()
        if not has_processor(folder) and self.path is not None:
            folder = self._folder()
        if not has_processor(folder) and self.architecture is not None:
            return fresh_processor(config, tokenizer)
        code = self.trust_remote_code
        return load_audio_processor(folder, tokenizer, config=config, trust_remote_code=code, where=where)

    def _auto(self, config: Any) -> str:
        return "AutoModelForSpeechSeq2Seq" if config.is_encoder_decoder else self.auto

    def _bind(self, module: nn.Module) -> None:
        super()._bind(module)
        _share_position_tables(module)

    def _unused(self, module: nn.Module, processor: Any) -> list[str]:
        from fullshard.families.audio.unused import unused

        model: Any = module
        # An adapter is unused if the layer that it adapts is.
        names = {name: re.sub(r"\.base_layer|\.lora_[AB]\.\w+", "", name) for name in sorted(self.resting(module))}
        found = set(unused(model.config, list(names.values())))
        return [name for name, base in names.items() if base in found]

    def _config(self) -> Any:
        if self.architecture is None:
            return load_config(self._folder(), trust_remote_code=self.trust_remote_code, overrides=self.overrides)
        what = "an audio language model"
        return config_from_scratch(
            self.architecture, self.size, self.overrides, known=SETTINGS, what=what, tiny=tiny_audio
        )

    def _fit_vocabulary(self, config: Any, processor: Any) -> None:
        super()._fit_vocabulary(config, processor)
        if self.architecture is not None:
            fit_tokens(config, processor)


def _share_position_tables(module: nn.Module) -> None:
    """Takes tables of positions off the list of modules that stay in fp32: towers read the table without calling its
    module, so it cannot be a unit of its own."""
    model: Any = module
    for kept in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
        if names := getattr(model, kept, None):
            setattr(model, kept, [name for name in names if name != "embed_positions"])


__all__ = ["AudioLM"]
