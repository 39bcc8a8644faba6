"""Texts that belong together: a query, its positive, and perhaps negatives and a label. One sample for each record.

A column is what its name says: a text with a "/" in it is a text, and images are never guessed.
Must not know files, ranks or how texts are laid out in rows.
"""

from __future__ import annotations

import ast
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar

import numpy as np
from pydantic import Field, field_validator

from fullshard.data.base import Encoder, Features, Record
from fullshard.data.records import keys_found
from fullshard.data.tokens import tokenizer_of
from fullshard.errors import DataError, RecipeError
from fullshard.part import Section, did_you_mean

ALIASES = {
    "query": ("anchor", "sentence1", "query_text", "caption", "text", "question", "instruction", "prompt"),
    "positive": ("sentence2", "pos_text", "answer", "content", "document", "paragraph"),
    "negatives": ("negative_samples", "hard_negatives", "distractors"),
    "label": ("score", "class_id"),
}
"""What a record holds, and other columns that are taken for it where only one of them is there."""
FORMS = 'pairs: {"query": "...", "positive": "..."} (with optional "negatives" and "label")'

_IMAGES = {"query_image": "query", "positive_image": "positive", "negative_images": "negatives"}
_IMAGE_ALIASES = {"source_image": "query", "image": "positive"}
_NO_IMAGES = "images need a vision-language model, which is not supported yet"
_SURE = (("anchor", "positive"), ("sentence1", "sentence2"), ("query_text", "pos_text"))
"""Columns that together are a pair and nothing else."""
_NUMBERED = re.compile(r"negative(?:_(\d+))?")
_DOCUMENT = ("document", "passage", "corpus")
"""What models call the prompt of a document."""
_ALONE = ("text", "passage")
"""Other columns of a record that is a document and no pair."""
_MAPPING = "data.encode.column_mapping"


class Prompts(Section):
    """What is put before each text."""

    query: str | None = None
    """Before every query; null: the model's own, where it has one."""
    document: str | None = None
    """Before every positive and negative; null: the model's own, where it has one."""


@dataclass(frozen=True)
class Pair:
    """A record's texts: the query, the positive, then the negatives."""

    texts: list[str]
    label: float


