"""The size `tiny` of audio language models: small towers that take clips of two seconds. Must not build modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TEXT: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 1024,
}
AUDIO: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "num_mel_bins": 40,
    "max_source_positions": 100,
}

EXTRA: dict[str, dict[str, Any]] = {
    "phi4_multimodal": {
        **{key: value for key, value in TEXT.items() if key != "head_dim"},
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": [0],  # a plain 0 would be replaced by that of the large vocabulary
        "audio_config": {
            "num_blocks": 2,
            "intermediate_size": 64,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "nemo_conv_channels": 16,
            "bias_max_distance": 64,
        },
        # It is part of the model, but no image reaches it.
        "vision_config": {
            "num_hidden_layers": 2,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_attention_heads": 2,
            "image_size": 28,
            "crop_size": 28,
        },
    },
    "gemma3n": {
        "text_config": {
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_kv_shared_layers": 0,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.0, 0.0],
            "intermediate_size": [128, 128],
        },
        "audio_config": {
            "conf_num_hidden_layers": 2,
            "conf_num_attention_heads": 4,
            "input_feat_size": 32,
            "sscp_conv_channel_size": [16, 8],
            "hidden_size": 32,
        },
        "vision_config": {"hidden_size": 16},
    },
    "whisper": {
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128,
        "num_mel_bins": 40,
        "max_source_positions": 100,
        "vocab_size": 1024,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "decoder_start_token_id": 0,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    },
}
"""What an architecture needs beyond TEXT and AUDIO."""


def tiny_audio(config: Any) -> dict[str, Any]:
    """The keys of `tiny` that this config and its parts have."""
    found: dict[str, Any] = {}
    for name in config.sub_configs:
        part = getattr(config, name)
        if part is not None and hasattr(part, "to_dict"):
            small = TEXT if name == "text_config" else AUDIO if name == "audio_config" else {}
            known = {*part.to_dict(), *part.attribute_map}
            found[name] = {"model_type": part.model_type, **{k: v for k, v in small.items() if k in known}}
    for name, value in EXTRA.get(config.model_type, {}).items():
        found[name] = {**found.get(name, {}), **value} if isinstance(value, Mapping) else value
    return found


__all__ = ["tiny_audio"]
