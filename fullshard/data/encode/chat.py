"""Conversations and question-answer pairs, learned on the answers only.

A record is `messages`, `conversations`, `instruction` with `input` and `output`, or one of the pairs in `PAIRS`. The
tokenizer's chat template lays it out, or a plain one.
Must not know files or ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fullshard.data.base import Encoder, Features, Record
from fullshard.data.records import keys_found
from fullshard.data.tokens import collate_tokens, sample, shifted, tokenizer_of
from fullshard.errors import DataError

PAIRS = (
    ("problem", "expected_answer"),
    ("question", "expected_answer"),
    ("question", "answer"),
    ("input", "output"),
    ("instruction", "response"),
    ("prompt", "completion"),
    ("query", "answer"),
    ("query", "response"),
    ("problem statement", "solution"),
)
"""Question and answer columns that are understood without being named."""
INSTRUCTED = (["instruction", "input"], "output")
"""The columns of a question in two parts, the second of which may be empty, and of its answer."""
FORMS = (
    'chat: {"messages": [{"role": "user", "content": "..."}, ...]}, {"conversations": [{"from": "human", "value": '
    '"..."}, ...]}, instruction/input/output, or a pair of '
) + ", ".join(f"{question}/{answer}" for question, answer in PAIRS)
PLAIN = (
    "{% if bos_token is defined and bos_token != eos_token %}{{ bos_token }}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] + '\n\n' }}"
    "{% elif message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\n' }}"
    "{% else %}{{ 'Assistant:' }}{% generation %}{{ ' ' + message['content'] }}"
    "{{ eos_token if eos_token is defined else '\n' }}{% endgeneration %}{{ '\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""The layout for a tokenizer without a chat template; `leave_on` puts it on the exported tokenizer."""

