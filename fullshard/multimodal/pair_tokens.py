"""Tokens of texts and images in a model's chat template; only the text is cut.

The processor has `render`, `image_token` and a `tokenizer`. Must not know records, image formats or ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fullshard.errors import DataError, RecipeError
from fullshard.formatting.plural import counted

_FILLERS = ("0", "1 2 3 4")
"""Two texts with different first and last tokens: what their renderings share belongs to the template."""


@dataclass(frozen=True)
class Input:
    """One input of the model."""

    text: str | None
    image_tokens: int
    prompt: str


def tokenise_inputs(inputs: Sequence[Input], processor: Any, *, length: int) -> list[tuple[list[int], bool]]:
    """The tokens of each input, and whether its text was cut to `length`."""
    for one in inputs:
        if one.text is not None and processor.image_token in one.text:
            raise DataError(
                f"the text {one.text[:40]!r} contains {processor.image_token}, which this model reads as an "
                "image. Remove it from the text."
            )
        if processor.image_token in one.prompt:
            raise RecipeError(
                f"data.encode.prompts: {one.prompt[:40]!r} contains {processor.image_token}, which this model "
                "reads as an image. Remove it."
            )
    return [
        (ids, False) if len(ids) <= length else (_cut(ids, one, processor, length=length), True)
        for ids, one in zip(_tokenise(inputs, processor), inputs, strict=True)
    ]


def _tokenise(inputs: Sequence[Input], processor: Any) -> list[list[int]]:
    if not inputs:
        return []
    texts = [processor.render(one.text, image_tokens=one.image_tokens, prompt=one.prompt) for one in inputs]
    # As in Transformers' processors: a template that writes the first special token writes all of them.
    first = processor.tokenizer.bos_token
    adds = first is None or not texts[0].startswith(first)
    settings = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
    found: list[list[int]] = processor.tokenizer(texts, add_special_tokens=adds, **settings)["input_ids"]
    return found


def _cut(ids: list[int], one: Input, processor: Any, *, length: int) -> list[int]:
    """Cuts the end of the text; keeps the image and the template."""
    head, tail = (0, len(ids)) if one.text is None else _ends(one, processor)
    # At least one token of text, or all texts would be equal.
    least = head + tail + (one.text is not None)
    if least <= length:
        return ids[: length - tail] + ids[len(ids) - tail :]
    if not one.image_tokens:
        raise RecipeError(
            f"data.sequence_length = {length} leaves no room for text: the chat template and the prompt take "
            f"{counted(head + tail, 'token')}. Set at least {least}."
        )
    raise DataError(
        f"the image takes {counted(one.image_tokens, 'token')}, and with the chat template {least:,} are needed, but "
        f"data.sequence_length = {length:,}. Raise it, or lower model.max_pixels to make images smaller."
    )


def _ends(one: Input, processor: Any) -> tuple[int, int]:
    """The number of template tokens before and after the text."""
    fillers = [Input(text, one.image_tokens, one.prompt) for text in _FILLERS]
    short, long = _tokenise(fillers, processor)
    return _shared(short, long), _shared(short[::-1], long[::-1])


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the common prefix."""
    same = [a == b for a, b in zip(one, other, strict=False)]
    return same.index(False) if False in same else len(same)
