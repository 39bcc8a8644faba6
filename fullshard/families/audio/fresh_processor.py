"""The processor of a model from scratch: Transformers' feature extractor of the architecture, fitted to its config.

Must not know records, batches or ranks.
"""

from __future__ import annotations

from typing import Any

from fullshard.errors import RecipeError
from fullshard.families.audio.processor import AudioProcessor, made_processor
from fullshard.multimodal.media_chat import plain_template

_TOKENS = {
    "gemma3n": {
        "boi_token": "<start_of_image>",
        "boa_token": "<start_of_audio>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
        "eoa_token": "<end_of_audio>",
        "audio_token": "<audio_soft_token>",
    },
    "phi4_multimodal": {"image_token": "<|image|>", "audio_token": "<|audio|>"},
    "qwen2_audio": {
        "audio_token": "<|AUDIO|>",
        "audio_bos_token": "<|audio_bos|>",
        "audio_eos_token": "<|audio_eos|>",
    },
    "voxtral": {"audio_token": "[AUDIO]", "begin_audio_token": "[BEGIN_AUDIO]"},
    "whisper": {
        "start_token": "<|startoftranscript|>",
        "language_token": "<|en|>",
        "task_token": "<|transcribe|>",
        "plain_token": "<|notimestamps|>",
    },
}
"""Tokens that processors look up as attributes of their tokenizer, in the order in which they are added."""


def fresh_processor(config: Any, tokenizer: Any) -> AudioProcessor:
    """Transformers' processor for the config, with the tokens that it needs added to the tokenizer."""
    import transformers
    from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    kind = str(config.model_type)
    if kind not in SETTINGS:
        raise RecipeError(
            f"model.architecture = {kind!r}: from scratch its feature extractor is not known. Known: "
            f"{', '.join(SETTINGS)}. For others write model.path, a folder with weights and processor."
        )
    extraction, settings = SETTINGS[kind](config)
    extractor = getattr(transformers, FEATURE_EXTRACTOR_MAPPING_NAMES[kind])(**extraction)
    tokens = _TOKENS[kind]
    new = [token for token in tokens.values() if token not in tokenizer.get_vocab()]
    tokenizer.add_special_tokens({"additional_special_tokens": new})
    tokenizer._set_model_specific_special_tokens(tokens)
    if not config.is_encoder_decoder:
        audio = tokens["audio_token"]
        around = [tokens.get("audio_bos_token", ""), tokens.get("audio_eos_token", "")]
        settings["chat_template"] = plain_template("audio", audio.join(around))
    return made_processor(PROCESSOR_MAPPING_NAMES[kind], extractor, tokenizer, config, settings)  # type: ignore[no-any-return]


def fit_tokens(config: Any, processor: Any) -> None:
    """Gives the config of a model from scratch the tokens of its processor."""
    for part in (config, getattr(config, "audio_config", None)):
        for name in ("audio_token_id", "audio_token_index"):
            if hasattr(part, name):
                setattr(part, name, processor.audio_token_id)
    if config.is_encoder_decoder:
        start = _TOKENS[config.model_type]["start_token"]
        config.decoder_start_token_id = processor.tokenizer.convert_tokens_to_ids(start)
    if hasattr(getattr(config, "audio_config", None), "vocab_offset"):
        _fit_offsets(config, processor.tokenizer)


def _fit_offsets(config: Any, tokenizer: Any) -> None:
    """For a model whose last tokens have their own embeddings, those of images before those of audio."""
    for name in _TOKENS[config.model_type]:
        setattr(config, f"{name}_id", tokenizer.convert_tokens_to_ids(getattr(tokenizer, name)))
    config.vision_config.vocab_offset, config.audio_config.vocab_offset = config.eoi_token_id, config.eoa_token_id
    config.vision_config.vocab_size = config.eoa_token_id - config.eoi_token_id
    config.audio_config.vocab_size = len(tokenizer) - config.eoa_token_id
    config.text_config.vocab_size_per_layer_input = config.eoi_token_id


def _mel(audio: Any) -> dict[str, Any]:
    """The extractor of Whisper and of towers like its encoder: 100 frames a second, two for each position."""
    return {"feature_size": audio.num_mel_bins, "chunk_length": audio.max_source_positions // 50}


def _whisper(config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return _mel(config), {}


def _tower_like_whisper(config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return _mel(config.audio_config), {}


def _phi4(config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    audio = config.audio_config
    rates = {"audio_compression_rate": audio.time_reduction, "audio_downsample_rate": audio.downsample_rate}
    return {"feature_size": audio.input_size, **rates}, {}


def _gemma3n(config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    settings = {"audio_seq_length": config.audio_soft_tokens_per_image}
    return {"feature_size": config.audio_config.input_feat_size}, settings


SETTINGS = {
    "gemma3n": _gemma3n,
    "phi4_multimodal": _phi4,
    "qwen2_audio": _tower_like_whisper,
    "voxtral": _tower_like_whisper,
    "whisper": _whisper,
}
"""By model type: the settings of the feature extractor and of the whole processor."""

__all__ = ["SETTINGS", "fit_tokens", "fresh_processor"]
