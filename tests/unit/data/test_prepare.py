"""From sources to samples: caching by content, one builder at a time, a clean split, and a report that adds up."""

from __future__ import annotations

import json
import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fullshard.contracts.data import IGNORE, Encoder, Features, Record, Source
from fullshard.data.prepare import Prepared, held_out, prepare, texts
from fullshard.data.sources.files import Files
from fullshard.data.sources.mixture import Mixture, MixturePart
from fullshard.data.store import encoded, processor_fingerprint
from fullshard.errors import DataError
from fullshard.families.language.encoders.chat import Chat
from fullshard.families.language.encoders.text import Text
from fullshard.families.language.sources.python_reference import PythonReference


class Counting(Encoder):
    """Notes every record it encodes in a file, so that work can be counted over processes."""

    diary: str
    gain: int = 1

    def encode(self, record: Record, processor: Any, *, length: int) -> list[Features]:
        with open(self.diary, "a") as file:
            file.write(record["text"] + "\n")
        ids = np.arange(3, dtype=np.int32) + self.gain
        return [{"input_ids": ids, "labels": ids + 1}]

    def done(self) -> int:
        path = Path(self.diary)
        return len(path.read_text().splitlines()) if path.exists() else 0


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Files:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Files(path=str(path))


def run(train: Source, cache: Path, **settings: Any) -> Prepared:
    defaults: dict[str, Any] = {
        "validation": None,
        "encode": None,
        "processor": None,
        "length": 16,
        "pack": True,
        "holdout": 0.0,
        "seed": 0,
        "say": lambda line: None,
    }
    found = {**defaults, **settings}
    if found["validation"] is not None:
        found["validation"] = found["validation"].open()
    return prepare(train=train.open(), cache=cache, **found)


def test_a_cache_hit_encodes_nothing_and_a_change_encodes_again(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"text": f"row {i}"} for i in range(10)]
    source = write_lines(tmp_path / "a.jsonl", rows)
    encoder = Counting(diary=str(tmp_path / "diary"))
    cache = tmp_path / "cache"
    for _ in range(2):
        run(source, cache, encode=encoder)
    assert encoder.done() == 10
    run(write_lines(tmp_path / "copy.jsonl", rows), cache, encode=encoder)
    assert encoder.done() == 10
    run(source, cache, encode=encoder, seed=5, holdout=0.2)
    assert encoder.done() == 10
    rows[3] = {"text": "other"}
    run(write_lines(tmp_path / "a.jsonl", rows), cache, encode=encoder)
    assert encoder.done() == 20
    run(source, cache, encode=encoder.model_copy(update={"gain": 2}))
    assert encoder.done() == 30
    run(source, cache, encode=encoder, processor=tokenizer)
    assert encoder.done() == 40
    run(source, cache, encode=encoder, length=8)
    assert encoder.done() == 50


def build_in_a_process(folder: str, barrier: Any) -> None:
    barrier.wait()
    encoder = Counting(diary=f"{folder}/diary")
    store = encoded(
        Files(path=f"{folder}/a.jsonl").open(),
        encoder.open(None, length=16),
        cache=Path(folder, "cache"),
        say=lambda s: None,
    )
    assert len(store) == 300


