"""The columns of a record that hold a pair: query, positive, negatives and label, as texts and as images.

Only the name of a column decides: a text with a "/" in it is a text, and images are never guessed. Must not know
tokens, files or ranks.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, TypeVar

from fullshard.config.problems import found
from fullshard.contracts.data import Record
from fullshard.data.records import MAPPING, keys_found
from fullshard.errors import DataError
from fullshard.images.reading import Given, given, is_empty

ALIASES = {
    "query": ("anchor", "sentence1", "query_text", "caption", "text", "question", "instruction", "prompt"),
    "positive": ("sentence2", "pos_text", "answer", "content", "document", "paragraph"),
    "negatives": ("negative_samples", "hard_negatives", "distractors"),
    "label": ("score", "class_id"),
}
"""The parts of a pair, and other columns that are read as them if exactly one is present."""
IMAGES: dict[str, tuple[str, ...]] = {
    "query_image": ("source_image",),
    "positive_image": ("image",),
    "negative_images": (),
}
"""The same for images. `image` is the positive's only if it has no text: beside one it could be anything."""
KINDS = {"t": "text", "i": "image", "m": "text and image"}

_IMAGE_OF = {"query": "query_image", "positive": "positive_image", "negatives": "negative_images"}
_NUMBERED = {
    "negatives": re.compile(r"negative(?:_(\d+))?"),
    "negative_images": re.compile(r"negative_image(?:_(\d+))?"),
}
_ALONE = ("text", "passage")
"""Other columns of a record that is a single document."""

T = TypeVar("T")


@dataclass(frozen=True)
class Column:
    """A query or a document: a text, an image or both."""

    text: str | None = None
    image: Given | None = None
    column: str = ""
    """The column of the text."""

    @property
    def kind(self) -> str:
        """t, i or m, as in retrieval modes."""
        return "t" if self.image is None else "i" if self.text is None else "m"


@dataclass(frozen=True)
class Pair:
    """The query, the positive, then the negatives of a record."""

    entries: list[Column]
    label: float

    @property
    def texts(self) -> list[str]:
        return [entry.text for entry in self.entries if entry.text is not None]

    @property
    def images(self) -> list[Given]:
        return [entry.image for entry in self.entries if entry.image is not None]

    @property
    def mode(self) -> str:
        return f"{self.entries[0].kind}2{self.entries[1].kind}"


@dataclass(frozen=True)
class Columns:
    """Finds the parts of a pair in records."""

    mapping: Mapping[str, str] = field(default_factory=dict)
    """The user's names of columns."""

    def pair(self, record: Record) -> Pair:
        """Reads a record. Negatives are texts first, then images; each is one or the other."""
        sides = [self._side(record, "query"), self._side(record, "positive")]
        negatives = [
            entry
            for name, read in (("negatives", _text_entry), ("negative_images", _image_entry))
            for column in self.of(record, name)
            for entry in _several(record[column], column, name, read)
        ]
        labels = [_label(record[column], column) for column in self.of(record, "label")]
        return Pair([*sides, *negatives], labels[0] if labels else math.nan)

    def document(self, record: Record) -> str:
        """The text of a record that is a single document: in a column of the positive, or in `text`."""
        columns = self.of(record, "positive") or [key for key in _ALONE if key in record]
        for key in self.of(record, "positive_image"):
            # An alias beside a text is an unrelated column.
            if given(record[key], key) and not (columns and key in IMAGES["positive_image"]):
                raise DataError(
                    f"{key!r} in the record asks for an image, but a document is a text here. Remove the column, and "
                    "give the text in 'positive'."
                )
        if len(columns) != 1:
            known = ", ".join(("positive", *ALIASES["positive"], *_ALONE))
            problem = "it is not clear which column is the document" if columns else "no document in the record"
            raise DataError(f"{problem}. {keys_found(record)} Accepted for it: one of {known}.")
        return _text(record[columns[0]], columns[0], "positive")

    def report(self, record: Record) -> list[str]:
        """Which columns were read as what, if their names differ from the parts'."""
        names = [name for name in (*ALIASES, *IMAGES) if name not in self.mapping]
        found = {name: self.of(record, name) for name in names}
        said = [f"{name} from {', '.join(columns)}" for name, columns in found.items() if columns not in ([], [name])]
        lines = [f"columns: {'; '.join(said)} (by the keys of the first record)"] if said else []
        (alias,) = IMAGES["positive_image"]
        if not (self.of(record, "positive_image") or is_empty(record.get(alias)) or alias in self.mapping.values()):
            lines.append(f"columns: {alias!r} is not read; {MAPPING} = {{positive_image: {alias}}} would take it")
        pair = self.pair(record)
        if pair.images:
            query, positive = (KINDS[entry.kind] for entry in pair.entries[:2])
            lines.append(f"mode: {pair.mode} (query {query}, positive {positive})")
        return lines

    def of(self, record: Record, name: str) -> list[str]:
        """The columns that hold one part of a pair; several only for negatives."""
        mapped = self.mapping.get(name)
        if mapped is not None:
            if mapped not in record:
                raise DataError(
                    f"no {mapped!r} in the record, which {MAPPING} maps to {name!r}. {keys_found(record)} Name "
                    f"one of these{'' if name in ('query', 'positive') else ', or give the record a null there'}."
                )
            return [mapped]
        # A mapped column is not read as another part, even if its name says so.
        free = [key for key in record if key not in self.mapping.values()]
        if name in free:
            return [name]
        aliases = ALIASES.get(name) or IMAGES.get(name, ())
        if name == "positive_image" and self.of(record, "positive"):
            aliases = ()
        found = [[key] for key in aliases if key in free]
        numbered = [match for key in free if name in _NUMBERED and (match := _NUMBERED[name].fullmatch(key))]
        if numbered:
            found.append([match[0] for match in sorted(numbered, key=lambda match: int(match[1] or 0))])
        if len(found) > 1:
            several = " and ".join(repr(columns[0]) for columns in found)
            raise DataError(
                f"it is not clear which column is the {name!r}: the record has {several}. Say which: "
                f"{MAPPING} = {{{name}: {found[0][0]}}}."
            )
        return found[0] if found else []

    def _side(self, record: Record, name: str) -> Column:
        """The query or the positive. In a table, an empty text beside an image means no text."""
        images = [given(record[column], column) for column in self.of(record, _IMAGE_OF[name])]
        image = images[0] if images else None
        columns = [key for key in self.of(record, name) if image is None or not is_empty(record[key])]
        if not columns:
            if image is not None:
                return Column(image=image)
            raise DataError(
                f"no {name!r} in the record. {keys_found(record)} Accepted for it: "
                f"{', '.join((name, *ALIASES[name]))}. As an image: "
                f"{', '.join((_IMAGE_OF[name], *IMAGES[_IMAGE_OF[name]]))}. For another column set "
                f"{MAPPING} = {{{name}: COLUMN}}."
            )
        return Column(_text(record[columns[0]], columns[0], name), image, columns[0])


