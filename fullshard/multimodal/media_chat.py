"""Conversations with media as samples: the text of each medium in its place, and only the answers learned.

Must not know how media are read or stored, files or ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from fullshard.contracts.data import Encoded, Features, Record, token_samples
from fullshard.errors import DataError
from fullshard.multimodal.parts import Medium
from fullshard.multimodal.spans import replaced
from fullshard.text.chat import OpenChat
from fullshard.text.conversation import Message
from fullshard.text.rendering import Layout, Rendered, Template, render

_PLAIN = (
    "{{% macro said(content) %}}{{% if content is string %}}{{{{ content }}}}{{% else %}}{{% for part in content %}}"
    "{{% if part['type'] == {name!r} %}}{{{{ {text!r} }}}}{{% else %}}{{{{ part['text'] }}}}{{% endif %}}"
    "{{% endfor %}}{{% endif %}}{{% endmacro %}}"
    "{{% for message in messages %}}{{% if message['role'] == 'assistant' %}}{{{{ 'Assistant:' }}}}"
    "{{% generation %}}{{{{ ' ' + said(message['content']) + eos_token }}}}{{% endgeneration %}}"
    "{{% else %}}{{{{ message['role'] | capitalize + ': ' + said(message['content']) }}}}{{% endif %}}{{{{ '\\n' }}}}"
    "{{% endfor %}}{{% if add_generation_prompt %}}{{{{ 'Assistant:' }}}}{{% endif %}}"
)


def plain_template(name: str, text: str) -> str:
    """A chat template for models without their own, which writes `text` for a part of type `name`."""
    return _PLAIN.format(name=name, text=text)


class TooLong(DataError):
    """A sample that cannot be cut to the sequence length, or a medium that is too long."""


class OpenMediaChat(OpenChat):
    """Renders conversations, puts in the text of each medium, and tokenizes them."""

    medium: ClassVar[Medium]

    def encode_many(self, records: Sequence[Record]) -> list[Encoded]:
        return [self._encode(record) for record in records]

    def annotate_processor(self) -> None:
        if self._is_plain:
            self._tokenizer.chat_template = self._plain()

    def _encode(self, record: Record) -> Encoded:
        raise NotImplementedError

    def _texts_of(self, media: Sequence[Any]) -> list[str]:
        """The text of each medium of a sample before it is tokenized."""
        raise NotImplementedError

    def _sample(self, tokens: Features, media: Sequence[Any]) -> Features:
        """The features of one sample."""
        raise NotImplementedError

    def _plain(self) -> str:
        return plain_template(self.medium.name, self.processor.placeholder)

    def _rendered(self, messages: list[Message], record: Record) -> Rendered:
        _, template = super()._to_render(record)
        template = Template(self._plain(), template.special_tokens, template.variables) if self._is_plain else template
        return render(messages, template)

    def _sampled(self, rendered: Rendered, media: Sequence[Any]) -> Encoded:
        pairs = [self._with_media(layout, media) for layout in rendered.layouts]
        tokens = self._tokenise([layout for layout, _ in pairs])
        return self._fitted(tokens, [shown for _, shown in pairs], rendered)

    def _fitted(self, tokens: Sequence[Features], shown: Sequence[Sequence[Any]], rendered: Rendered) -> Encoded:
        """The samples of these tokens, each with its media, cut to the sequence length."""
        samples = [self._sample(each, media) for each, media in zip(tokens, shown, strict=True)]
        # Which samples are cut or left out depends on tokens and labels alone.
        whole = [token_samples([each], length=self.length) for each in tokens]
        return Encoded(
            [sample for sample, found in zip(samples, whole, strict=True) if found.samples],
            sum(found.truncated for found in whole),
            [reason for found in whole for reason in found.dropped],
            rendered.lost,
            rendered.noted,
        )

    def _with_media(self, layout: Layout, media: Sequence[Any]) -> tuple[Layout, Sequence[Any]]:
        """The layout with the texts of its media, and those media: a part of a conversation may have fewer."""
        mark, noun = self.processor.placeholder, self.medium.noun
        shown = media[: layout.text.count(mark)]
        if layout.text.count(mark) > len(shown):
            raise DataError(
                f"the conversation contains {mark!r} more often than it has {noun}s; the model reads that as one. "
                "Remove it from the texts."
            )
        text, spans, covered = replaced(layout.text, mark, self._texts_of(shown) if shown else [], layout.spans)
        return replace(layout, text=text, spans=spans, media=covered), shown


__all__ = ["OpenMediaChat", "TooLong", "plain_template"]
