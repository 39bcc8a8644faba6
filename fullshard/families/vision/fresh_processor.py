"""The processor of a model from scratch: Transformers' image processor of the architecture, fitted to its config.

Must not know records, batches or ranks.
"""

from __future__ import annotations

from typing import Any

from fullshard.errors import RecipeError
from fullshard.multimodal.media_chat import plain_template
from fullshard.multimodal.processor import ImageTextProcessor, assemble


def fresh_processor(config: Any, tokenizer: Any) -> ImageTextProcessor:
    """Transformers' processor for the config, with the tokens that it needs added to the tokenizer."""
    import transformers
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    kind = str(config.model_type)
    if kind not in SETTINGS:
        raise RecipeError(
            f"model.architecture = {kind!r}: from scratch its image processor is not known. Known: "
            f"{', '.join(SETTINGS)}. For others write model.path, a folder with weights and processor."
        )
    images, whole, tokens, placeholder = SETTINGS[kind](config)
    named = IMAGE_PROCESSOR_MAPPING_NAMES[kind]
    image_class = getattr(transformers, named["pil"] if isinstance(named, dict) else named[0])
    tokenizer.add_special_tokens({"additional_special_tokens": [t for t in tokens if t not in tokenizer.get_vocab()]})
    if named_tokens := _NAMED.get(kind):
        tokenizer.add_special_tokens({}, replace_extra_special_tokens=False)
        tokenizer._set_model_specific_special_tokens(named_tokens)
    settings = {"chat_template": plain_template("image", placeholder), **whole}
    parts = {"image_processor": image_class(**images), "tokenizer": tokenizer}
    return ImageTextProcessor(assemble(PROCESSOR_MAPPING_NAMES[kind], parts, settings), {})


_NAMED = {
    "gemma3": {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    },
    "internvl": {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
}
"""Tokens that a processor looks up as attributes of its tokenizer."""


def _square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


def _qwen(config: Any) -> tuple[dict[str, Any], dict[str, Any], list[str], str]:
    vision = config.vision_config
    side = vision.patch_size * vision.spatial_merge_size
    images = {
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "merge_size": vision.spatial_merge_size,
        "size": {"shortest_edge": side**2, "longest_edge": (16 * side) ** 2},
    }
    tokens = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    return images, {}, tokens, "<|vision_start|><|image_pad|><|vision_end|>"


def _idefics(config: Any) -> tuple[dict[str, Any], dict[str, Any], list[str], str]:
    vision = config.vision_config
    edge = {"longest_edge": vision.image_size}
    images = {"size": edge, "max_image_size": edge, "do_image_splitting": False}
    whole = {"image_seq_len": (vision.image_size // vision.patch_size) ** 2 // config.scale_factor**2}
    tokens = ["<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>"]
    return images, whole, tokens, "<image>"


def _llava(config: Any) -> tuple[dict[str, Any], dict[str, Any], list[str], str]:
    side = config.vision_config.image_size
    images = {"size": {"shortest_edge": side}, "crop_size": _square(side)}
    whole = {
        "patch_size": config.vision_config.patch_size,
        "vision_feature_select_strategy": config.vision_feature_select_strategy,
        "num_additional_image_tokens": 1,
    }
    return images, whole, ["<image>"], "<image>"


def _llava_next(config: Any) -> tuple[dict[str, Any], dict[str, Any], list[str], str]:
    images, whole, tokens, placeholder = _llava(config)
    return {**images, "image_grid_pinpoints": config.image_grid_pinpoints}, whole, tokens, placeholder


def _onevision(config: Any) -> tuple[dict[str, Any], dict[str, Any], list[str], str]:
    vision = config.vision_config
    images = {"size": _square(vision.image_size), "image_grid_pinpoints": config.image_grid_pinpoints}
    whole = {
        "num_image_tokens": (vision.image_size // vision.patch_size) ** 2,
        "vision_feature_select_strategy": config.vision_feature_select_strategy,
        "vision_aspect_ratio": config.vision_aspect_ratio,
    }
    return images, whole, ["<image>", "<video>"], "<image>"


def _internvl(config: Any) -> tuple[dict[str, Any], dict[str, Any], list[str], str]:
    vision = config.vision_config
    (height, width), (rows, columns) = vision.image_size, vision.patch_size
    images = {"size": {"height": height, "width": width}, "crop_to_patches": False}
    tokens = (height // rows) * (width // columns) * config.downsample_ratio**2
    return images, {"image_seq_length": int(tokens)}, list(_NAMED["internvl"].values()), "<IMG_CONTEXT>"


def _gemma(config: Any) -> tuple[dict[str, Any], dict[str, Any], list[str], str]:
    images = {"size": _square(config.vision_config.image_size), "do_pan_and_scan": False}
    names = list(_NAMED["gemma3"].values())
    return images, {"image_seq_length": config.mm_tokens_per_image}, names, "<start_of_image>"


def _paligemma(config: Any) -> tuple[dict[str, Any], dict[str, Any], list[str], str]:
    vision = config.vision_config
    images = {"size": _square(vision.image_size), "image_seq_length": (vision.image_size // vision.patch_size) ** 2}
    return images, {"chat_template": None}, ["<image>"], "<image>"


SETTINGS = {
    "gemma3": _gemma,
    "idefics3": _idefics,
    "internvl": _internvl,
    "llava": _llava,
    "llava_next": _llava_next,
    "llava_onevision": _onevision,
    "paligemma": _paligemma,
    "qwen2_5_vl": _qwen,
    "qwen2_vl": _qwen,
    "qwen3_vl": _qwen,
    "smolvlm": _idefics,
}
"""By model type: the settings of the image processor and of the whole one, tokens to add, and the text for an image."""

__all__ = ["SETTINGS", "fresh_processor"]