def _text_entry(value: Any, column: str) -> Column:
    return Column(_text(value, column, "negatives"), column=column.partition("[")[0])


def _image_entry(value: Any, column: str) -> Column:
    found = given(value, column)
    if found is None:
        raise DataError(f"{column!r} is null or blank in the record. Give it an image, or remove it from the list.")
    return Column(image=found)


def _text(value: Any, column: str, name: str) -> str:
    fix = "Give it a text, or remove the record."
    if value is None:
        raise DataError(f"{column!r} is null in the record. {fix}")
    if not isinstance(value, str):
        if isinstance(value, (bytes, Mapping)) or type(value).__module__.startswith("PIL."):
            fix = f"Is it an image? Then set {MAPPING} = {{{_IMAGE_OF[name]}: {column.partition('[')[0]}}}."
        raise DataError(f"{column!r} must be a string, found {found(value)}. {fix}")
    if not value.strip():
        raise DataError(f"{column!r} is blank in the record. {fix}")
    return value


def _several(value: Any, column: str, name: str, read: Callable[[Any, str], T]) -> list[T]:
    """Negatives: a list, a single one, or nothing."""
    if is_empty(value):
        return []
    if isinstance(value, (list, tuple)):
        return [read(entry, f"{column}[{index}]") for index, entry in enumerate(value)]
    found = read(value, column)
    if not _NUMBERED[name].fullmatch(column) and isinstance(value, str) and _is_written_list(value):
        raise DataError(
            f"{column!r} must be a list or one negative, found a text that spells out a list: {value[:40]}. In a "
            f"table give each negative its own column: {name[:-1]}_1, {name[:-1]}_2."
        )
    return [found]


def _is_written_list(text: str) -> bool:
    if not (text.startswith("[") and text.endswith("]")):
        return False
    try:
        return isinstance(ast.literal_eval(text), list)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False


def _label(value: Any, column: str) -> float:
    """A class or a similarity; NaN without a label. In tables, numbers are text."""
    if is_empty(value):
        return math.nan
    try:
        exact = int(value) if isinstance(value, str) and value.strip().lstrip("+-").isdecimal() else value
        number = float(exact)
    except (TypeError, ValueError, OverflowError):
        exact, number = value, math.inf
    # Two large classes could round to the same number.
    if math.isinf(number) or (isinstance(exact, Integral) and number != exact):
        raise DataError(
            f"{column!r} must be a number (a whole one of at most 2**53), found {found(value)}. "
            f"Give it a number or null, or take another column with {MAPPING} = {{label: COLUMN}}."
        )
    return number
