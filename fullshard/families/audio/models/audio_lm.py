"""Audio language models of Transformers: language model, audio tower and projector, with their feature extractor.

Speech encoder-decoders are built as well: the encoder is the audio tower, the decoder the language model. Must not know
objectives, ranks or sharding.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fullshard.contracts.model import Continuation
from fullshard.errors import RecipeError
from fullshard.families.audio.fresh_processor import SETTINGS, fit_tokens, fresh_processor
from fullshard.families.audio.processor import because, load_audio_processor
from fullshard.families.audio.sizes import tiny_audio
from fullshard.families.audio.tekken import has_tekken, load_tekken
from fullshard.hf.architecture.config import load_config
from fullshard.multimodal.processor import has_processor, takes_audio
from fullshard.multimodal.prompts import Files, Row
from fullshard.multimodal.tower_model import TowerModel, config_from_scratch

if TYPE_CHECKING:
    import torch
    from torch import nn


class AudioLM(TowerModel):
    """A model of Transformers that reads audio and writes text."""

    auto: ClassVar[str] = "AutoModelForMultimodalLM"
    loader: ClassVar[str | None] = "transformers.AutoModelForMultimodalLM.from_pretrained"
    forward_methods: ClassVar[tuple[str, ...]] = ("hidden_states_and_head",)
    usual: ClassVar[dict[str, Any] | None] = {"objective": {"kind": "audio_lm"}, "evaluate": {"parts": ["loss"]}}
    prompt_media: ClassVar[tuple[str, ...]] = ("audio",)

    @classmethod
    def recognises(cls, folder: Path) -> bool:
        return super().recognises(folder) and has_processor(folder) and takes_audio(folder)

    def own_processor(self) -> Any:
        if self.path is not None and self.start is None and has_tekken(self._folder()):
            return self.load_processor(self._folder(), where="model.path")
        return super().own_processor()

    def load_processor(self, folder: Path, *, where: str) -> Any:
        if has_tekken(folder):
            tokenizer = load_tekken(folder, where=where)
        else:
            tokenizer = super().load_processor(folder, where=where)
        config = self._config()
        if not has_processor(folder) and self.path is not None:
            folder = self._folder()
        if not has_processor(folder) and self.architecture is not None:
            return fresh_processor(config, tokenizer)
        code = self.trust_remote_code
        return load_audio_processor(folder, tokenizer, config=config, trust_remote_code=code, where=where)

    def build(self, *, processor: Any) -> nn.Module:
        from fullshard.families.audio.tower_flops import forward_costs
        from fullshard.hf.adapters.edits import adapter_config, has_adapters

        try:
            module: Any = super().build(processor=processor)
        except RecipeError as error:
            if isinstance(error.__cause__, ImportError):
                raise RecipeError(
                    f"model: {self._config().model_type} cannot be built{because(error.__cause__)}"
                ) from error
            raise
        if module.config.is_encoder_decoder and has_adapters(module):
            # peft's classes for tasks hand tokens to the encoder, which takes audio.
            adapter_config(module).task_type = None
        if processor is not None:
            # Found only when asked for: counting a large tower takes seconds.
            module.clip_costs = lambda: forward_costs(module, processor)
        return module  # type: ignore[no-any-return]

    def lay_out(self, text: str | None, messages: Any, files: Files, processor: Any) -> Row | None:
        from fullshard.families.audio.prompts import audio_prompt, speech_prompt

        if not processor.clip_tokens:
            return speech_prompt(text, messages, files.get("audio", ()), processor, source=self._source())
        return audio_prompt(text, messages, files.get("audio", ()), processor)

    def continued(self, module: nn.Module, rows: Any, way: Continuation, **placed: Any) -> list[list[int]] | None:
        from fullshard.families.audio.speech_decoder import continue_speech

        model: Any = module
        if model.config.is_encoder_decoder:
            return continue_speech(module, rows, way, source=self._source(), **placed)
        return super().continued(module, rows, way, **placed)

    def choose_kernels(self, module: nn.Module, *, device: str, compute: torch.dtype, packed: bool) -> str:
        model: Any = module
        packed = packed and not model.config.is_encoder_decoder
        return super().choose_kernels(module, device=device, compute=compute, packed=packed)

    def media_flops(self, module: nn.Module) -> dict[str, float]:
        from fullshard.families.audio.tower_flops import training_costs

        return training_costs(module, getattr(module, "clip_costs", dict)())

    def _auto(self, config: Any) -> str:
        return "AutoModelForSpeechSeq2Seq" if config.is_encoder_decoder else self.auto

    def longest(self, module: nn.Module) -> int | None:
        model: Any = module
        positions = getattr(model.config, "max_target_positions", None)
        return int(positions) if positions else super().longest(module)

    def load_with(self, folder: str, *, adapter: bool) -> str | None:
        line = super().load_with(folder, adapter=adapter)
        return line.replace(self.auto, self._auto(self._config())) if line else None

    def _bind(self, module: nn.Module) -> None:
        from fullshard.families.audio.padded_clips import ignore_padding

        model: Any = module
        if model.config.is_encoder_decoder:
            from fullshard.families.audio.speech_decoder import bind_speech

            model.towers = bind_speech(module)
        else:
            super()._bind(module)
        _share_position_tables(module)
        for tower in model.towers["audio"]:
            _keep_dtype(module.get_submodule(tower))
            ignore_padding(module.get_submodule(tower))

    def _unused(self, module: nn.Module, processor: Any) -> list[str]:
        from fullshard.families.audio.unused import unused

        model: Any = module
        # An adapter is unused if the layer that it adapts is.
        names = {name: re.sub(r"\.base_layer|\.lora_[AB]\.\w+", "", name) for name in sorted(self.resting(module))}
        found = set(unused(model.config, list(names.values())))
        model.never_heard = {name for name, base in names.items() if base in found}
        return sorted(model.never_heard)

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
    module, so it cannot be a separate unit."""
    model: Any = module
    for kept in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
        if names := getattr(model, kept, None):
            setattr(model, kept, [name for name in names if name != "embed_positions"])


def _keep_dtype(tower: nn.Module) -> None:
    """Lets parts of a tower that normalise by stored numbers give back the dtype that they got: the numbers stay in
    fp32 in any precision, and the next layer's weights do not."""
    for part in tower.modules():
        if any(b.is_floating_point() for b in part.buffers(recurse=False)) and not any(True for _ in part.parameters()):
            part.register_forward_hook(_as_given)


def _as_given(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
    given: Any = inputs[0] if inputs else output
    return output.to(given.dtype) if hasattr(output, "to") and hasattr(given, "dtype") else output


__all__ = ["AudioLM"]
