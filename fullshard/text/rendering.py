"""Renders a conversation with a chat template: the text, the spans of the answers, and what is missing from it.

The text equals that of Transformers' `apply_chat_template`. Answers are found by the template's generation blocks, or
by rendering the conversation up to each answer. Must not know records, tokens or ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from fullshard.errors import DataError
from fullshard.text.conversation import REASONING, Message, joined, to_json

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_LABELS = ("tool_call_id", "id", "index")
"""Keys that only link messages; few templates write them, and nothing is lost without them."""

Span = tuple[int, int]


@dataclass(frozen=True)
class Layout:
    """A conversation as text, with the spans of its answers."""

    text: str
    spans: list[Span]
    marked: bool
    """Whether the template itself marks what the model says."""
    media: Sequence[Span] = ()
    """Placeholders for images and other media, which are never learned."""


@dataclass(frozen=True)
class Rendered:
    """The texts of a conversation."""

    layouts: list[Layout]
    lost: list[str] = field(default_factory=list)
    """What the template does not render."""
    noted: list[str] = field(default_factory=list)
    """What is worth knowing about it."""


@dataclass(frozen=True)
class Template:
    """A tokenizer's chat template with the variables of one record."""

    text: str
    special_tokens: Mapping[str, Any]
    variables: Mapping[str, Any]

    @property
    def marks(self) -> bool:
        """Whether it marks what the model says, with generation blocks."""
        return bool(_GENERATION.search(self.text))

    def without(self, variable: str) -> Template:
        """The same without one variable."""
        rest = {name: value for name, value in self.variables.items() if name != variable}
        return Template(self.text, self.special_tokens, rest)

    def render(self, messages: Sequence[Message], *, prompt: bool = False) -> tuple[str, list[Span]]:
        """The text of a conversation, and the spans that generation blocks mark."""
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, spans = render_jinja_template(
                conversations=[list(messages)],
                chat_template=self.text,
                return_assistant_tokens_mask=self.marks,
                add_generation_prompt=prompt,
                **{**self.variables, **self.special_tokens},
            )
        # A template may also raise Python's errors: text + null, a missing key.
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
            raise DataError(f"the tokenizer's chat template refuses this conversation: {error}") from error
        return texts[0], [(start, stop) for start, stop in (spans[0] if spans else [])]


def render(messages: list[Message], template: Template) -> Rendered:
    """The conversation as one text, or as several if the template rewrites earlier turns."""
    messages, whole, marked = _first_form_that_renders(messages, template)
    missing = list(_unrendered(messages, whole, template))
    lost = [f"{what} that the chat template does not render" for what in missing]
    if template.marks:
        answers = [_says(message, missing) for message in messages if message["role"] == "assistant"]
        # A blank answer would teach the model to say nothing.
        if len(marked) == len(answers):
            marked = [span for span, says in zip(marked, answers, strict=True) if says]
        return Rendered([Layout(whole, marked, marked=True)], lost)
    answered: list[tuple[str, Span]] = []
    for turn, message in enumerate(messages):
        # An answer at the very start has no prompt, so it is context.
        if message["role"] == "assistant" and turn > 0 and _says(message, missing):
            text = template.render(messages[: turn + 1])[0]
            answered.append((text, (_answer_start(messages[:turn], text, template), len(text))))
    layouts = _gathered(whole, answered)
    noted = "answers that the chat template changes later in the conversation, so each became a separate sample"
    return Rendered(layouts, lost, [noted] if len(layouts) > 1 else [])


def _gathered(whole: str, answered: list[tuple[str, Span]]) -> list[Layout]:
    """The fewest texts that contain every answer as it was first rendered.

    Reasoning templates drop the thinking of earlier turns, so a later text may not contain an answer unchanged."""
    texts = [text for text, _ in answered] + [whole]
    spans: dict[int, list[Span]] = {}
    for at, (text, span) in enumerate(answered):
        carrier = next(later for later in reversed(range(at, len(texts))) if texts[later].startswith(text))
        spans.setdefault(carrier, []).append(span)
    return [Layout(texts[at], spans[at], marked=False) for at in sorted(spans)] or [Layout(whole, [], marked=False)]


def _answer_start(before: list[Message], answered: str, template: Template) -> int:
    """Where the answer starts: after the prompt, without what the template opens for the model but does not keep."""
    asked = template.render(before, prompt=True)[0]
    if answered.startswith(asked):
        return len(asked)
    closed = template.render(before)[0]
    if not answered.startswith(closed):
        raise DataError(
            "the tokenizer's chat template changes the question once it is answered, so the answer cannot be "
            "found. Set data.encode = {kind: chat, template: plain}."
        )
    pairs = zip(asked, answered, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(asked), len(answered)))