_KNOWN = frozenset(key for pair in PAIRS for key in pair)
_ROLES = {"system": "system", "user": "user", "assistant": "assistant"}
_ALIASES = {"human": "user", "gpt": "assistant", "model": "assistant"}
_LISTS = {"messages": ("role", "content"), "conversations": ("from", "value")}
"""Columns that hold a whole conversation, and what their entries call the speaker and the text."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

Message = dict[str, str]
Span = tuple[int, int]


@dataclass(frozen=True)
class _Layout:
    """A conversation as text, and where in it the answers stand."""

    text: str
    spans: list[Span]
    marked: bool
    """The template itself marks what the model says, to the letter."""


class Chat(Encoder):
    """Conversations and question-answer pairs."""

    template: Literal["auto", "plain"] = "auto"
    """auto: the tokenizer's chat template where it has one; plain: `User: ...`, `Assistant: ...`."""
    train_on: Literal["answers", "all"] = "answers"
    """Learn the answers (the assistant's text and its end-of-turn token; never a blank answer), or every token."""
    question: str | list[str] | None = None
    """The column of the question, or several to be joined by an empty line; null: one of the known pairs."""
    answer: str | None = None
    """The column of the answer; null: one of the known pairs."""

    @staticmethod
    def accepts(record: Record) -> bool:
        """Whether a record has one of this encoder's forms."""
        keys = {key for key, value in record.items() if value is not None}
        return bool(keys & _LISTS.keys()) or _is_instructed(record) or any(keys >= set(pair) for pair in PAIRS)

    def encode(self, record: Record, processor: Any, *, length: int) -> Sequence[Features]:
        return self.encode_many([record], processor, length=length)[0]

    def encode_many(self, records: Sequence[Record], processor: Any, *, length: int) -> list[Sequence[Features]]:
        tokenizer = tokenizer_of(processor, needed_by="chat")
        if not tokenizer.is_fast:
            raise DataError(
                f"{type(tokenizer).__name__} does not tell which characters a token covers, so answers cannot be found "
                "exactly. Use a tokenizer with a tokenizer.json."
            )
        template = PLAIN if self._is_plain(tokenizer) else tokenizer.get_chat_template()
        layouts = [_layouts(self.conversation(record), tokenizer, template) for record in records]
        flat = [layout for several in layouts for layout in several]
        if not flat:
            return [[] for _ in records]
        samples = iter(self._tokenise(flat, tokenizer))
        return [[next(samples) for _ in several] for several in layouts]

    def notes(self, processor: Any) -> list[str]:
        tokenizer = tokenizer_of(processor, needed_by="chat")
        if not self._is_plain(tokenizer):
            return ["chat template: the tokenizer's own"]
        why = "as data.encode says" if self.template == "plain" else "the tokenizer has none"
        return [f"chat template: plain (User: ... / Assistant: ...), {why}"]

    def leave_on(self, processor: Any, *, length: int) -> None:
        tokenizer = tokenizer_of(processor, needed_by="chat")
        if self._is_plain(tokenizer):
            tokenizer.chat_template = PLAIN

    def _is_plain(self, tokenizer: Any) -> bool:
        return self.template == "plain" or not tokenizer.chat_template

    def texts(self, record: Record) -> list[str]:
        return [message["content"] for message in self.conversation(record)]

    def collate(self, samples: Sequence[Features], *, length: int | None) -> dict[str, Any]:
        return collate_tokens(samples, length=length)

    def conversation(self, record: Record) -> list[Message]:
        """The record as messages of system, user and assistant."""
        lists = [key for key in _LISTS if record.get(key) is not None]
        if self.question is None and self.answer is None and lists:
            if len(lists) > 1:
                raise DataError(f"the record has both {' and '.join(map(repr, lists))}. Keep one of them.")
            if any(all(record.get(key) is not None for key in pair) for pair in PAIRS) or _is_instructed(record):
                raise DataError(f"the record has {lists[0]!r} and a pair as well. {_choose(record)}")
            messages = _messages(record[lists[0]], column=lists[0])
        else:
            questions, answer = self._columns(record)
            parts = [_string(record, column) for column in questions]
            messages = [
                {"role": "user", "content": "\n\n".join(part for part in parts if part)},
                {"role": "assistant", "content": _string(record, answer)},
            ]
        if record.get("system"):
            if messages[0]["role"] == "system":
                raise DataError("the record has a 'system' column and a system message as well. Keep one of them.")
            messages.insert(0, {"role": "system", "content": _string(record, "system")})
        return messages

    def _columns(self, record: Record) -> tuple[list[str], str]:
        if (self.question is None) != (self.answer is None):
            raise DataError("data.encode names only one of question and answer. Name both columns, or neither.")
        if self.question is not None and self.answer is not None:
            questions = [self.question] if isinstance(self.question, str) else self.question
            missing = [key for key in (*questions, self.answer) if key not in record]
            if missing:
                raise DataError(f"no {', '.join(map(repr, missing))} in the record. {_choose(record)}")
            return [key for key in questions if record[key] is not None], self.answer
        present = {key for key in _KNOWN if record.get(key) is not None}
        # An empty column says nothing, so it does not make the choice ambiguous.
        spoken = {key for key in present if str(record[key]).strip()}
        if _is_instructed(record) and spoken <= {*INSTRUCTED[0], INSTRUCTED[1]}:
            return [key for key in INSTRUCTED[0] if key in spoken], INSTRUCTED[1]
        pairs = [pair for pair in PAIRS if set(pair) <= present]
        if not pairs:
            raise DataError(f"no conversation found in the record. {_choose(record)}")
        fitting = [pair for pair in pairs if spoken <= set(pair)]
        if len(fitting) != 1:
            raise DataError(f"it is not clear which columns are question and answer. {_choose(record)}")
        return [fitting[0][0]], fitting[0][1]

    def _tokenise(self, layouts: list[_Layout], tokenizer: Any) -> list[Features]:
        encoded = tokenizer(
            [layout.text for layout in layouts],
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        samples = []
        for layout, ids, offsets in zip(layouts, encoded["input_ids"], encoded["offset_mapping"], strict=True):
            learned = _answer_tokens(layout, ids, np.array(offsets).reshape(-1, 2), special)
            if (
                not layout.marked
                and len(ids)
                and learned[-1]
                and ids[-1] not in special
                and tokenizer.eos_token_id is not None
            ):
                # The template ends the answer with nothing the model could learn to stop at.
                ids, learned = [*ids, tokenizer.eos_token_id], np.append(learned, True)
            array = np.array(ids, dtype=np.int32)
            samples.append(sample(array, shifted(array, learned if self.train_on == "answers" else None)))
        return samples


def _choose(record: Record) -> str:
    return (
        f"{keys_found(record)} Accepted: {FORMS}. For other columns set data.encode = "
        " {kind: chat, question: COLUMN, answer: COLUMN}."
    )


def _is_instructed(record: Record) -> bool:
    questions, answer = INSTRUCTED
    return {*questions, answer} <= record.keys() and None not in (record[questions[0]], record[answer])


def _string(record: Record, key: str) -> str:
    value = record[key]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise DataError(f"{key!r} must be a string, found {type(value).__name__}.")
    return value


def _messages(value: Any, *, column: str) -> list[Message]:
    speaker, said = _LISTS[column]
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise DataError(f"{column!r} must be a list of at least one {{{speaker}, {said}}}.")
    messages = []
    for number, entry in enumerate(value, start=1):
        if not isinstance(entry, Mapping) or speaker not in entry or said not in entry:
            found = ", ".join(map(repr, entry)) if isinstance(entry, Mapping) else type(entry).__name__
            raise DataError(f"message {number} must have {speaker!r} and {said!r}, found {found}.")
        role = _ALIASES.get(str(entry[speaker]), str(entry[speaker]))
        if role not in _ROLES:
            raise DataError(
                f"message {number} has the role {entry[speaker]!r}. Allowed: {', '.join((*_ROLES, *_ALIASES))}."
            )
        if not isinstance(entry[said], str):
            raise DataError(f"message {number}: {said!r} must be a string, found {type(entry[said]).__name__}.")
        messages.append({"role": role, "content": entry[said]})
    return messages


def _render(messages: list[Message], tokenizer: Any, template: str, *, prompt: bool = False) -> tuple[str, list[Span]]:
    """The text of a conversation, and the spans that the template's generation blocks mark."""
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        texts, spans = render_jinja_template(
            conversations=[messages],
            chat_template=template,
            return_assistant_tokens_mask=bool(_GENERATION.search(template)),
            add_generation_prompt=prompt,
            **tokenizer.special_tokens_map,
        )
    except TemplateError as error:
        raise DataError(f"the tokenizer's chat template refuses this conversation: {error}") from error
    return texts[0], [(start, stop) for start, stop in (spans[0] if spans else [])]


def _layouts(messages: list[Message], tokenizer: Any, template: str) -> list[_Layout]:
    """The conversation as one text; or as one text for each answer, when the template rewrites earlier turns."""
    whole, marked = _render(messages, tokenizer, template)
    if _GENERATION.search(template):
        answers = [message["content"] for message in messages if message["role"] == "assistant"]
        # A blank answer would teach the model to say nothing.
        if len(marked) == len(answers):
            marked = [span for span, answer in zip(marked, answers, strict=True) if answer.strip()]
        return [_Layout(whole, marked, marked=True)]
    spans: list[Span] = []
    apart: list[_Layout] = []
    for turn, message in enumerate(messages):
        # An answer to nothing, at the very start, has no prompt and is context; a blank one says nothing.
        if message["role"] == "assistant" and turn > 0 and message["content"].strip():
            answered = _render(messages[: turn + 1], tokenizer, template)[0]
            spans.append((_answer_start(messages[:turn], answered, tokenizer, template), len(answered)))
            apart.append(_Layout(answered, spans[-1:], marked=False))
    if all(whole.startswith(layout.text) for layout in apart):
        return [_Layout(whole, spans, marked=False)]
    # Reasoning templates drop the thinking of earlier turns, so an answer never stands again as it was given.
    return apart


def _answer_start(before: list[Message], answered: str, tokenizer: Any, template: str) -> int:
    """Where the answer starts: after the prompt, less what the template opens for the model but does not keep."""
    asked = _render(before, tokenizer, template, prompt=True)[0]
    if answered.startswith(asked):
        return len(asked)
    closed = _render(before, tokenizer, template)[0]
    if not answered.startswith(closed):
        raise DataError(
            "the tokenizer's chat template changes the question once it is answered, so the answer cannot be told "
            "from it. Set data.encode = {kind: chat, template: plain}."
        )
    pairs = zip(asked, answered, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(asked), len(answered)))


def _answer_tokens(layout: _Layout, ids: list[int], offsets: np.ndarray, special: set[int]) -> np.ndarray:
    """Which tokens overlap an answer; not the white space that a template sets after the end-of-turn token."""
    learned = np.zeros(len(ids), dtype=bool)
    first, last = offsets[:, 0], np.maximum(offsets[:, 1], offsets[:, 0] + 1)
    for start, stop in layout.spans:
        inside = np.flatnonzero((first < stop) & (last > start))
        if not layout.marked:
            ends = [at for at in inside if ids[at] in special]
            if ends and not layout.text[offsets[ends[-1], 1] : stop].strip():
                inside = inside[inside <= ends[-1]]
        learned[inside] = True
    return learned


__all__ = ["Chat"]
