"""Prompts as rows for a model: plain text or a conversation, with media files such as images where a family takes them.

Must not know commands, models or ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from fullshard.errors import DataError, SetupError
from fullshard.formatting.plural import counted, join_words
from fullshard.multimodal.parts import Medium
from fullshard.text.tokens import inner_tokenizer

if TYPE_CHECKING:
    import torch

Message = dict[str, Any]
Files = Mapping[str, Sequence[str]]
"""File names by medium, as on the command line: {"image": ["cat.png"]}."""


@dataclass(frozen=True)
class Row:
    """A prompt as the model takes it."""

    tokens: list[int]
    media: dict[str, torch.Tensor] = field(default_factory=dict)
    """Model inputs besides the tokens; empty for a prompt of text alone."""


@runtime_checkable
class TakesMedia(Protocol):
    """A family of models whose prompts may have media. `fullshard generate` has an option for each medium."""

    prompt_media: ClassVar[tuple[str, ...]]
    """The media: image, audio."""

    def lay_out(self, text: str | None, messages: list[Message] | None, files: Files, processor: Any) -> Row | None:
        """A text to continue, or a conversation to answer, with its media files; None if it has no media at all.

        Media are placed at their marks (`<image>`) or parts, or else before the text. Raises DataError for a file that
        cannot be read, and if files and places do not match."""


def row_of(text: str, messages: list[Message] | None, files: Files, family: Any, processor: Any) -> Row:
    """The row of a conversation to answer or, without messages, of a text to continue. Raises SetupError for media that
    the model does not take."""
    takes = isinstance(family, TakesMedia)
    _refuse(files, family.kind(), family.prompt_media if takes else ())
    row = family.lay_out(text, messages, files, processor) if takes else None
    return row or Row(_tokens(text, messages, inner_tokenizer(processor)))


def with_placeholders(text: str, names: Sequence[str], placeholder: str, medium: Medium) -> str:
    """Plain text with the model's placeholder at each mark; without marks, media come first."""
    marks = text.count(medium.mark)
    if names and marks not in (0, len(names)):
        raise DataError(
            f"the prompt has {counted(marks, 'place')} for {medium.noun}s ({medium.mark}) and --{medium.name} is given "
            f"{counted(len(names), 'time')}. Give one {medium.noun} for each place, in order."
        )
    return text.replace(medium.mark, placeholder) if marks else placeholder * len(names) + text


def rendered(messages: list[Message], tokenizer: Any) -> str:
    """A conversation to answer, by the model's chat template."""
    if not tokenizer.chat_template:
        raise SetupError("the tokenizer has no chat template to lay out a conversation. Add --raw to give plain text.")
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def _refuse(files: Files, kind: str, taken: Sequence[str]) -> None:
    for medium, names in files.items():
        if names and medium not in taken:
            raise SetupError(
                f"--{medium} {names[0]}: the model is of kind {kind}, which takes {join_words(['text', *taken])} only. "
                f"Leave --{medium} out, or name a model that takes it."
            )


def _tokens(prompt: str, messages: list[Message] | None, tokenizer: Any) -> list[int]:
    if messages is not None:
        if not tokenizer.chat_template:
            raise SetupError(
                "--messages: the tokenizer has no chat template to lay out a conversation. Give the text itself: "
                "--prompt TEXT."
            )
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        # The template writes the special tokens itself.
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        ids = tokenizer(prompt)["input_ids"]
        if ids and ids[-1] == tokenizer.eos_token_id:
            ids = ids[:-1]  # some tokenizers end every text; here it goes on
    if not ids:
        raise DataError(f"the tokenizer finds no token in the prompt {prompt[:40]!r}. Give another one.")
    return list(ids)


def described(files: Files) -> str:
    """What each prompt has besides its text, for the header of a command."""
    called = {"audio": "clip"}
    named = [(counted(len(names), called.get(medium, medium)), names) for medium, names in files.items() if names]
    parts = [f"{number} ({', '.join(names)})" for number, names in named]
    return f", each with {join_words(parts)}" if parts else ""


__all__ = ["Files", "Row", "TakesMedia", "described", "rendered", "row_of", "with_placeholders"]
