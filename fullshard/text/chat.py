"""Conversations and question-answer pairs for every family of token models; only the answers are learned.

A record has `messages`, `conversations`, `instruction` with `input` and `output`, or one of the pairs in `PAIRS`. Its
other columns (`tools`, `documents`, ...) are variables of the chat template: the tokenizer's, or a plain one. Must not
know files, ranks or any family.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np

from fullshard.config.problems import sort_of
from fullshard.contracts.data import Encoded, Encoder, Features, OpenEncoder, Record, token_samples
from fullshard.data.records import keys_found
from fullshard.errors import DataError
from fullshard.text.conversation import LISTS, Message, joined, read_messages, read_variables, to_json
from fullshard.text.rendering import Layout, Template, render
from fullshard.text.tokens import collate_tokens, sample, shifted, tokenizer_of

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
    "{% if tools %}{{ 'Tools: ' + (tools | tojson) + '\n\n' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] in ('system', 'developer') %}{{ message['content'] + '\n\n' }}"
    "{% elif message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\n' }}"
    "{% elif message['role'] in ('tool', 'ipython') %}{{ 'Tool: ' + message['content'] + '\n' }}"
    "{% else %}{{ 'Assistant:' }}{% generation %}{{ ' ' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}{{ '\nCall: ' + (call['function'] | tojson) }}{% endfor %}"
    "{{ eos_token if eos_token is defined else '\n' }}{% endgeneration %}{{ '\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""The layout for a tokenizer without a chat template; exported with the tokenizer."""

_KNOWN = frozenset(key for pair in PAIRS for key in pair)


class ChatEncoder(Encoder):
    """Conversations and question-answer pairs."""

    forms: ClassVar[str] = FORMS
    conversations: ClassVar[bool] = True

    template: Literal["auto", "plain"] = "auto"
    """auto: the tokenizer's chat template if it has one; plain: `User: ...`, `Assistant: ...`."""
    train_on: Literal["answers", "all"] = "answers"
    """Learn the answers (the assistant's text and its end-of-turn token; never a blank answer), or every token."""
    question: str | list[str] | None = None
    """The column of the question, or several to be joined by an empty line; null: one of the known pairs."""
    answer: str | None = None
    """The column of the answer; null: one of the known pairs."""

    @staticmethod
    def accepts(record: Record) -> bool:
        keys = {key for key, value in record.items() if value is not None}
        return bool(keys & LISTS.keys()) or _is_instructed(record) or any(keys >= set(pair) for pair in PAIRS)

    def texts(self, record: Record) -> list[str]:
        said = [
            text
            for message in self.conversation(record)
            for text in (joined(message.get("content")), *map(to_json, message.get("tool_calls", ())))
        ]
        return [*said, *map(to_json, self.variables(record).get("tools", ()))]

    def open(self, processor: Any, *, length: int) -> OpenChat:
        return OpenChat(self, processor, length=length)

    def collate(self, samples: Sequence[Features], *, length: int | None) -> dict[str, Any]:
        return collate_tokens(samples, length=length)

    def conversation(self, record: Record) -> list[Message]:
        """The record as messages, in the form that chat templates read."""
        lists = [key for key in LISTS if record.get(key) is not None]
        if self.question is None and self.answer is None and lists:
            if len(lists) > 1:
                raise DataError(f"the record has both {' and '.join(map(repr, lists))}. Keep one of them.")
            if any(all(record.get(key) is not None for key in pair) for pair in PAIRS) or _is_instructed(record):
                raise DataError(f"the record has {lists[0]!r} and a pair as well. {self.known_forms(record)}")
            messages = read_messages(record[lists[0]], column=lists[0])
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

    def variables(self, record: Record) -> dict[str, Any]:
        """The record's other variables of the chat template: tools, documents and every other column."""
        lists = any(record.get(key) is not None for key in LISTS) and self.question is None
        questions, answer = ([], "") if lists else self._columns(record)
        return read_variables(record, used=["system", *questions, answer])

    def known_forms(self, record: Record) -> str:
        """What a record has, and what it may have, for an error message."""
        columns = f"{{kind: {self.kind()}, question: COLUMN, answer: COLUMN}}"
        return f"{keys_found(record)} Accepted: {self.forms}. For other columns set data.encode = {columns}."

    def _columns(self, record: Record) -> tuple[list[str], str]:
        if (self.question is None) != (self.answer is None):
            raise DataError("data.encode names only one of question and answer. Name both columns, or neither.")
        if self.question is not None and self.answer is not None:
            questions = [self.question] if isinstance(self.question, str) else self.question
            missing = [key for key in (*questions, self.answer) if key not in record]
            if missing:
                raise DataError(f"no {', '.join(map(repr, missing))} in the record. {self.known_forms(record)}")
            return [key for key in questions if record[key] is not None], self.answer
        present = {key for key in _KNOWN if record.get(key) is not None}
        # An empty column says nothing, so it does not make the choice ambiguous.
        spoken = {key for key in present if str(record[key]).strip()}
        if _is_instructed(record) and spoken <= {*INSTRUCTED[0], INSTRUCTED[1]}:
            return [key for key in INSTRUCTED[0] if key in spoken], INSTRUCTED[1]
        pairs = [pair for pair in PAIRS if set(pair) <= present]
        if not pairs:
            raise DataError(f"no conversation found in the record. {self.known_forms(record)}")
        fitting = [pair for pair in pairs if spoken <= set(pair)]
        if len(fitting) != 1:
            raise DataError(f"it is not clear which columns are question and answer. {self.known_forms(record)}")
        return [fitting[0][0]], fitting[0][1]


