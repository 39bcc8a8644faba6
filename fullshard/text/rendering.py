"""A conversation as its chat template renders it: the text, where the answers stand in it, and what got lost.

The text is what Transformers' own `apply_chat_template` gives for the same messages. Answers are found where the
template marks them, or else by rendering the conversation up to each answer. Must not know records, tokens or ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from fullshard.errors import DataError
from fullshard.text.conversation import REASONING, Message, joined, written

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_LABELS = ("tool_call_id", "id", "index")
"""Keys of a message that only connect it to another one; few templates write them, and nothing is lost with them."""

Span = tuple[int, int]


@dataclass(frozen=True)
class Layout:
    """A conversation as text, and where in it the answers stand."""

    text: str
    spans: list[Span]
    marked: bool
    """The template itself marks what the model says, to the letter."""


@dataclass(frozen=True)
class Rendered:
    """What a conversation gives to learn from."""

    layouts: list[Layout]
    lost: list[str] = field(default_factory=list)
    """What the template leaves out of the text."""
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
        """Whether it marks what the model says by generation blocks."""
        return bool(_GENERATION.search(self.text))

    def without(self, variable: str) -> Template:
        """The same, for a record without this variable."""
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
        # Besides its own errors, a template ends in those of Python: a text added to null, a key that is not there.
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
            raise DataError(f"the tokenizer's chat template refuses this conversation: {error}") from error
        return texts[0], [(start, stop) for start, stop in (spans[0] if spans else [])]


def render(messages: list[Message], template: Template) -> Rendered:
    """The conversation as one text; or as several, where the template rewrites earlier turns later on."""
    messages, whole, marked = _in_a_form_that_renders(messages, template)
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
        # An answer to nothing, at the very start, has no prompt and is context; a blank one says nothing.
        if message["role"] == "assistant" and turn > 0 and _says(message, missing):
            text = template.render(messages[: turn + 1])[0]
            answered.append((text, (_answer_start(messages[:turn], text, template), len(text))))
    layouts = _gathered(whole, answered)
    noted = "answers that the chat template changes later in the conversation, so they became samples of their own"
    return Rendered(layouts, lost, [noted] if len(layouts) > 1 else [])


def _gathered(whole: str, answered: list[tuple[str, Span]]) -> list[Layout]:
    """As few texts as hold every answer the way it was rendered when it was given.

    Reasoning templates drop the thinking of earlier turns, so an answer may never stand again as it was given."""
    texts = [text for text, _ in answered] + [whole]
    spans: dict[int, list[Span]] = {}
    for at, (text, span) in enumerate(answered):
        carrier = next(later for later in reversed(range(at, len(texts))) if texts[later].startswith(text))
        spans.setdefault(carrier, []).append(span)
    return [Layout(texts[at], spans[at], marked=False) for at in sorted(spans)] or [Layout(whole, [], marked=False)]


def _answer_start(before: list[Message], answered: str, template: Template) -> int:
    """Where the answer starts: after the prompt, less what the template opens for the model but does not keep."""
    asked = template.render(before, prompt=True)[0]
    if answered.startswith(asked):
        return len(asked)
    closed = template.render(before)[0]
    if not answered.startswith(closed):
        raise DataError(
            "the tokenizer's chat template changes the question once it is answered, so the answer cannot be told "
            "from it. Set data.encode = {kind: chat, template: plain}."
        )
    pairs = zip(asked, answered, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(asked), len(answered)))


def _says(message: Message, missing: Sequence[str]) -> bool:
    """Whether anything of an answer is rendered."""
    more = any(message.get(key) and key not in missing for key in ("tool_calls", "function_call", *REASONING))
    return more or bool(joined(message.get("content")).strip())


def _in_a_form_that_renders(messages: list[Message], template: Template) -> tuple[list[Message], str, list[Span]]:
    """The messages in the first form that the template can write out, with their text and marks.

    Templates differ in what they expect where a message has no text, where it has several parts, and whether arguments
    are an object or JSON; given the other, they fail, or print the notation of Python."""
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
        "the tokenizer's chat template writes neither a content in parts nor arguments the way they are meant. Set "
        "data.encode = {kind: chat, template: plain}."
    )


def _forms(messages: list[Message]) -> Iterator[list[Message]]:
    """The same messages in every form, the most usual first."""
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
            message = {**message, "content": written(content)}
        calls = [
            {**call, "function": {**call["function"], "arguments": written(call["function"]["arguments"])}}
            for call in message.get("tool_calls", ())
        ]
        message = {**message, "tool_calls": calls} if calls else message
    return message


def _objects(message: Message) -> list[Mapping[str, Any]]:
    """Arguments of calls, and a tool's result, that are given as objects."""
    found = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
    return [value for value in (*found, message.get("content")) if isinstance(value, Mapping) and value]


def _notations(messages: list[Message]) -> Iterator[str]:
    """What would show that a template printed a Python object instead of writing its text."""
    for message in messages:
        yield from (repr(dict(value)) for value in _objects(message))
        content = message.get("content")
        if isinstance(content, list) and content:
            yield repr(content[0])


def _has_all_parts(messages: list[Message], text: str) -> bool:
    parts = [part for message in messages if isinstance(content := message.get("content"), list) for part in content]
    return all(str(part["text"]).strip() in text for part in parts if isinstance(part, Mapping) and "text" in part)


def _unrendered(messages: list[Message], whole: str, template: Template) -> Iterator[str]:
    """What could be left out of the record without changing the text."""
    for name in ("tools", "documents", "functions"):
        if name in template.variables and _same(messages, whole, template.without(name)):
            yield name
    keys = {key for message in messages for key in message if key not in ("role", "content", *_LABELS)}
    for group in ([key for key in REASONING if key in keys], *([key] for key in sorted(keys - {*REASONING}))):
        # The name of a tool stands in the call that it answers.
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
    """Whether other messages give another text: the whole of it, or the part up to an answer that is changed."""
    if not _same(other, whole, template):
        return True
    answers = [at for at in changed if messages[at]["role"] == "assistant"]
    return any(not _same(other[: at + 1], _text(messages[: at + 1], template), template) for at in answers)


def _same(messages: list[Message], text: str | None, template: Template) -> bool:
    """What the template cannot do without has an effect: without a text it is another."""
    return _text(messages, template) == text


def _text(messages: list[Message], template: Template) -> str | None:
    try:
        return template.render(messages)[0]
    except DataError:
        return None


__all__ = ["Layout", "Rendered", "Template", "render"]