class Pairs(Encoder):
    """Queries and what they should find, for embedding models."""

    lays_out: ClassVar[bool] = True

    column_mapping: dict[str, str] = {}
    """Which column of a record is its query, positive, negatives or label, where it has another name."""
    prompts: Prompts = Prompts()
    """What is put before each text."""
    negatives: int | None = Field(None, ge=0)
    """At most so many negatives of a record, the first ones; null: all."""

    @field_validator("column_mapping")
    @classmethod
    def _known(cls, mapping: dict[str, str]) -> dict[str, str]:
        for name in mapping:
            if name in _IMAGES:
                raise ValueError(f"{name!r} asks for images; {_NO_IMAGES}. Map the text columns only")
            if name not in ALIASES:
                known = ", ".join(ALIASES)
                raise ValueError(f"{name!r} is nothing a pair has{did_you_mean(name, list(ALIASES))}. Known: {known}")
        return mapping

    @staticmethod
    def accepts(record: Record) -> bool:
        """Whether a record has one of this encoder's forms."""
        keys = {key for key, value in record.items() if value is not None}
        return bool(keys & {"query", "query_image"}) or any(keys.issuperset(pair) for pair in _SURE)

    def encode(self, record: Record, processor: Any, *, length: int) -> Sequence[Features]:
        return self.encode_many([record], processor, length=length)[0]

    def encode_many(self, records: Sequence[Record], processor: Any, *, length: int) -> list[Sequence[Features]]:
        tokenizer = tokenizer_of(processor, needed_by="pairs")
        query, document = self.prompts_for(processor)
        pairs = [self.pair(record) for record in records]
        texts = [(document if at else query) + text for pair in pairs for at, text in enumerate(pair.texts)]
        tokenised = iter(_tokenise(texts, tokenizer, length=length))
        return [[_features([next(tokenised) for _ in pair.texts], pair.label)] for pair in pairs]

    def texts(self, record: Record) -> list[str]:
        return self.pair(record).texts

    def notes(self, processor: Any) -> list[str]:
        said = []
        for side, used in zip(("query", "document"), self.prompts_for(processor), strict=True):
            whose = " (the model's own)" if used and getattr(self.prompts, side) is None else ""
            said.append(f"{side} {used!r}{whose}" if used else f"{side} none")
        return [f"prompts: {', '.join(said)}"]

    def reads(self, record: Record) -> list[str]:
        found = {name: self._columns(record, name) for name in ALIASES if name not in self.column_mapping}
        said = [f"{name} from {', '.join(columns)}" for name, columns in found.items() if columns not in ([], [name])]
        return [f"columns: {'; '.join(said)} (by the keys of the first record)"] if said else []

    def leave_on(self, processor: Any) -> None:
        own = getattr(processor, "prompts", None) or {}
        query, document = self.prompts_for(processor)
        # Under every name that the model has for it; what it puts before texts of other uses stays.
        documents = ["document", *(name for name in _DOCUMENT if name in own)]
        used = {**own, "query": query, **dict.fromkeys(documents, document)}
        processor.prompts = {name: prompt for name, prompt in used.items() if prompt}
        tokenizer = getattr(processor, "tokenizer", processor)
        if hasattr(tokenizer, "init_kwargs"):
            # Saved with the tokenizer, so that they are in a checkpoint and not only in the final export.
            tokenizer.init_kwargs["prompts"] = dict(processor.prompts)

    def blank(self, sample: Features) -> Features:
        starts = np.cumsum(sample["lengths"]) - sample["lengths"]
        return {**sample, "tokens": sample["tokens"][starts], "lengths": np.ones_like(sample["lengths"])}

    def collate(self, samples: Sequence[Features], *, length: int | None) -> dict[str, Any]:
        """`tokens` of all texts on one axis, and what tells the texts apart; `lengths` and `texts` stay on the host."""
        import torch

        tokens = np.concatenate([sample["tokens"] for sample in samples]).astype("<i4")
        lengths = np.concatenate([sample["lengths"] for sample in samples]).astype(np.int64)
        pieces = np.split(tokens, np.cumsum(lengths)[:-1])
        digests = b"".join(hashlib.blake2b(piece.tobytes(), digest_size=8).digest() for piece in pieces)
        return {
            "tokens": torch.from_numpy(tokens.astype(np.int64)),
            "lengths": lengths,
            "texts": np.array([len(sample["lengths"]) for sample in samples], dtype=np.int64),
            "label": torch.from_numpy(np.concatenate([sample["label"] for sample in samples]).astype(np.float64)),
            "keys": torch.from_numpy(np.frombuffer(digests, dtype="<i8").astype(np.int64)),
        }

    def prompts_for(self, processor: Any) -> tuple[str, str]:
        """What is put before queries and before documents."""
        own = getattr(processor, "prompts", None) or {}
        query, document = self.prompts.query, self.prompts.document
        if query is None:
            query = own.get("query")
        if document is None:
            document = next((own[name] for name in _DOCUMENT if own.get(name)), None)
        return query or "", document or ""

    def pair(self, record: Record) -> Pair:
        """The texts and the label of a record, by the names of its columns."""
        columns = {name: self._columns(record, name) for name in ALIASES}
        _refuse_images(record, columns)
        for name in ("query", "positive"):
            if not columns[name]:
                raise DataError(
                    f"no {name!r} in the record. {keys_found(record)} Accepted for it: "
                    f"{', '.join((name, *ALIASES[name]))}. For another column set {_MAPPING} = {{{name}: COLUMN}}."
                )
        query, positive = (_text(record[columns[name][0]], columns[name][0]) for name in ("query", "positive"))
        negatives = [text for column in columns["negatives"] for text in _several(record[column], column)]
        labels = [_label(record[column], column) for column in columns["label"]]
        return Pair([query, positive, *negatives[: self.negatives]], labels[0] if labels else math.nan)

    def document(self, record: Record) -> str:
        """The text of a record that is no pair but one document: what a pair has as its positive, or a `text`."""
        columns = self._columns(record, "positive") or [key for key in _ALONE if key in record]
        if len(columns) != 1:
            known = ", ".join(("positive", *ALIASES["positive"], *_ALONE))
            problem = "it is not clear which column is the document" if columns else "no document in the record"
            raise DataError(f"{problem}. {keys_found(record)} Accepted for it: one of {known}.")
        return _text(record[columns[0]], columns[0])

    def _columns(self, record: Record, name: str) -> list[str]:
        """The columns that hold a record's query, positive, negatives or label; several only for negatives."""
        mapped = self.column_mapping.get(name)
        if mapped is not None:
            if mapped not in record:
                raise DataError(
                    f"no {mapped!r} in the record, which {_MAPPING} takes for {name!r}. {keys_found(record)} Name "
                    f"one of these{'' if name in ('query', 'positive') else ', or give the record a null there'}."
                )
            return [mapped]
        if name in record:
            return [name]
        free = [key for key in record if key not in self.column_mapping.values()]
        found = [[key] for key in ALIASES[name] if key in free]
        numbered = [match for key in free if (match := _NUMBERED.fullmatch(key))] if name == "negatives" else []
        if numbered:
            found.append([match[0] for match in sorted(numbered, key=lambda match: int(match[1] or 0))])
        if len(found) > 1:
            several = " and ".join(repr(columns[0]) for columns in found)
            raise DataError(
                f"it is not clear which column is the {name!r}: the record has {several}. Say which: "
                f"{_MAPPING} = {{{name}: {found[0][0]}}}."
            )
        return found[0] if found else []


