"""The processor of an audio language model: Transformers' own feature extractor, and the text of a clip.

Some of Transformers' processors are called with text and audio; one cuts audio into chunks and takes no audio; a speech
encoder-decoder has no text for audio at all. Must not know records, batches or ranks.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fullshard.errors import RecipeError
from fullshard.multimodal.combine import combine
from fullshard.multimodal.processor import Recorder, assemble

KEPT = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
_OF_TEXT = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "labels", "num_audio_tokens"}
_PACKAGES = ("torchaudio", "torchvision", "librosa", "mistral-common", "timm", "scipy", "sentencepiece")
"""What extractors, processors and models may need besides Transformers."""


class AudioProcessor:
    """Texts and clips as the model takes them."""

    clip_tokens: bool = True
    """Whether a clip has tokens in the text, one for each vector that the tower gives."""

    def __init__(self, extractor: Any, tokenizer: Any, *, class_name: str, kept: dict[str, Any] | None = None) -> None:
        self.extractor, self.tokenizer = extractor, tokenizer
        self.class_name, self._kept = class_name, kept or {}

    @property
    def rate(self) -> int:
        """Samples in a second of audio, as the model takes it."""
        return int(self.extractor.sampling_rate)

    @property
    def longest(self) -> int | None:
        """The most samples of a clip: the extractor would silently cut the rest. None: any number."""
        taken = inspect.signature(self.extractor.__call__).parameters
        if "truncation" not in taken or taken["truncation"].default is not True:
            return None
        most = taken["max_length"].default or getattr(self.extractor, "n_samples", None)
        return int(most) if most else None

    @property
    def placeholder(self) -> str:
        """What a chat template writes for a clip."""
        raise NotImplementedError

    @functools.cached_property
    def audio_token_id(self) -> int:
        """The token that the model replaces by a part of a clip; -1 if it has none."""
        return int(self.tokenizer.convert_tokens_to_ids(self.placeholder)) if self.clip_tokens else -1

    def clip_text(self, samples: int) -> str:
        """The text of a clip with this number of samples, before it is tokenized."""
        raise NotImplementedError

    def features(self, clips: Sequence[np.ndarray]) -> dict[str, Any]:
        """The tensors of clips, as the model takes them."""
        raise NotImplementedError

    def takes(self, samples: int) -> bool:
        """Whether the extractor gives anything for a clip this short: some fail below one window."""
        try:
            return samples >= self.rate // 10 or bool(self.features([np.zeros(samples, dtype=np.float32)]))
        except Exception:  # of any kind
            return False

    def to_json_string(self) -> str:
        """Everything that decides the layout of inputs, except the tokenizer."""
        settings = {key: value for key, value in self.extractor.to_dict().items() if not key.startswith("_")}
        return json.dumps([self.class_name, settings, self._layout()], sort_keys=True, default=str)

    def _layout(self) -> Any:
        return None

    def save_pretrained(self, folder: Any) -> None:
        self.tokenizer.save_pretrained(folder)
        if not self._kept:
            self.extractor.save_pretrained(folder)
            settings = {"processor_class": self.class_name, **self._settings()}
            (Path(folder) / "processor_config.json").write_text(json.dumps(settings, indent=2) + "\n")
        for name, settings in self._kept.items():
            (Path(folder) / name).write_text(json.dumps(settings, indent=2) + "\n")

    def _settings(self) -> dict[str, Any]:
        """Settings of the processor besides its parts."""
        return {}


class WholeProcessor(AudioProcessor):
    """Transformers' processor, called with text and audio only."""

    def __init__(self, whole: Any, extractor: Any, **more: Any) -> None:
        super().__init__(extractor, whole.tokenizer, class_name=type(whole).__name__, **more)
        self.whole = whole
        if isinstance(whole.chat_template, str):
            self.tokenizer.chat_template = whole.chat_template
        self.clip_text = functools.lru_cache(4096)(self._clip_text)  # type: ignore[method-assign]

    @property
    def placeholder(self) -> str:
        found = getattr(self.whole, "audio_token", None)
        if found is None:
            raise RecipeError(
                f"model: {self.class_name} does not name the token of a clip, so audio cannot be placed among the "
                "tokens. This model is not supported."
            )
        return str(found)

    def _clip_text(self, samples: int) -> str:
        # The text follows from the length, so silence gives the same.
        recorder = Recorder(self.tokenizer)
        self.whole.tokenizer = recorder
        try:
            self._called(self.placeholder, [np.zeros(samples, dtype=np.float32)])
        finally:
            self.whole.tokenizer = self.tokenizer
        return recorder.text

    def features(self, clips: Sequence[np.ndarray]) -> dict[str, Any]:
        """One clip at a time: features must not depend on other clips, and Phi-4's extractor fails on some lengths that
        it gets together."""
        found = [self._extracted([clip] * self._at_once) for clip in clips]
        alone = [{name: value[: len(value) // self._at_once] for name, value in each.items()} for each in found]
        return dict(combine(alone, along={}))

    @functools.cached_property
    def _at_once(self) -> int:
        """How many clips an extractor needs to give a mask: some give none for a single clip."""
        short = np.zeros(self.rate // 4, dtype=np.float32)
        return 1 if self._extracted([short]).keys() == self._extracted([short] * 2).keys() else 2

    def _extracted(self, clips: Sequence[np.ndarray]) -> dict[str, Any]:
        found = self._called(self.placeholder * len(clips), clips)
        return {name: value for name, value in found.items() if name not in _OF_TEXT}

    def _called(self, text: str, clips: Sequence[np.ndarray]) -> Any:
        return self.whole(text=[text], audio=list(clips), sampling_rate=self.rate, return_tensors="pt")

    def _layout(self) -> Any:
        return {k: v for k, v in vars(self.whole).items() if isinstance(v, (str, int, float, bool, type(None)))}

    def _settings(self) -> dict[str, Any]:
        # The first class above the assembled one is Transformers'.
        known = inspect.signature(type(self.whole).__mro__[1]).parameters
        return {
            k: v for k in known if isinstance(v := getattr(self.whole, k, None), (str, int)) and k != "chat_template"
        }


class ChunkProcessor(AudioProcessor):
    """A clip in chunks of equal length, the last padded with silence, as Voxtral takes it."""

    def __init__(self, extractor: Any, tokenizer: Any, config: Any, **more: Any) -> None:
        super().__init__(extractor, tokenizer, **more)
        audio = config.audio_config
        self._frames = 2 * audio.max_source_positions  # the tower's second convolution halves them
        self._samples: int = self._frames * extractor.hop_length
        # Vectors of the tower are joined until they are as wide as its feed-forward layers.
        self._tokens: int = audio.max_source_positions * audio.hidden_size // audio.intermediate_size

    @property
    def longest(self) -> int | None:
        return None

    @property
    def placeholder(self) -> str:
        return "[AUDIO]"

    def clip_text(self, samples: int) -> str:
        start = "[BEGIN_AUDIO]" if "[BEGIN_AUDIO]" in self.tokenizer.get_vocab() else ""
        return start + self.placeholder * (self._tokens * -(-samples // self._samples))

    def features(self, clips: Sequence[np.ndarray]) -> dict[str, Any]:
        import torch

        padding = {"padding": True, "truncation": False, "pad_to_multiple_of": self._samples}
        found = []
        for clip in clips:
            made = self.extractor(clip, sampling_rate=self.rate, return_tensors="pt", **padding)["input_features"]
            found.append(made.reshape(self.extractor.feature_size, -1, self._frames).transpose(0, 1))
        return {"input_features": torch.cat(found)}

    def _layout(self) -> Any:
        return [self._frames, self._tokens]


class SpeechProcessor(AudioProcessor):
    """Audio for the encoder of a speech encoder-decoder; the decoder reads text alone."""

    clip_tokens = False

    def features(self, clips: Sequence[np.ndarray]) -> dict[str, Any]:
        return dict(self.extractor(list(clips), sampling_rate=self.rate, return_tensors="pt"))


def made_processor(class_name: str, extractor: Any, tokenizer: Any, config: Any, settings: dict[str, Any]) -> Any:
    """The processor of a model, by what its class in Transformers takes. `settings` may hold `kept` files."""
    import transformers

    settings = dict(settings)
    kept = settings.pop("kept", {})
    if (template := settings.get("chat_template")) is not None:
        # The tokenizer's own may know no audio.
        tokenizer.chat_template = template
    if config.is_encoder_decoder:
        return SpeechProcessor(extractor, tokenizer, class_name=class_name, kept=kept)
    found: Any = getattr(transformers, class_name, None)
    if found is not None and "audio" not in inspect.signature(found.__call__).parameters:
        if not hasattr(config.audio_config, "max_source_positions"):
            raise RecipeError(f"model: {class_name} takes no audio, so this model is not supported.")
        return ChunkProcessor(extractor, tokenizer, config, class_name=class_name, kept=kept)
    parts = {"feature_extractor": extractor, "audio_processor": extractor, "tokenizer": tokenizer}
    return WholeProcessor(assemble(class_name, parts, settings), extractor, kept=kept)


def load_audio_processor(folder: Path, tokenizer: Any, *, config: Any, trust_remote_code: bool, where: str) -> Any:
    """The processor of a model's folder."""
    from transformers import AutoFeatureExtractor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    kept = {name: json.loads((folder / name).read_text()) for name in KEPT if (folder / name).is_file()}
    if not kept:
        raise RecipeError(
            f"{where}: {folder} has no feature extractor (no preprocessor_config.json or processor_config.json). Give "
            "a folder with the processor of an audio language model."
        )
    code = trust_remote_code
    try:
        extractor = AutoFeatureExtractor.from_pretrained(folder, trust_remote_code=code, local_files_only=True)
    except Exception as error:  # of any kind
        raise RecipeError(f"{where}: the feature extractor in {folder} cannot be loaded{because(error)}") from error
    settings: dict[str, Any] = {**kept.get("processor_config.json", {}), "kept": kept}
    named = settings.get("processor_class") or kept.get("preprocessor_config.json", {}).get("processor_class")
    template = folder / "chat_template.jinja"
    if template.is_file():
        settings["chat_template"] = template.read_text()
    class_name = PROCESSOR_MAPPING_NAMES.get(str(config.model_type)) or named
    if class_name is None:
        raise RecipeError(f"{where}: Transformers knows no processor for models of type {config.model_type}.")
    return made_processor(str(class_name), extractor, tokenizer, config, settings)


def because(error: Exception) -> str:
    """Why Transformers cannot load something, as the end of a sentence; with the install line for a missing package."""
    text = str(error)
    missing = [name for name in _PACKAGES if re.search(name.replace("-", "[-_]"), text, flags=re.IGNORECASE)]
    if isinstance(error, ImportError) and missing:
        return f": it needs {' and '.join(missing)}. Install it with: pip install {' '.join(missing)}"
    reason = (text.strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    return f" ({reason})."


__all__ = ["AudioProcessor", "ChunkProcessor", "SpeechProcessor", "WholeProcessor", "load_audio_processor"]
