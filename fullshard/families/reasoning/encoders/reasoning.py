"""Records of question, reasoning and answer. A row holds three documents: the conversation, in which reasoning and
answer are learned, then the reasoning alone and the answer alone, which are compared.

Documents in a row do not see each other, so one forward pass gives the loss of the conversation and an embedding of
each text. Must not know files, ranks or losses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from fullshard.contracts.data import IGNORE, LEARNED_TOO_LATE, NOTHING_LEARNED, Encoded, Features, Record
from fullshard.data.records import keys_found
from fullshard.errors import DataError
from fullshard.text.chat import ChatEncoder, OpenChat
from fullshard.text.conversation import Message, read_variables
from fullshard.text.tokens import collate_tokens, tokenizer_of

COLUMNS = {
    "question": ("question", "input", "problem", "prompt", "query"),
    "reasoning": ("reasoning", "analysis", "rationale", "thinking"),
    "answer": ("answer", "output", "response", "expected_answer"),
}
"""Names of each column that are understood without being named."""


class Reasoning(ChatEncoder):
    """Question, reasoning and answer: the model learns to write the last two."""

    forms: ClassVar[str] = "reasoning: " + ", ".join("/".join(names) for names in COLUMNS.values())

    reasoning: str | None = None
    """The column of the reasoning; null: one of reasoning, analysis, rationale, thinking."""
    compared: float = Field(0.25, gt=0, lt=0.5)
    """The share of a row for the reasoning alone, and for the answer alone; a longer one is compared by its start."""

    @staticmethod
    def accepts(record: Record) -> bool:
        return False  # a record with more columns is a question and an answer, unless the recipe says otherwise

    def open(self, processor: Any, *, length: int) -> OpenReasoning:
        return OpenReasoning(self, processor, length=length)

    def collate(self, samples: Sequence[Features], *, length: int | None) -> dict[str, Any]:
        import torch

        batch = collate_tokens([_apart(each) for each in samples], length=length)
        for name in ("spans", "keys"):
            batch[name] = torch.from_numpy(np.stack([np.asarray(each[name]) for each in samples]).astype(np.int64))
        return batch

    def conversation(self, record: Record) -> list[Message]:
        question, reasoning, answer = self.parts(record)
        said: list[Message] = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": f"{reasoning}\n\n{answer}"},
        ]
        return [{"role": "system", "content": str(record["system"])}, *said] if record.get("system") else said

    def variables(self, record: Record) -> dict[str, Any]:
        return read_variables(record, used=["system", *self._named(record).values()])

    def parts(self, record: Record) -> list[str]:
        """The texts of question, reasoning and answer."""
        found = []
        for what, column in self._named(record).items():
            value = record.get(column)
            if not isinstance(value, str) or not value.strip():
                raise DataError(f"{column!r}, the {what}, must be a text that is not blank. Fix or remove the record.")
            found.append(value)
        return found

    def _named(self, record: Record) -> dict[str, str]:
        """The column of each part."""
        asked = {"question": self.question, "reasoning": self.reasoning, "answer": self.answer}
        found: dict[str, str] = {}
        for what, names in COLUMNS.items():
            own = asked[what]
            fitting = [str(own)] if own else [name for name in names if record.get(name) is not None]
            if len(fitting) != 1 or fitting[0] not in record:
                problem = f"both {' and '.join(map(repr, fitting))} may be" if len(fitting) > 1 else "no column is"
                raise DataError(
                    f"{problem} the {what} of the record. {keys_found(record)} Accepted: {self.forms}. For another "
                    f"column set data.encode = {{kind: reasoning, {what}: COLUMN}}."
                )
            found[what] = fitting[0]
        return found


class OpenReasoning(OpenChat):
    """Lays out the conversation, and puts the texts that are compared behind it."""

    settings: Reasoning

    def encode_many(self, records: Sequence[Record]) -> list[Encoded]:
        texts = [self.settings.parts(record) for record in records]
        tokenizer = tokenizer_of(self.processor, needed_by="reasoning")
        most = max(2, int(self.settings.compared * self.length))
        room = self.length - 2 * most
        found = []
        for whole, (_, reasoning, answer) in zip(super().encode_many(records), texts, strict=True):
            alone = [tokenizer(text, add_special_tokens=False)["input_ids"][:most] for text in (reasoning, answer)]
            keys = np.array([_key(reasoning), _key(answer)])
            rows = [_row(each, alone, keys, room=room) for each in whole.samples]
            learned = [row for row in rows if (row["labels"] != IGNORE).any()]
            late = [LEARNED_TOO_LATE] * (len(rows) - len(learned))
            cut = sum(len(each["input_ids"]) > room for each in whole.samples)
            dropped = [*whole.dropped, *late] or ([] if rows else [NOTHING_LEARNED])
            found.append(Encoded(learned, cut, dropped, whole.lost, whole.noted))
        return found


def _row(conversation: Features, alone: Sequence[Sequence[int]], keys: np.ndarray, *, room: int) -> Features:
    """One row of three documents; `spans` says where the last two begin and end."""
    first = {name: array[:room] for name, array in conversation.items()}
    pieces = [first["input_ids"], *(np.array(ids, dtype=np.int32) for ids in alone)]
    ends = np.cumsum([len(piece) for piece in pieces])
    return {
        "input_ids": np.concatenate(pieces).astype(np.int32),
        "labels": np.concatenate([first["labels"], np.full(ends[2] - ends[0], IGNORE)]).astype(np.int32),
        "spans": np.array([ends[0], ends[1], ends[1], ends[2]], dtype=np.int64),
        "keys": keys,
    }


def _apart(row: Features) -> Features:
    """The row with positions that restart with each of its documents; a row cut from it for a proof stays as it is."""
    begin, middle, _, end = (int(place) for place in row["spans"][:4])
    if len(row["input_ids"]) != end:
        return row
    return {**row, "position_ids": np.concatenate([np.arange(n) for n in (begin, middle - begin, end - middle)])}


def _key(text: str) -> int:
    """A number that equal texts share."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


__all__ = ["Reasoning"]