def _refuse_images(record: Record, columns: Mapping[str, list[str]]) -> None:
    asked = [key for key in _IMAGES if key in record]
    asked += [key for key, name in _IMAGE_ALIASES.items() if key in record and not columns[name]]
    # An empty column asks for nothing.
    asked = [key for key in asked if not _is_empty(record[key])]
    if asked:
        raise DataError(
            f"{' and '.join(map(repr, asked))} in the record asks for images; {_NO_IMAGES}. Take the column out, and "
            f"give texts in 'query', 'positive' and 'negatives', or name their columns in {_MAPPING}."
        )


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, (str, list, tuple)) and not value)


def _text(value: Any, column: str) -> str:
    mend = "Give it a text, or take the record out."
    if value is None:
        raise DataError(f"{column!r} is null in the record. {mend}")
    if not isinstance(value, str):
        if isinstance(value, (bytes, Mapping)) or type(value).__module__.startswith("PIL."):
            mend = f"Is it an image? {_NO_IMAGES.capitalize()}."
        raise DataError(f"{column!r} must be a string, found {type(value).__name__}: {str(value)[:40]}. {mend}")
    if not value.strip():
        raise DataError(f"{column!r} is blank in the record. {mend}")
    return value


def _several(value: Any, column: str) -> list[str]:
    """Negatives: a list of texts, one text, or none; an empty cell is how a table says none."""
    if _is_empty(value):
        return []
    if isinstance(value, (list, tuple)):
        return [_text(entry, f"{column}[{index}]") for index, entry in enumerate(value)]
    text = _text(value, column)
    if not _NUMBERED.fullmatch(column) and _is_written_list(text):
        raise DataError(
            f"{column!r} must be a list of strings or one text, found a text that spells out a list: {text[:40]}. In a "
            "table give each negative a column of its own: negative_1, negative_2."
        )
    return [text]


def _is_written_list(text: str) -> bool:
    if not (text.startswith("[") and text.endswith("]")):
        return False
    try:
        return isinstance(ast.literal_eval(text), list)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False


def _label(value: Any, column: str) -> float:
    """A class or a similarity; NaN for none. A table gives numbers as text."""
    if _is_empty(value):
        return math.nan
    try:
        exact = int(value) if isinstance(value, str) and value.strip().lstrip("+-").isdecimal() else value
        number = float(exact)
    except (TypeError, ValueError, OverflowError):
        exact, number = value, math.inf
    # Two large classes that round to one number would be taken for the same.
    if math.isinf(number) or (isinstance(exact, Integral) and number != exact):
        raise DataError(
            f"{column!r} must be a number (a whole one of at most 2**53), found {type(value).__name__}: "
            f"{str(value)[:40]}. Give it a number or null, or take another column with {_MAPPING} = {{label: COLUMN}}."
        )
    return number


def _tokenise(texts: list[str], tokenizer: Any, *, length: int) -> list[tuple[list[int], bool]]:
    """The tokens of each text with the tokenizer's special tokens, and whether the text was cut to `length`."""
    special = tokenizer.num_special_tokens_to_add()
    if length <= special:
        raise RecipeError(
            f"data.sequence_length = {length} leaves no room for text: the tokenizer adds {special} special tokens to "
            f"each. Set at least {special + 1}."
        )
    settings = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
    # Cut by the tokenizer, which keeps the special token at the end.
    tokenised = tokenizer(texts, truncation=True, max_length=length, **settings)["input_ids"]
    full = [at for at, ids in enumerate(tokenised) if len(ids) == length]
    whole = tokenizer([texts[at] for at in full], **settings)["input_ids"] if full else []
    cut = {at for at, ids in zip(full, whole, strict=True) if len(ids) > length}
    for text, ids in zip(texts, tokenised, strict=True):
        if not ids:
            raise DataError(f"the tokenizer makes no token of the text {text[:40]!r}. Take the record out.")
    return [(ids, at in cut) for at, ids in enumerate(tokenised)]


def _features(tokenised: list[tuple[list[int], bool]], label: float) -> Features:
    return {
        "tokens": np.concatenate([np.array(ids, dtype=np.int32) for ids, _ in tokenised]),
        "lengths": np.array([len(ids) for ids, _ in tokenised], dtype=np.int32),
        "label": np.array([label], dtype=np.float64),
        "cut": np.array([any(cut for _, cut in tokenised)]),
    }


__all__ = ["Pairs"]