def _says(message: Message, missing: Sequence[str]) -> bool:
    """Whether any part of an answer is rendered."""
    more = any(message.get(key) and key not in missing for key in ("tool_calls", "function_call", *REASONING))
    return more or bool(joined(message.get("content")).strip())


def _first_form_that_renders(messages: list[Message], template: Template) -> tuple[list[Message], str, list[Span]]:
    """The messages in the first form that the template renders correctly, with their text and marks.

    Templates differ in what they expect for a message without text, for several parts, and for arguments (an object or
    JSON). Given another form they fail, or print Python objects."""
    refusal: DataError | None = None
    for form in _forms(messages):
        try:
            text, spans = template.render(form)
        except DataError as error:
            refusal = refusal or error
            continue
        if not any(notation in text for notation in _notations(form)) and _has_all_parts(form, text):
            return form, text, spans
    raise refusal or DataError(
        "the tokenizer's chat template renders neither content in parts nor arguments correctly. Set "
        "data.encode = {kind: chat, template: plain}."
    )


def _forms(messages: list[Message]) -> Iterator[list[Message]]:
    """The same messages in every form, the most common first."""
    in_parts = any(isinstance(message.get("content"), list) for message in messages)
    has_gap = any("content" not in message for message in messages)
    has_objects = any(_objects(message) for message in messages)
    for gap, is_joined, as_text in product(
        ({}, {"content": None}, {"content": ""}) if has_gap else ({},),
        (False, True) if in_parts else (False,),
        (False, True) if has_objects else (False,),
    ):
        yield [_formed({**gap, **message}, is_joined=is_joined, as_text=as_text) for message in messages]


def _formed(message: Message, *, is_joined: bool, as_text: bool) -> Message:
    content = message.get("content")
    if is_joined and isinstance(content, list):
        message = {**message, "content": joined(content)}
    if as_text:
        if isinstance(content, Mapping):
            message = {**message, "content": to_json(content)}
        calls = [
            {**call, "function": {**call["function"], "arguments": to_json(call["function"]["arguments"])}}
            for call in message.get("tool_calls", ())
        ]
        message = {**message, "tool_calls": calls} if calls else message
    return message


def _objects(message: Message) -> list[Mapping[str, Any]]:
    """Arguments of calls and results of tools that are objects."""
    found = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
    return [value for value in (*found, message.get("content")) if isinstance(value, Mapping) and value]


def _notations(messages: list[Message]) -> Iterator[str]:
    """Texts that appear only if a template printed a Python object."""
    for message in messages:
        yield from (repr(dict(value)) for value in _objects(message))
        content = message.get("content")
        if isinstance(content, list) and content:
            yield repr(content[0])


def _has_all_parts(messages: list[Message], text: str) -> bool:
    parts = [part for message in messages if isinstance(content := message.get("content"), list) for part in content]
    return all(str(part["text"]).strip() in text for part in parts if isinstance(part, Mapping) and "text" in part)


def _unrendered(messages: list[Message], whole: str, template: Template) -> Iterator[str]:
    """What can be removed from the record without changing the text."""
    for name in ("tools", "documents", "functions"):
        if name in template.variables and _same(messages, whole, template.without(name)):
            yield name
    keys = {key for message in messages for key in message if key not in ("role", "content", *_LABELS)}
    for group in ([key for key in REASONING if key in keys], *([key] for key in sorted(keys - {*REASONING}))):
        # The name of a tool is in the call that it answers.
        holders = [
            at for at, m in enumerate(messages) if m.keys() & {*group} and (group, m["role"]) != (["name"], "tool")
        ]
        bare = [{key: value for key, value in message.items() if key not in group} for message in messages]
        if holders and not _matters(messages, bare, holders, whole, template):
            yield from group
    roles = set()
    for at, message in enumerate(messages):
        text = joined(message.get("content")).strip()
        if text and text not in whole and message["role"] not in roles:
            other = [*messages[:at], {**message, "content": "x" if text != "x" else "y"}, *messages[at + 1 :]]
            if not _matters(messages, other, [at], whole, template):
                roles.add(message["role"])
                yield f"a {message['role']} message"


def _matters(messages: list[Message], other: list[Message], changed: list[int], whole: str, template: Template) -> bool:
    """Whether other messages give another text, in whole or up to a changed answer."""
    if not _same(other, whole, template):
        return True
    answers = [at for at in changed if messages[at]["role"] == "assistant"]
    return any(not _same(other[: at + 1], _text(messages[: at + 1], template), template) for at in answers)


def _same(messages: list[Message], text: str | None, template: Template) -> bool:
    """Whether messages render to `text`; None if the template refuses them."""
    return _text(messages, template) == text


def _text(messages: list[Message], template: Template) -> str | None:
    try:
        return template.render(messages)[0]
    except DataError:
        return None


__all__ = ["Layout", "Rendered", "Template", "render"]
