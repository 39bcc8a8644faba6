"""The size `tiny` of vision-language models: small towers that take small images. Must not build modules."""

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
PATCH, SIDE = 8, 32

VISION: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "hidden_size": 32,
    "projection_dim": 32,
    "image_size": SIDE,
    "patch_size": PATCH,
}
_QWEN: dict[str, Any] = {
    "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
}
_QWEN_VISION: dict[str, Any] = {"depth": 2, "num_heads": 4, "patch_size": PATCH, "spatial_merge_size": 2}
_GRID = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]

EXTRA: dict[str, dict[str, Any]] = {
    "qwen2_vl": {**_QWEN, "vision_config": {**_QWEN_VISION, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}},
    "qwen2_5_vl": {
        **_QWEN,
        "vision_config": {
            **_QWEN_VISION,
            "hidden_size": 32,
            "intermediate_size": 64,
            "out_hidden_size": 64,
            "window_size": 32,
            "fullatt_block_indexes": [1],
        },
    },
    "qwen3_vl": {
        **_QWEN,
        "vision_config": {
            **_QWEN_VISION,
            "hidden_size": 32,
            "intermediate_size": 64,
            "out_hidden_size": 64,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
    },
    "smolvlm": {"scale_factor": 2},
    "idefics3": {"scale_factor": 2},
    "llava_next": {"image_grid_pinpoints": _GRID},
    "llava_onevision": {"image_grid_pinpoints": _GRID, "vision_aspect_ratio": "anyres_max_4"},
    "internvl": {
        "downsample_ratio": 0.5,
        "vision_config": {"image_size": [SIDE, SIDE], "patch_size": [PATCH, PATCH]},
    },
    "paligemma": {"hidden_size": TEXT["hidden_size"], "projection_dim": TEXT["hidden_size"]},
    "gemma3": {"mm_tokens_per_image": 4, "text_config": {"sliding_window": 4096}},
}
"""What an architecture needs beyond TEXT and VISION."""


def tiny_vision(config: Any) -> dict[str, Any]:
    """The keys of `tiny` that this config and its parts have."""
    found: dict[str, Any] = {}
    for name in config.sub_configs:
        part = getattr(config, name)
        if part is not None and hasattr(part, "to_dict"):
            small = TEXT if name == "text_config" else VISION
            known = {*part.to_dict(), *part.attribute_map}
            found[name] = {"model_type": part.model_type, **{k: v for k, v in small.items() if k in known}}
    for name, value in EXTRA.get(config.model_type, {}).items():
        found[name] = {**found.get(name, {}), **value} if isinstance(value, Mapping) else value
    return found
