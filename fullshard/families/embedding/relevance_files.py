"""The files of a retrieval benchmark: a corpus, queries, and qrels, checked against each other.

In the layout of BEIR (corpus.jsonl, queries.jsonl, qrels/test.tsv) or TREC (qrels of four columns), or in any format of
a source. Must not know models, tokens or ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fullshard.contracts.data import Record, Records, Source
from fullshard.data.records import keys_found
from fullshard.data.sources.files import Files
from fullshard.errors import DataError
from fullshard.formatting.plural import counted

_ID = ("_id", "id", "doc_id", "docid", "pid", "corpus_id", "corpus-id", "query_id", "query-id", "qid")
_TEXT = ("text", "contents", "passage", "document", "query", "question")
_QUERY = ("query-id", "query_id", "qid", "query")
_DOCUMENT = ("corpus-id", "corpus_id", "doc_id", "docid", "pid", "document")
_SCORE = ("score", "relevance", "rel", "label")
_TABLES = (".csv", ".parquet", ".json", ".jsonl")
_SOME = 3


@dataclass(frozen=True)
class Judgements:
    """Texts by number, and the documents that are relevant to each query."""

    documents: list[str]
    queries: list[str]
    relevant: list[np.ndarray]
    """The numbers of the relevant documents of each query."""
    gains: list[np.ndarray]
    """The relevance of each of them, above 0."""
    notes: list[str]
    """What was left out, in lines."""


def read_judgements(corpus: Source, queries: Source, qrels: str) -> Judgements:
    """Reads the three files. Raises if they do not match; common mismatches become notes."""
    documents, asked = _texts(corpus.open(), "corpus"), _texts(queries.open(), "queries")
    judged = _qrels(qrels)
    numbers = {name: number for number, name in enumerate(documents)}
    _check_documents(judged, numbers, qrels)
    kept: list[str] = []
    relevant, gains = [], []
    for name in asked:
        good = sorted((numbers[doc], score) for doc, score in judged.get(name, {}).items() if score > 0)
        if good:
            kept.append(asked[name])
            relevant.append(np.array([number for number, _ in good]))
            gains.append(np.array([score for _, score in good]))
    if not kept:
        first = next(iter(judged))
        raise DataError(
            f"{qrels}: no relevant document for any of the {counted(len(asked), 'query')} in queries; its first "
            f"id is {first!r}, that of queries {next(iter(asked))!r}. Give qrels and queries of the same benchmark."
        )
    notes = []
    if left := len(asked) - len(kept):
        notes.append(f"{counted(left, 'query')} in queries {_is(left)} left out: no relevant document in {qrels}")
    if unknown := len([name for name in judged if name not in asked]):
        notes.append(f"{counted(unknown, 'query')} of {qrels} {_is(unknown)} left out: not in queries")
    return Judgements(list(documents.values()), kept, relevant, gains, notes)


def _check_documents(judged: dict[str, dict[str, float]], numbers: dict[str, int], qrels: str) -> None:
    """Raises if a relevant document is not in the corpus: recall would be silently wrong."""
    good = {doc for scores in judged.values() for doc, score in scores.items() if score > 0}
    if missing := sorted(good - numbers.keys()):
        raise DataError(
            f"{qrels}: {len(missing):,} of the {counted(len(good), 'relevant document')} in it {_is(len(missing))} not "
            f"in the corpus of {len(numbers):,}, such as {', '.join(map(repr, missing[:_SOME]))}. Give the whole "
            "corpus, or qrels for this part of it."
        )
    for query, scores in judged.items():
        for doc in [doc for doc in scores if doc not in numbers]:
            del judged[query][doc]  # irrelevant, and not in the corpus


def _texts(records: Records, what: str) -> dict[str, str]:
    """Texts by id, in the order of the file, each after its title."""
    found: dict[str, str] = {}
    for index in range(len(records)):
        record = records[index]
        name, text = _one(record, _ID, records.where(index), f"an id of {what}"), _text(record)
        if text is None:
            raise DataError(
                f"{records.where(index)}: no text in this record of {what}. {keys_found(record)} Known: "
                f"{', '.join(_TEXT)}, and title before it."
            )
        if str(name) in found:
            raise DataError(f"{records.where(index)}: the id {name!r} appears twice in {what}. Ids must differ.")
        found[str(name)] = text
    if not found:
        raise DataError(f"{what}: no records. Give at least one.")
    return found


def _text(record: Record) -> str | None:
    text = next((record[key] for key in _TEXT if isinstance(record.get(key), str)), None)
    title = record.get("title")
    return text if text is None or not isinstance(title, str) else f"{title} {text}".strip()


def _one(record: Record, names: tuple[str, ...], where: str, what: str) -> Any:
    found = next((record[key] for key in names if record.get(key) is not None), None)
    if found is None:
        raise DataError(f"{where}: {what} is missing. {keys_found(record)} Known: {', '.join(names)}.")
    return found


def _qrels(name: str) -> dict[str, dict[str, float]]:
    """Scores of documents, by query id and document id."""
    path = Path(name).expanduser()
    triples = _of_records(name) if path.suffix.lower() in _TABLES else _of_lines(path)
    found: dict[str, dict[str, float]] = {}
    for where, query, document, score in triples:
        try:
            number = float(score)
        except (TypeError, ValueError):
            raise DataError(f"{where}: the score {score!r} is not a number. Fix the line.") from None
        found.setdefault(str(query), {})[str(document)] = number
    if not found:
        raise DataError(f"{name}: no judgements. Give lines of query id, document id and score.")
    return found


def _of_records(name: str) -> list[tuple[str, Any, Any, Any]]:
    records = Files(path=name).open()
    found = []
    for index in range(len(records)):
        record, where = records[index], records.where(index)
        query, document = (
            _one(record, _QUERY, where, "the query's id"),
            _one(record, _DOCUMENT, where, "the document's id"),
        )
        score = next((record[key] for key in _SCORE if record.get(key) is not None), 1)
        found.append((where, query, document, score))
    return found


def _of_lines(path: Path) -> list[tuple[str, Any, Any, Any]]:
    """BEIR's three columns under a header, or TREC's four without one."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"qrels = {path} cannot be read ({error}). Check its name.") from error
    found = []
    for number, line in enumerate(lines, start=1):
        columns = line.split("\t") if "\t" in line else line.split()
        if not columns or (number == 1 and not _is_number(columns[-1])):
            continue
        if len(columns) not in (3, 4):
            raise DataError(
                f"{path}:{number}: found {len(columns)} columns, allowed are three (query id, document id, score) or "
                "TREC's four (query id, 0, document id, score)."
            )
        found.append((f"{path}:{number}", columns[0].strip(), columns[-2].strip(), columns[-1].strip()))
    return found


def _is(number: int) -> str:
    return "is" if number == 1 else "are"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
