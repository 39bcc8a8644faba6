"""Running text: `{"text": ...}`, or token ids: `{"input_ids": [...]}`. Every token is learned.

Must not know files or ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from fullshard.config.problems import found
from fullshard.contracts.data import IGNORE, Encoded, Encoder, Features, OpenEncoder, Record, token_samples
from fullshard.data.records import keys_found
from fullshard.errors import DataError
from fullshard.formatting.plural import counted
from fullshard.text.tokens import collate_tokens, sample, shifted, tokenizer_of

FORMS = 'text: {"text": "..."} or {"input_ids": [1, 2, ...]} (with optional "labels")'
_IDS = "input_ids"


class Text(Encoder):
    """Documents for next-token prediction; each ends with the tokenizer's end-of-text token."""

    forms: ClassVar[str] = FORMS
    divisible: ClassVar[bool] = True

    column: str | None = None
    """The column to read; null: text, or input_ids if a record is already tokenised."""

    @staticmethod
    def accepts(record: Record) -> bool:
        return any(record.get(key) is not None for key in ("text", _IDS))

    def texts(self, record: Record) -> list[str]:
        column = self.column_of(record)
        return [] if column == _IDS else [_text(record, column)]

    def open(self, processor: Any, *, length: int) -> OpenText:
        return OpenText(self, processor, length=length)

    def collate(self, samples: Sequence[Features], *, length: int | None) -> dict[str, Any]:
        return collate_tokens(samples, length=length)

    def column_of(self, record: Record) -> str:
        """The column to read."""
        wanted = (self.column,) if self.column else ("text", _IDS)
        found = [key for key in wanted if record.get(key) is not None]
        if len(found) == 1:
            return found[0]
        if found:
            raise DataError(
                "the record has both 'text' and 'input_ids'. Say which one to read: "
                "data.encode = {kind: text, column: text}."
            )
        null = [key for key in wanted if key in record]
        if null:
            raise DataError(
                f"{' and '.join(map(repr, null))} {'is' if len(null) == 1 else 'are'} null in the record. Give it a "
                "text, or remove the record."
            )
        raise DataError(
            f"no {' or '.join(map(repr, wanted))} in the record. {keys_found(record)} Accepted: {FORMS}. "
            f"For another column set data.encode = {{kind: text, column: NAME}}."
        )


class OpenText(OpenEncoder):
    """Tokenizes text; takes token ids as they are."""

    settings: Text

    def encode(self, record: Record) -> Encoded:
        return self.encode_many([record])[0]

    def encode_many(self, records: Sequence[Record]) -> list[Encoded]:
        columns = [self.settings.column_of(record) for record in records]
        texts = [_text(record, column) for record, column in zip(records, columns, strict=True) if column != _IDS]
        tokenised = iter(_tokenise(texts, self.processor))
        # Token ids need no tokenizer; if there is one, it says which ids exist.
        vocabulary = 2**31 if self.processor is None else len(tokenizer_of(self.processor, needed_by="text"))
        documents = [
            _token_ids(record, vocabulary) if column == _IDS else next(tokenised)
            for record, column in zip(records, columns, strict=True)
        ]
        return [token_samples(_pieces(*document, self.length), length=self.length) for document in documents]


def _text(record: Record, column: str) -> str:
    value = record[column]
    if not isinstance(value, str):
        raise DataError(f"{column!r} must be a string, found {found(value)}.")
    return value


def _tokenise(texts: list[str], processor: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    if not texts:
        return []
    tokenizer = tokenizer_of(processor, needed_by="text")
    # verbose=False: no warning about long documents, which are cut later.
    encoded = tokenizer(texts, return_attention_mask=False, return_token_type_ids=False, verbose=False)[_IDS]
    end = tokenizer.eos_token_id
    documents = []
    for ids in encoded:
        if end is not None and (not ids or ids[-1] != end):
            ids = [*ids, end]
        array = np.array(ids, dtype=np.int32)
        documents.append((array, shifted(array)))
    return documents


def _token_ids(record: Record, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids of a record, without the positions that its attention mask calls padding."""
    ids = _whole_numbers(record, _IDS)
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocabulary:
        raise DataError(
            f"'input_ids' goes from {ids.min()} to {ids.max()}, but the tokenizer has the ids 0 to {vocabulary - 1}. "
            "Tokenise with the model's own tokenizer."
        )
    real = np.ones(len(ids), dtype=bool)
    if record.get("attention_mask") is not None:
        real = _whole_numbers(record, "attention_mask", size=len(ids)) != 0
    if record.get("labels") is None:
        return ids[real], shifted(ids[real])
    labels = _whole_numbers(record, "labels", size=len(ids))
    wrong = (labels != IGNORE) & ((labels < 0) | (labels >= vocabulary))
    if wrong.any():
        raise DataError(f"'labels' holds {labels[wrong][0]}; allowed are {IGNORE} and the ids 0 to {vocabulary - 1}.")
    labels, ids = labels[real], ids[real]
    if not record.get("labels_shifted"):
        labels = np.append(labels[1:], IGNORE)
    return ids, labels


def _whole_numbers(record: Record, key: str, *, size: int | None = None) -> np.ndarray:
    try:
        array = np.asarray(record[key])
    except ValueError:  # lists of different lengths inside
        array = np.zeros((0, 0))
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iub"):
        raise DataError(f"{key!r} must be a list of whole numbers.")
    if size is not None and len(array) != size:
        raise DataError(
            f"{key!r} has {counted(len(array), 'entry')}, but 'input_ids' has {size}. They must be equally long."
        )
    return array.astype(np.int64)


def _pieces(ids: np.ndarray, labels: np.ndarray, length: int) -> list[Features]:
    """A document in pieces of at most `length`; the last label of a piece is the first token of the next."""
    pieces = [sample(ids[at : at + length], labels[at : at + length]) for at in range(0, len(ids), length)]
    # A last piece of one token has nothing left to predict: that token was the label before it.
    if len(pieces) > 1 and (pieces[-1]["labels"] == IGNORE).all():
        pieces.pop()
    return pieces


__all__ = ["Text"]
