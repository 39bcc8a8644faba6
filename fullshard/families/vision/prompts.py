"""Prompts with images, laid out as in training. Must not know commands, models or ranks."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any

from fullshard.errors import DataError
from fullshard.families.vision import record_images
from fullshard.families.vision.encoders.image_chat import ImageChat
from fullshard.families.vision.prefix_layout import question_of
from fullshard.images.reading import quiet, reason
from fullshard.multimodal.prompts import Row, rendered, with_placeholders

if TYPE_CHECKING:
    from PIL import Image

Message = dict[str, Any]


def image_prompt(text: str | None, messages: list[Message] | None, names: Sequence[str], processor: Any) -> Row | None:
    """The tokens of a prompt and the pixels of its images, as Transformers' processor makes them."""
    if messages is None:
        laid_out, images = with_placeholders(str(text), names, processor.placeholder, record_images.MEDIUM), list(names)
    else:
        record = {"messages": messages, "images": list(names) or None}
        messages, images = ImageChat().with_images(record)
        if processor.takes_suffix:
            laid_out = processor.placeholder * len(images) + question_of(messages, type(processor.whole).__name__)
        else:
            laid_out = rendered(messages, processor.tokenizer) if images else ""
    if not images:
        return None
    pictures = [_opened(image) for image in images]
    return _row(processor, laid_out, pictures)


def _row(processor: Any, text: str, pictures: list[Image.Image]) -> Row:
    names = processor.whole.model_input_names
    kinds = {"return_mm_token_type_ids": True} if "mm_token_type_ids" in names else {}
    # Templates write special tokens themselves, and training adds none.
    found = processor.processed(text, pictures, add_special_tokens=False, **kinds)
    tokens = found["input_ids"][0].tolist()
    return Row(tokens, {k: v for k, v in found.items() if k not in ("input_ids", "attention_mask", "labels")})


def _opened(value: Any) -> Image.Image:
    from PIL import Image, ImageOps

    if isinstance(value, str) and value.startswith(("http://", "https://")):
        raise DataError(f"the image {value[:80]} is a URL, and nothing is downloaded. Download it and give its path.")
    name = f"the image {value}" if isinstance(value, str) and not value.startswith("data:") else "an image"
    given = record_images.read_given(value, 1, allow_urls=False).value
    try:
        with quiet(), Image.open(BytesIO(given) if isinstance(given, bytes) else given) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except MemoryError:
        raise
    except Exception as error:  # depends on the format
        raise DataError(f"{name} cannot be read: {reason(error)}. Give the path of an image file.") from error


__all__ = ["image_prompt"]