def test_two_processes_at_once_build_once(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [{"text": f"row {i}"} for i in range(300)])
    # Not by fork: this process may have threads, whose locks a fork would copy.
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    workers = [context.Process(target=build_in_a_process, args=(str(tmp_path), barrier)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(300)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert Counting(diary=str(tmp_path / "diary")).done() == 300
    assert not list((tmp_path / "cache").glob("*.tmp-*"))


def test_a_failed_build_leaves_nothing_and_names_the_record(tmp_path: Path, tokenizer: Any) -> None:
    rows: list[dict[str, Any]] = [{"text": "the fox"}] * 400
    rows[300] = {"body": "?"}
    source = write_lines(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError, match=r"a\.jsonl:301: no 'text' or 'input_ids' in the record"):
        run(source, tmp_path / "cache", processor=tokenizer)
    assert [p.name for p in (tmp_path / "cache").iterdir() if not p.name.endswith(".lock")] == []
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    lines[300] = "{"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"a\.jsonl:301: invalid JSON"):
        run(source, tmp_path / "cache", processor=tokenizer)


def test_an_unwritable_cache_is_a_data_error(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="encoded data cannot be written here"):
        run(write_lines(tmp_path / "a.jsonl", [{"text": "x"}]), tmp_path / "file" / "cache", processor=tokenizer)


def test_encoding_reports_its_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fullshard.data.store as module

    monkeypatch.setattr(module, "_EVERY_S", 0.0)
    said: list[str] = []
    source = write_lines(tmp_path / "a.jsonl", [{"text": str(i)} for i in range(600)])
    run(source, tmp_path / "cache", encode=Counting(diary=str(tmp_path / "diary")), say=said.append)
    assert [line.split(", about")[0] for line in said] == [
        "Encoding: 256 of 600 records (43%)",
        "Encoding: 512 of 600 records (85%)",
    ]


def test_a_tokenizers_fingerprint_follows_its_content_not_its_last_call(tokenizer_with: Any) -> None:
    first, second = tokenizer_with(), tokenizer_with()
    before = processor_fingerprint(first)
    assert before == processor_fingerprint(second)
    first.pad_token = None
    first(["a b c"], truncation=True, max_length=2)
    assert processor_fingerprint(first) == before
    second.chat_template = "{{ messages }}"
    assert processor_fingerprint(second) != before
    assert processor_fingerprint(tokenizer_with(bos="<bos>")) != before
    first.add_tokens(["new"])
    assert processor_fingerprint(first) != before


def all_tokens(samples: Any) -> list[int]:
    return [int(t) for i in range(len(samples)) for t in samples[i]["input_ids"]]


def test_text_packed_and_not_hold_the_same_targets(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"text": "the quick brown fox " * (i % 7)} for i in range(30)]
    source = write_lines(tmp_path / "a.jsonl", rows)
    packed = run(source, tmp_path / "cache", processor=tokenizer)
    loose = run(source, tmp_path / "cache", processor=tokenizer, pack=False)
    assert isinstance(packed.encoder.settings, Text)
    expected = [
        t for row in rows if row["text"] for t in tokenizer(row["text"])["input_ids"][1:] + [tokenizer.eos_token_id]
    ]

    def targets(samples: Any) -> list[int]:
        return [int(t) for i in range(len(samples)) for t in samples[i]["labels"] if t != IGNORE]

    assert targets(packed.train) == targets(loose.train) == expected
    assert packed.train.num_tokens == len(all_tokens(packed.train))
    assert packed.train.fixed_length == 16
    assert loose.train.fixed_length is None
    assert {len(packed.train[i]["input_ids"]) for i in range(len(packed.train) - 1)} == {16}
    rows_text = f"packed into {len(packed.train)} rows of 16"
    assert packed.report[0] == "encoder: text (chosen by the keys of the first record)"
    assert packed.report[1:3] == [
        "data: 30 records gave 25 samples",
        "data: 5 samples were dropped; 5 with no text",
    ]
    assert rows_text in packed.report[3]
    filled = packed.train.num_tokens / (16 * len(packed.train))
    assert f"({filled:.1%} filled)" in packed.report[3]


def test_chat_is_cut_and_dropped_with_a_count(tmp_path: Path, chatml: Any) -> None:
    rows = [
        {"question": "who", "answer": "you"},
        {"question": "who", "answer": "the lazy dog " * 20},
        {"question": "who are you " * 20, "answer": "you"},
        {"question": "who", "answer": ""},
        {"question": "who", "answer": " \n"},
    ]
    source = write_lines(tmp_path / "a.jsonl", rows)
    prepared = run(source, tmp_path / "cache", processor=chatml, length=32)
    assert isinstance(prepared.encoder.settings, Chat)
    assert "data: 2 samples were cut at the sequence length" in prepared.report
    assert (
        "data: 3 samples were dropped; 1 with all labels after data.sequence_length, "
        "2 with no answer or all labels masked"
    ) in prepared.report
    assert "data: 5 records gave 2 samples" in prepared.report
    assert prepared.report[1] == "chat template: the tokenizer's own"
    whole = Chat().open(chatml, length=10**6).encode(rows[1]).samples[0]
    cut = run(source, tmp_path / "cache", processor=chatml, length=32, pack=False).train[1]
    assert cut["input_ids"].tolist() == whole["input_ids"][:32].tolist()
    # The last label is the true next token, though that token was cut off.
    assert cut["labels"].tolist() == whole["labels"][:32].tolist()
    assert cut["labels"][-1] == whole["input_ids"][32]


