"""Reads the pairs and the corpus, and numbers their texts without duplicates.

Texts that differ only in whitespace are equal. Must not know models, scores or ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fullshard.config.part import decode, kinds, part_class
from fullshard.contracts.data import Records, Source
from fullshard.data.formats import TextPieces
from fullshard.data.records import check_text
from fullshard.errors import DataError
from fullshard.families.embedding.encoders.pairs import Pair, Pairs
from fullshard.formatting.yaml_text import parse_value
from fullshard.log.bar import Pace
from fullshard.log.console import Bar, Console


def open_source(text: str, *, where: str) -> Records:
    """The records that an argument names, as in `data.train`: a path, a source without required settings, or
    {kind: ...}."""
    value: Any = text
    if text.lstrip()[:1] in ("[", "{"):
        value = parse_value(text, where=where)
    elif not Path(text).exists() and text in kinds(Source):
        fields = part_class(Source, text, where=where).model_fields.values()
        value = text if any(info.is_required() for info in fields) else {"kind": text}
    return decode(Source, value, where=where).open()


def read_pairs(records: Records, encoder: Pairs, console: Console) -> list[Pair]:
    return _read(records, encoder.pair, "Reading pairs", console)


def read_documents(records: Records, encoder: Pairs, console: Console) -> list[str]:
    for part in getattr(records, "parts", [records]):
        if isinstance(part, TextPieces):
            raise DataError(
                f"{part.where(0)}: a .txt file has no document boundaries. Give the corpus as .jsonl, one "
                '{"text": "..."} a line.'
            )
    return _read(records, encoder.document, "Reading corpus", console)


def _read(records: Records, take: Callable[[Any], Any], label: str, console: Console) -> list[Any]:
    found = []
    with Bar(console, label, "", Pace(len(records), clock=console.clock)) as bar:
        for index in range(len(records)):
            # Outside the try: a record that cannot be read already names its place.
            record = records[index]
            try:
                check_text(record)
                found.append(take(record))
            except DataError as error:
                hint = " On this command line: --column OURS=THEIRS." if "column" in str(error) else ""
                raise DataError(f"{records.where(index)}: {error}{hint}") from error
            bar.advance()
    return found


@dataclass(frozen=True)
class Numbered:
    """Texts without duplicates; the first of equal ones is kept."""

    texts: list[str] = field(default_factory=list)
    _numbers: dict[str, int] = field(default_factory=dict)

    def add(self, text: str) -> int:
        number = self._numbers.setdefault(_folded(text), len(self.texts))
        if number == len(self.texts):
            self.texts.append(text)
        return number

    def find(self, text: str) -> int | None:
        return self._numbers.get(_folded(text))


def _folded(text: str) -> str:
    return " ".join(text.split())


@dataclass(frozen=True)
class Task:
    """Pairs and a corpus by numbers."""

    pairs: list[Pair]
    queries: Numbered
    documents: Numbered
    query_of: list[int]
    """The query of each pair."""
    positive_of: list[int]
    """The document that is its positive."""
    own: list[set[int]]
    """Documents that are never negatives of each query: the positives of all its pairs, and the query itself."""

    def kept(self, pair: int) -> set[int]:
        """The documents that already are negatives of a pair."""
        found = map(self.documents.find, self.pairs[pair].texts[2:])
        return {number for number in found if number is not None}


def lay_out(pairs: list[Pair], more: Iterable[str]) -> Task:
    """The corpus is all positives, then `more` documents."""
    queries, documents = Numbered(), Numbered()
    query_of = [queries.add(pair.texts[0]) for pair in pairs]
    positive_of = [documents.add(pair.texts[1]) for pair in pairs]
    for text in more:
        documents.add(text)
    itself = map(documents.find, queries.texts)
    own: list[set[int]] = [set() if number is None else {number} for number in itself]
    for query, positive in zip(query_of, positive_of, strict=True):
        own[query].add(positive)
    return Task(pairs, queries, documents, query_of, positive_of, own)
