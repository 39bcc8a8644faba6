"""One question and its answer as prefix and suffix, for models such as PaliGemma that have no chat template.

The model reads the prefix (images, then the question) in both directions and the suffix (the answer) from left to
right. Both are written as Transformers' processor does. Must not know records, files or ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fullshard.contracts.data import Features
from fullshard.errors import DataError
from fullshard.formatting.plural import join_words
from fullshard.images.reading import Picture
from fullshard.text.conversation import Message
from fullshard.text.tokens import sample, shifted


def prefix_sample(messages: Sequence[Message], pictures: Sequence[Picture], processor: Any) -> Features:
    """The tokens of one question and answer. `token_type_ids` is 0 in the prefix and 1 in the suffix, which is
    learned."""
    name = type(processor.whole).__name__
    question, answer = _question_and_answer(messages, name)
    if not pictures:
        raise DataError(f"the record has no image, and {name} needs at least one. Add an image, or remove the record.")
    tokenizer = processor.tokenizer
    prefix = processor.prefix(question, [picture.size for picture in pictures])
    found = tokenizer(prefix, text_pair=answer + tokenizer.eos_token, return_token_type_ids=True, verbose=False)
    ids, types = (np.array(found[key], dtype=np.int32) for key in ("input_ids", "token_type_ids"))
    # A blank answer would teach the model to say nothing.
    learned = (types == 1) & bool(answer.strip())
    return {**sample(ids, shifted(ids, learned)), "token_type_ids": types.astype(np.int8)}


def moved_images(messages: Sequence[Message]) -> bool:
    """Whether an image comes after text: the prefix has it before."""
    kinds = [part.get("type") for message in messages for part in _parts(message)]
    return "image" in kinds[kinds.index("text") :] if "text" in kinds else False


def question_of(messages: Sequence[Message], name: str) -> str:
    """The question of a conversation that is to be answered."""
    _check_roles(messages, ["user"], name)
    return _text(messages[0])


def _question_and_answer(messages: Sequence[Message], name: str) -> tuple[str, str]:
    _check_roles(messages, ["user", "assistant"], name)
    question, answer = messages
    if more := [key for key in answer if key not in ("role", "content") and answer[key]]:
        raise DataError(f"{name} answers with text alone, and the answer has {join_words(more)}. Remove the record.")
    if any(part.get("type") == "image" for part in _parts(answer)):
        raise DataError(f"{name} reads images in the question, and the answer has one. Move it or remove the record.")
    return _text(question), _text(answer)


def _check_roles(messages: Sequence[Message], wanted: list[str], name: str) -> None:
    roles = [message["role"] for message in messages]
    if roles != wanted:
        raise DataError(
            f"{name} takes one question and one answer, and the conversation has the roles {join_words(roles)}. Give "
            f"{join_words(f'one {role} message' for role in wanted)}, or use a model with a chat template."
        )


def _text(message: Message) -> str:
    return "".join(str(part.get("text", "")) for part in _parts(message))


def _parts(message: Message) -> list[dict[str, Any]]:
    content = message.get("content")
    return content if isinstance(content, list) else [{"type": "text", "text": content or ""}]


__all__ = ["moved_images", "prefix_sample", "question_of"]