@pytest.mark.parametrize(
    ("record", "why", "remedy"),
    [
        ({"messages": [{"role": "user", "content": "x"}]}, "no answer or all labels masked", "an answer"),
        ({"input_ids": [5, 6, 7], "labels": [IGNORE] * 3}, "no answer or all labels masked", "labels that are not all"),
        ({"question": "who are you " * 20, "answer": "x"}, "all labels after data", "raise data.sequence_len"),
        ({"text": ""}, "no text", "put text into"),
    ],
)
@pytest.mark.parametrize("holdout", [0.0, 0.05])
def test_no_sample_left_is_an_error_with_the_reasons(
    tmp_path: Path, chatml: Any, record: dict[str, Any], why: str, remedy: str, holdout: float
) -> None:
    source = write_lines(tmp_path / "a.jsonl", [record] * 60)
    with pytest.raises(DataError, match=rf"^data\.train: no sample is left of 60 records: 60 with {why}.*{remedy}"):
        run(source, tmp_path / "cache", processor=chatml, holdout=holdout)


def test_a_holdout_without_samples_is_an_error(tmp_path: Path, chatml: Any) -> None:
    rows = [{"question": "who", "answer": ""} for _ in range(40)] + [{"question": "who", "answer": "you"}]
    source = write_lines(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError, match=r"^data.holdout = 0.05 leaves no sample for validation: the 41 records of"):
        run(source, tmp_path / "cache", processor=chatml, holdout=0.05)


def test_a_count_of_one_is_reported_in_the_singular(tmp_path: Path, chatml: Any) -> None:
    rows = [{"question": "who", "answer": "the lazy dog " * 20}]
    prepared = run(write_lines(tmp_path / "a.jsonl", rows), tmp_path / "cache", processor=chatml, length=32)
    assert prepared.report[2:] == [
        "data: 1 record gave 1 sample",
        "data: 1 sample was cut at the sequence length",
        "train: 1 record, 1 sample, 32 tokens, packed into 1 row of 32 (100.0% filled)",
    ]


def test_a_line_that_cannot_be_read_is_named_once(tmp_path: Path) -> None:
    for number, content in enumerate(['{"text": "a"}\n{"text": oops}\n', '{"text": oops}\n'], start=1):
        path = tmp_path / "bad.jsonl"
        path.write_text(content)
        with pytest.raises(DataError) as caught:
            list(texts(Files(path=str(path)).open(), None))
        assert str(caught.value).startswith(f"{path}:{3 - number}: invalid JSON")
        assert str(caught.value).count("bad.jsonl") == 1


def test_holdout_splits_records_cleanly_and_stably(tmp_path: Path, tokenizer: Any) -> None:
    # Each record has its own token, so that a sample tells its record.
    rows = [{"input_ids": [i + 10] * (3 + i % 40)} for i in range(100)]
    source = write_lines(tmp_path / "a.jsonl", rows)
    for pack in (True, False):
        prepared = run(source, tmp_path / "cache", processor=tokenizer, holdout=0.1, pack=pack)
        assert prepared.validation is not None
        train, held = set(all_tokens(prepared.train)), set(all_tokens(prepared.validation))
        assert not train & held
        assert len(held) == 10
        assert train | held == {i + 10 for i in range(100)}
        assert set(np.flatnonzero(held_out(100, share=0.1, seed=0)) + 10) == held
    assert (held_out(100, share=0.1, seed=0) != held_out(100, share=0.1, seed=1)).any()
    assert held_out(3, share=0.01, seed=0).sum() == 1
    with pytest.raises(DataError, match=r"data.holdout = 0.05 needs at least 2 different records, found 1"):
        run(write_lines(tmp_path / "b.jsonl", rows[:1]), tmp_path / "cache", processor=tokenizer, holdout=0.05)