class OpenChat(OpenEncoder):
    """Renders conversations with the chat template and tokenizes them."""

    settings: ChatEncoder

    def __init__(self, settings: ChatEncoder, processor: Any, *, length: int) -> None:
        super().__init__(settings, processor, length=length)
        self._tokenizer = tokenizer_of(processor, needed_by="chat")
        if not self._tokenizer.is_fast:
            raise DataError(
                f"{type(self._tokenizer).__name__} does not report which characters a token covers, so answers cannot "
                "be found exactly. Use a tokenizer with a tokenizer.json."
            )
        self._is_plain = settings.template == "plain" or self._tokenizer.chat_template in (None, "", PLAIN)

    def encode(self, record: Record) -> Encoded:
        return self.encode_many([record])[0]

    def encode_many(self, records: Sequence[Record]) -> list[Encoded]:
        rendered = [render(*self._to_render(record)) for record in records]
        samples = iter(self._tokenise([layout for one in rendered for layout in one.layouts]))
        return [
            replace(
                token_samples([next(samples) for _ in one.layouts], length=self.length), lost=one.lost, noted=one.noted
            )
            for one in rendered
        ]

    def chat_template(self) -> str:
        return "plain (User: ... / Assistant: ...)" if self._is_plain else "the tokenizer's own"

    def notes(self) -> list[str]:
        why = ", as data.encode says" if self.settings.template == "plain" else ""
        why = why or ("" if self._tokenizer.chat_template else ", because the tokenizer has no chat template")
        return [f"chat template: {self.chat_template()}{why}"]

    def annotate_processor(self) -> None:
        if self._is_plain:
            self._tokenizer.chat_template = PLAIN

    def _to_render(self, record: Record) -> tuple[list[Message], Template]:
        messages, variables = self.settings.conversation(record), self.settings.variables(record)
        # A tokenizer may have another template for conversations with tools.
        text = PLAIN if self._is_plain else self._tokenizer.get_chat_template(tools=variables.get("tools"))
        return messages, Template(text, self._tokenizer.special_tokens_map, variables)

    def _tokenise(self, layouts: list[Layout]) -> list[Features]:
        if not layouts:
            return []
        tokenizer = self._tokenizer
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
            places = np.array(offsets).reshape(-1, 2)
            learned = _answer_tokens(layout, ids, places, special)
            if (
                not layout.marked
                and len(ids)
                and learned[-1]
                and ids[-1] not in special
                and tokenizer.eos_token_id is not None
            ):
                # The template writes no token after the answer at which the model could learn to stop.
                ids, learned = [*ids, tokenizer.eos_token_id], np.append(learned, True)
            if self.settings.train_on == "all":
                learned = np.ones(len(ids), dtype=bool)
            learned[: len(places)] &= ~_covered(places, layout.media)
            array = np.array(ids, dtype=np.int32)
            samples.append(sample(array, shifted(array, learned)))
        return samples


def _is_instructed(record: Record) -> bool:
    questions, answer = INSTRUCTED
    return {*questions, answer} <= record.keys() and None not in (record[questions[0]], record[answer])


def _string(record: Record, key: str) -> str:
    value = record[key]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        # Tables write NaN where a text is missing.
        if not math.isfinite(value):
            raise DataError(f"{key!r} must be a string, found {value}. Give it a text, or remove the record.")
        return str(value)
    if not isinstance(value, str):
        raise DataError(f"{key!r} must be a string, found {sort_of(value)}.")
    return value


def _covered(offsets: np.ndarray, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Which tokens overlap one of the spans."""
    first, last = offsets[:, 0], np.maximum(offsets[:, 1], offsets[:, 0] + 1)
    found = np.zeros(len(offsets), dtype=bool)
    for start, stop in spans:
        found |= (first < stop) & (last > start)
    return found


def _answer_tokens(layout: Layout, ids: list[int], offsets: np.ndarray, special: set[int]) -> np.ndarray:
    """Which tokens overlap an answer; not the white space that a template adds after the end-of-turn token."""
    learned = np.zeros(len(ids), dtype=bool)
    for start, stop in layout.spans:
        inside = np.flatnonzero(_covered(offsets, [(start, stop)]))
        if not layout.marked:
            ends = [at for at in inside if ids[at] in special]
            if ends and not layout.text[offsets[ends[-1], 1] : stop].strip():
                inside = inside[inside <= ends[-1]]
        learned[inside] = True
    return learned


__all__ = ["FORMS", "PAIRS", "PLAIN", "ChatEncoder", "OpenChat"]
