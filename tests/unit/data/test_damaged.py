"""Records that are not text, nested too deeply or of a wrong type: each is reported with its location."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fullshard.contracts.data import Encoder
from fullshard.data.formats import open_file
from fullshard.data.prepare import Prepared, prepare, texts
from fullshard.data.sources.files import Files
from fullshard.errors import DataError
from fullshard.families.embedding.encoders.pairs import Pairs
from fullshard.families.embedding.mining.corpus import read_pairs
from fullshard.families.language.encoders.chat import Chat
from fullshard.log.console import Console

HALF = "\ud83d"
GOOD: dict[str, list[dict[str, Any]]] = {
    "text": [{"text": "the fox"}],
    "messages": [{"messages": [{"role": "user", "content": "who"}, {"role": "assistant", "content": "you"}]}],
    "conversations": [{"conversations": [{"from": "human", "value": "who"}, {"from": "gpt", "value": "you"}]}],
    "answer": [{"question": "who", "answer": "you"}],
    "positive": [{"query": "who", "positive": "you"}],
}
ENCODERS: dict[str, Encoder] = {"positive": Pairs()}


def encoded(path: Path, tokenizer: Any, encode: Encoder | None = None) -> Prepared:
    return prepare(
        train=Files(path=str(path)).open(),
        validation=None,
        encode=encode,
        processor=tokenizer,
        length=64,
        pack=False,
        holdout=0.0,
        seed=0,
        cache=path.parent / "cache",
        say=lambda line: None,
    )


def damaged(value: Any) -> Any:
    """The same, with its last text ending in half of a character."""
    if isinstance(value, str):
        return value + HALF
    if isinstance(value, list):
        return [*value[:-1], damaged(value[-1])]
    last = list(value)[-1]
    return {**value, last: damaged(value[last])}


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
@pytest.mark.parametrize("form", GOOD)
def test_a_lone_surrogate_is_reported_with_its_location(tokenizer: Any, tmp_path: Path, form: str, suffix: str) -> None:
    path = tmp_path / f"data{suffix}"
    records = GOOD[form] * 3 + [damaged(GOOD[form][0])]
    path.write_text("\n".join(map(json.dumps, records)) if suffix == ".jsonl" else json.dumps(records))
    place = f"{path}:4" if suffix == ".jsonl" else f"{path}, record 4"
    words = rf"'{form}' contains \ud83d, a lone surrogate"
    with pytest.raises(DataError) as caught:
        encoded(path, tokenizer, ENCODERS.get(form))
    assert str(caught.value).startswith(f"{place}: {words}")
    str(caught.value).encode()
    # A tokenizer that is trained on the texts meets it first.
    with pytest.raises(DataError) as caught:
        list(texts(Files(path=str(path)).open(), ENCODERS.get(form)))
    assert str(caught.value).startswith(f"{place}: {words}")


def test_a_lone_surrogate_in_an_unused_column_is_ignored(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps({"text": "the fox", "note": HALF, "emoji": "\U0001f600"}) for _ in range(3)))
    assert encoded(path, tokenizer).train_from.store.counts.samples == 3


def test_mining_reports_a_lone_surrogate_too(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(damaged(GOOD["positive"][0])))
    with pytest.raises(DataError, match=r"pairs\.jsonl:1: 'positive' contains .ud83d, a lone surrogate"):
        read_pairs(open_file(path), Pairs(), Console(silent=True))


def test_tables_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "data.parquet"
    offsets, bad = pa.py_buffer(b"\0\0\0\0\3\0\0\0"), pa.py_buffer(b"\xed\xa0\x80")
    broken = pa.Array.from_buffers(pa.string(), 1, [None, offsets, bad])
    pq.write_table(pa.table({"text": pa.chunked_array([pa.array(["fine"]), broken])}), path)
    records = open_file(path)
    assert records[0] == {"text": "fine"}
    with pytest.raises(DataError, match=r"data\.parquet, record 2: not UTF-8 text \(byte 0xed\)"):
        records[1]
    pq.write_table(pa.table({"text": [f"text {number}" for number in range(1000)]}), path)
    content = bytearray(path.read_bytes())
    content[30:200] = b"\xff" * 170
    path.write_bytes(bytes(content))
    with pytest.raises(DataError, match=r"data\.parquet, record 1: cannot be read: .*Write the file again"):
        open_file(path)[0]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("[" * 5000 + "]" * 5000, "nested too deeply"),
        ("1" + "0" * 6000, "a number has too many digits"),
        ("[[1, 2], 3]", "must be a list of whole numbers"),
        ("[1e400, 2]", "must be a list of whole numbers"),
        ("[NaN]", "must be a list of whole numbers"),
        (f"[1{'0' * 400}]", "must be a list of whole numbers"),
    ],
)
def test_unusable_numbers_in_records_are_refused(tokenizer: Any, tmp_path: Path, value: str, words: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"input_ids": [1, 2, 3]}\n{"input_ids": ' + value + "}\n")
    with pytest.raises(DataError) as caught:
        encoded(path, tokenizer)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert words in str(caught.value)


def test_a_missing_answer_is_not_the_word_nan() -> None:
    """Tables write NaN where a text is missing; it must not be learned as a text."""
    with pytest.raises(DataError, match="'answer' must be a string, found nan"):
        Chat().conversation({"question": "who", "answer": float("nan")})
    assert Chat().conversation({"question": "6 x 7", "answer": 42.0})[1]["content"] == "42.0"