def test_a_repeated_record_of_a_mixture_is_never_on_both_sides(tmp_path: Path, tokenizer: Any) -> None:
    small = write_lines(tmp_path / "a.jsonl", [{"input_ids": [i + 10] * 4} for i in range(20)])
    large = write_lines(tmp_path / "b.jsonl", [{"input_ids": [i + 100] * 4} for i in range(100)])
    source = Mixture(parts=[MixturePart(source=small, percent=50), MixturePart(source=large, percent=50)])
    prepared = run(source, tmp_path / "cache", processor=tokenizer, holdout=0.2, pack=False)
    held = [int(prepared.validation[i]["input_ids"][0]) for i in range(len(prepared.validation or []))]  # type: ignore[index]
    train = [int(prepared.train[i]["input_ids"][0]) for i in range(len(prepared.train))]
    assert len(held) == len(set(held)) > 0
    assert not set(held) & set(train)
    assert len(train) > len(set(train))


def test_a_separate_validation_source(tmp_path: Path, tokenizer: Any) -> None:
    train = write_lines(tmp_path / "a.jsonl", [{"text": "the fox"}] * 5)
    other = write_lines(tmp_path / "b.jsonl", [{"text": "the dog"}] * 2)
    prepared = run(train, tmp_path / "cache", processor=tokenizer, validation=other, holdout=0.5, pack=False)
    assert prepared.validation is not None
    assert (len(prepared.train), len(prepared.validation)) == (5, 2)
    assert "validation data: 2 records gave 2 samples" in prepared.report
    blank = write_lines(tmp_path / "c.jsonl", [{"text": ""}])
    with pytest.raises(DataError, match=r"^data\.validation: no sample is left of 1 record:"):
        run(train, tmp_path / "cache", processor=tokenizer, validation=blank)


def test_an_encoder_that_gives_more_than_tokens_is_not_packed(tmp_path: Path) -> None:
    class Picture(Encoder):
        def encode(self, record: Record, processor: Any, *, length: int) -> list[Features]:
            size = int(record["size"])
            ids = np.arange(size, dtype=np.int32)
            return [{"input_ids": ids, "labels": ids, "pixels": np.full((size, 2, 3), size, dtype=np.float32)}]

    source = write_lines(tmp_path / "a.jsonl", [{"size": 2}, {"size": 3}])
    prepared = run(source, tmp_path / "cache", encode=Picture())
    assert "train: not packed, the encoder gives more than tokens (input_ids, labels, pixels)" in prepared.report
    assert prepared.train[1]["pixels"].shape == (3, 2, 3)
    assert (prepared.train[1]["pixels"] == 3).all()

    class Uneven(Picture):
        def encode(self, record: Record, processor: Any, *, length: int) -> list[Features]:
            return [{"input_ids": np.zeros(2, dtype=np.int32 if record["size"] == 2 else np.int64)}]

    with pytest.raises(DataError, match=r"a\.jsonl:2: the encoder gave the features .* All samples need the same"):
        run(source, tmp_path / "cache", encode=Uneven())


def test_samples_are_pickled_without_their_data(tmp_path: Path, tokenizer: Any) -> None:
    prepared = run(PythonReference(), tmp_path / "cache", processor=tokenizer, length=64)
    data = pickle.dumps(prepared.train)
    assert len(data) < 20_000 < prepared.train.num_tokens
    again = pickle.loads(data)
    assert again[7]["input_ids"].tolist() == prepared.train[7]["input_ids"].tolist()


def test_texts_for_a_tokenizer(tmp_path: Path) -> None:
    assert next(texts(PythonReference().open(), None, limit=1)).startswith("The")
    chat = write_lines(tmp_path / "a.jsonl", [{"question": "who", "answer": "you"}, {"question": "a"}])
    assert list(texts(chat.open(), None, limit=1)) == ["who", "you"]
    with pytest.raises(DataError, match=r"a\.jsonl:2: no conversation"):
        list(texts(chat.open(), None))
    with pytest.raises(DataError, match=r"b\.jsonl:1: the record has no known form"):
        list(texts(write_lines(tmp_path / "b.jsonl", [{"x": 1}]).open(), None))
