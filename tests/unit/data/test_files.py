"""Every file format is read as it was written, and every malformed input is reported with file, line and problem."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fullshard.config.part import decode, kinds
from fullshard.contracts.data import Source
from fullshard.data import formats
from fullshard.data.sources.files import Files
from fullshard.data.sources.hub import Hub
from fullshard.data.sources.mixture import Mixture, MixturePart, shares
from fullshard.errors import DataError, RecipeError
from fullshard.families.language.sources.python_reference import PythonReference

ROWS = [{"text": "one, two"}, {"text": 'three "four"\nfive'}, {"text": "größer 数"}]


def write(path: Path, content: str | bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def everything(path: str | list[str], **settings: Any) -> list[dict[str, Any]]:
    records = Files(path=path, **settings).open()
    return [dict(records[index]) for index in range(len(records))]


def failure(path: str | list[str], **settings: Any) -> str:
    with pytest.raises(DataError) as caught:
        everything(path, **settings)
    return str(caught.value)


def write_as(path: Path) -> str:
    if path.suffix == ".jsonl":
        return write(path, "".join(json.dumps(row) + "\n" for row in ROWS))
    if path.suffix == ".json":
        return write(path, json.dumps(ROWS))
    if path.suffix in (".csv", ".tsv"):
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, delimiter="," if path.suffix == ".csv" else "\t")
            writer.writerows([["text"], *([row["text"]] for row in ROWS)])
        return str(path)
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=2)
    return str(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".tsv", ".parquet"])
def test_a_format_gives_back_what_was_written(tmp_path: Path, suffix: str) -> None:
    assert everything(write_as(tmp_path / f"data{suffix}")) == ROWS


def test_jsonl_skips_blank_lines_and_keeps_true_line_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '\n{"text": "a"}\r\n   \n\t\n  {"text": "b"}\n\n{"text": "c"}')
    records = Files(path=path).open()
    assert [records[i]["text"] for i in range(len(records))] == ["a", "b", "c"]
    assert [records.where(i) for i in range(3)] == [f"{path}:2", f"{path}:5", f"{path}:7"]


def test_a_byte_order_mark_is_not_data(tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"
    assert everything(write(tmp_path / "a.jsonl", mark + b'{"text": "x"}\n')) == [{"text": "x"}]
    assert everything(write(tmp_path / "a.json", mark + b'[{"text": "x"}]')) == [{"text": "x"}]
    assert everything(write(tmp_path / "a.csv", mark + b"text\nx\n")) == [{"text": "x"}]
    assert everything(write(tmp_path / "a.txt", mark + b"x\n")) == [{"text": "x\n"}]


def test_jsonl_index_finds_every_line_also_across_the_chunks_that_are_scanned(tmp_path: Path) -> None:
    lines = [{"text": "ü" * 60 * n} for n in range(200)]  # over 2 MiB, scanned 1 MiB at a time
    path = write(tmp_path / "a.jsonl", "\n".join(json.dumps(line, ensure_ascii=False) for line in lines))
    records = Files(path=path).open()
    assert everything(path) == lines
    assert [records.where(index) for index in range(200)] == [f"{path}:{number}" for number in range(1, 201)]


def test_json_object_with_one_list(tmp_path: Path) -> None:
    assert everything(write(tmp_path / "a.json", json.dumps({"version": 1, "data": ROWS}))) == ROWS


def test_txt_is_cut_at_line_ends_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "PIECE_CHARACTERS", 40)
    rng = np.random.default_rng(0)
    lines = ["ü" * int(n) + "\n" for n in rng.integers(0, 60, 50)] + ["x" * 130 + "\n", "end"]
    path = write(tmp_path / "a.txt", "".join(lines))
    pieces = [row["text"] for row in everything(path)]
    assert "".join(pieces) == "".join(lines)
    assert max(map(len, pieces)) <= 40
    for index, piece in enumerate(pieces[:-1]):
        next_line = (pieces[index + 1].splitlines(keepends=True) or [""])[0]
        # A cut inside a line only where its end left a piece under half full; at a line end where the next did not fit.
        assert len(piece) == 40 or (piece.endswith("\n") and len(piece) >= 20 and len(piece + next_line) > 40)
        assert piece.endswith("\n") or len(piece) - piece.rfind("\n") - 1 > 20


@pytest.mark.parametrize(
    ("size", "at_least"), [(500, 1), (3_000, 3), (21_000, 20), (100_000, 20), (1_500_000, 20), (6_000_000, 92)]
)
@pytest.mark.parametrize("line", ["a short line of words\n", "ein längerer Absatz 数 " * 400 + "\n", "数", "x y"])
def test_one_text_file_gives_enough_records_to_hold_some_out(
    tmp_path: Path, size: int, at_least: int, line: str
) -> None:
    text = (line * (size // len(line) + 1))[:size]
    pieces = [row["text"] for row in everything(write(tmp_path / "a.txt", text))]
    assert "".join(pieces) == text
    assert len(pieces) >= at_least
    assert max(map(len, pieces)) <= 64 * 1024
    # Lines and words stay whole; only the last piece may be small.
    assert all(piece[-1] in "\n " or " " not in piece[512:] for piece in pieces[:-1])
    assert all(len(piece) >= 512 for piece in pieces[:-1])


def test_many_text_files_are_not_cut_into_small_records(tmp_path: Path) -> None:
    text = "a short line of words\n" * 1500
    for number in range(20):
        write(tmp_path / "many" / f"{number:02d}.txt", text)
    assert [row["text"] for row in everything(str(tmp_path / "many"))] == [text] * 20
    pair = [write(tmp_path / "few" / name, text) for name in ("a.txt", "b.txt")]
    assert 20 <= len(everything(str(tmp_path / "few"))) == len(everything(pair)) <= 24


def test_the_location_of_a_txt_record_is_its_first_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "PIECE_CHARACTERS", 10)
    path = write(tmp_path / "a.txt", "12345\n123\n12345678\nx\n")
    records = Files(path=path).open()
    assert [(records[i]["text"], records.where(i)) for i in range(len(records))] == [
        ("12345\n123\n", f"{path}:1"),
        ("12345678\n", f"{path}:3"),
        ("x\n", f"{path}:4"),
    ]


def test_folders_globs_and_lists(tmp_path: Path) -> None:
    write(tmp_path / "d" / "b.txt", "b")
    write(tmp_path / "d" / "a.jsonl", '{"text": "a"}')
    write(tmp_path / "d" / "sub" / "c.csv", "text\nc\n")
    write(tmp_path / "d" / "notes.md", "no data")
    write(tmp_path / "d" / ".hidden.txt", "no data")
    records = Files(path=str(tmp_path / "d")).open()
    assert [records[i]["text"] for i in range(len(records))] == ["a", "b", "c"]
    assert records.notes == [f"{tmp_path / 'd'}: 1 file is not data and was left out (notes.md)."]  # type: ignore[attr-defined]
    texts = lambda path: [row["text"] for row in everything(path)]  # noqa: E731
    assert texts(str(tmp_path / "d" / "*.txt")) == ["b"]
    assert texts(str(tmp_path / "**" / "*.[jc]s*")) == ["a", "c"]
    assert texts([str(tmp_path / "d" / "b.txt"), str(tmp_path / "d" / "a.jsonl")]) == ["b", "a"]


def test_a_limit_takes_the_first_records_of_all_files(tmp_path: Path) -> None:
    for name in "abc":
        write(tmp_path / f"{name}.jsonl", "".join(f'{{"text": "{name}{i}"}}\n' for i in range(3)))
    texts = [row["text"] for row in everything(str(tmp_path), limit=4)]
    assert texts == ["a0", "a1", "a2", "b0"]
    assert len(everything(str(tmp_path), limit=100)) == 9
    prints = {Files(path=str(tmp_path), limit=limit).open().fingerprint() for limit in (None, 4, 5)}
    assert len(prints) == 3


def test_split_of_a_folder(tmp_path: Path) -> None:
    write(tmp_path / "train-00.txt", "t")
    write(tmp_path / "train" / "x.txt", "u")
    write(tmp_path / "training.txt", "no")
    write(tmp_path / "test.txt", "v")
    assert [r["text"] for r in everything(str(tmp_path), split="train")] == ["u", "t"]
    assert "belongs to split 'dev'" in failure(str(tmp_path), split="dev")
    assert "needs a folder" in failure(str(tmp_path / "test.txt"), split="dev")


def test_saved_datasets(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    one = Dataset.from_list(ROWS)
    one.save_to_disk(str(tmp_path / "one"))
    DatasetDict({"train": one, "dev": one.select([2])}).save_to_disk(str(tmp_path / "many"))
    assert everything(str(tmp_path / "one")) == ROWS
    assert everything(str(tmp_path / "many")) == ROWS
    assert everything(str(tmp_path / "many"), split="dev") == ROWS[2:]
    assert everything(str(tmp_path)) == ROWS + ROWS
    message = failure(str(tmp_path / "many"), split="tset")
    assert "split = 'tset' is not in this data set. Found: train, dev" in message
    # Content decides: the same rows saved again are the same data, other rows are not.
    Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "again"))
    prints = [Files(path=str(tmp_path / name)).open().fingerprint() for name in ("one", "again")]
    assert prints[0] == prints[1] != Files(path=str(tmp_path / "many"), split="dev").open().fingerprint()


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", '{"text": "a"}\n{"text": oops}\n', "a.jsonl:2: invalid JSON at column 10: Expecting value"),
        ("a.jsonl", '\n\n{"text": "a"\n', "a.jsonl:3: invalid JSON at column 13"),
        ("a.jsonl", '{"text": "a"}\n["text"]\n', "a.jsonl:2: found a list, but each line must be one JSON object"),
        ("a.jsonl", '{"text": "a"}\n3\n', "a.jsonl:2: found a number"),
        ("a.jsonl", '{"a": 1}{"b": 2}\n', "a.jsonl:1: invalid JSON at column 9: Extra data"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "a.jsonl:2: not UTF-8 text (byte 0xff at byte 11)"),
        ("a.jsonl", "", "a.jsonl: the file is empty"),
        ("a.jsonl", "\n \n", "a.jsonl: the file has only blank lines"),
        ("a.json", '[\n{"a": 1},\n{"a": }]', "a.json: invalid JSON at line 3, column 7"),
        ("a.json", '{"a": 1}\n{"a": 2}', "for one object a line use the suffix .jsonl"),
        ("a.json", '{"a": [1], "b": [2]}', "found an object with 2 lists (keys: a, b)"),
        ("a.json", '"x"', "a.json: found a string"),
        ("a.json", "[]", "a.json: the list is empty"),
        ("a.json", '[{"a": 1}, 7]', "a.json, record 2: found a number"),
        ("a.csv", 'text,n\na,1\n"x\ny",2\nb\n', "a.csv:5: found 1 columns, but the header has 2 (text, n)"),
        ("a.csv", 'text\n"never closed\n', "a.csv:2: unexpected end of data"),
        ("a.csv", "text,text\na,b\n", "a.csv:1: the header names a column twice"),
        ("a.csv", "text\n", "a.csv: the file has no rows"),
        ("a.csv", b"text\nok\n\xe9\n", "a.csv:3: not UTF-8 text (byte 0xe9 at byte 1)"),
        ("a.tsv", "a\tb\n1\t2\t3\n", "a.tsv:2: found 3 columns"),
        ("a.txt", b"fine\nb\xc3\n", "a.txt:2: not UTF-8 text (byte 0xc3 at byte 2)"),
        ("a.txt", " \n\n", "a.txt: the file has only white space"),
        ("a.parquet", "PAR1 not really", "a.parquet: not a parquet file"),
        ("a.docx", "x", "unknown suffix '.docx'. Allowed: .csv, .json, .jsonl, .parquet, .tsv, .txt"),
        ("plain", "x", "unknown suffix '(none)'"),
    ],
)
def test_a_malformed_file_is_named_with_its_fault(
    tmp_path: Path, name: str, content: str | bytes, expected: str
) -> None:
    message = failure(write(tmp_path / name, content))
    assert expected in message
    assert message.startswith(str(tmp_path / name))


def test_long_csv_fields_are_read_and_the_modules_limit_is_left_alone(tmp_path: Path) -> None:
    before = csv.field_size_limit()
    assert len(everything(write(tmp_path / "a.csv", "text\n" + "x" * 200_000 + "\n"))[0]["text"]) == 200_000
    assert csv.field_size_limit() == before


def test_a_missing_path_suggests_near_names(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", '{"text": "a"}')
    write(tmp_path / "zebra.txt", "z")
    message = failure(str(tmp_path / "trian.jsonl"))
    assert "no such file or folder" in message
    assert message.endswith(": train.jsonl. Check the path.")
    assert f"the path exists up to {tmp_path}" in failure(str(tmp_path / "no" / "such" / "x.txt"))
    assert "no file matches this pattern" in failure(str(tmp_path / "*.parquet"))
    (tmp_path / "empty").mkdir()
    assert "no data file in this folder. Found: nothing" in failure(str(tmp_path / "empty"))
    assert "names no file" in failure([])


@pytest.mark.parametrize("name", ["x" * 300, f"{'x' * 300}/a.jsonl", "~nobody-here/a.jsonl", "a\0b"])
def test_an_impossible_path_is_reported_as_missing(name: str) -> None:
    assert "no such file" in failure(name)


def test_fingerprint_follows_content_not_name_or_time(tmp_path: Path) -> None:
    first = Files(path=write(tmp_path / "a.jsonl", '{"text": "a"}')).open().fingerprint()
    assert Files(path=write(tmp_path / "b.jsonl", '{"text": "a"}')).open().fingerprint() == first
    assert Files(path=write(tmp_path / "a.jsonl", '{"text": "b"}')).open().fingerprint() != first


def test_python_reference() -> None:
    from pydoc_data.topics import topics

    records = PythonReference().open()
    assert len(records) == len(topics)
    assert [records[i]["text"] for i in range(len(records))] == [topics[name] for name in sorted(topics)]
    assert records.where(0) == f"pydoc_data.topics[{min(topics)!r}]"
    assert records.fingerprint() == PythonReference().open().fingerprint()


def test_hub_without_network_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        DataError, match=r"nobody/nothing \(train\): cannot be fetched from the Hugging Face hub: .*network"
    ):
        Hub(name="nobody/nothing").open()


def lines(folder: Path, name: str, count: int) -> str:
    return write(folder / name, "".join(json.dumps({"text": f"{name}{i}"}) + "\n" for i in range(count)))


def test_mixture_holds_its_shares_exactly_and_is_the_same_every_time(tmp_path: Path) -> None:
    a, b = lines(tmp_path, "a.jsonl", 10), lines(tmp_path, "b.jsonl", 1000)
    recipe = {"kind": "mixture", "parts": [{"source": a, "percent": 25}, {"source": b, "percent": 75}], "samples": 100}
    source = decode(Source, recipe, where="data.train")
    records = source.open()
    texts = [records[i]["text"] for i in range(len(records))]
    assert len(texts) == 100
    from_a = [text for text in texts if text.startswith("a.jsonl")]
    assert len(from_a) == 25
    assert {from_a.count(text) for text in set(from_a)} == {2, 3}
    assert len(set(from_a)) == 10
    assert len({text for text in texts if text.startswith("b.jsonl")}) == 75
    again = source.open()
    assert [again[i]["text"] for i in range(100)] == texts
    assert again.fingerprint() == records.fingerprint()
    other = decode(Source, {**recipe, "seed": 1}, where="data.train").open()
    assert other.fingerprint() != records.fingerprint()
    assert [other[i]["text"] for i in range(100)] != texts
    assert records.notes == [  # type: ignore[attr-defined]
        "mixture: 25 % = 25 records from source 1, repeated 2.5 times (25 of 10)",
        "mixture: 75 % = 75 records from source 2, subsampled (75 of 1,000)",
    ]
    # Origins name the stored record: equal exactly where the text is.
    origins = records.origins()  # type: ignore[attr-defined]
    assert len(set(zip(origins.tolist(), texts, strict=True))) == len(set(texts)) == len(set(origins.tolist()))


def test_mixture_default_size_and_wrong_percentages(tmp_path: Path) -> None:
    a, b = lines(tmp_path, "a.jsonl", 10), lines(tmp_path, "b.jsonl", 30)
    parts = [MixturePart(source=Files(path=a), percent=50), MixturePart(source=Files(path=b), percent=50)]
    mixed = Mixture(parts=parts).open()
    assert len(mixed) == 40
    # Both sources hold a record 0: they are different records.
    assert len(set(mixed.origins().tolist())) == len({mixed[i]["text"] for i in range(40)})  # type: ignore[attr-defined]
    with pytest.raises(RecipeError, match="add up to 70, but must add up to 100"):
        decode(
            Source,
            {"kind": "mixture", "parts": [{"source": a, "percent": 40}, {"source": b, "percent": 30}]},
            where="data.train",
        )


@pytest.mark.parametrize("total", [1, 7, 100, 1001])
def test_shares_add_up(total: int) -> None:
    counts = shares([33.3, 33.3, 33.4], total=total)
    assert sum(counts) == total
    assert max(abs(c - total * p / 100) for c, p in zip(counts, [33.3, 33.3, 33.4], strict=True)) < 1


def test_the_kinds_are_the_files() -> None:
    families = {"desktop_episodes", "digits", "docstrings", "image_folder", "python_reference", "shapes", "sounds"}
    assert kinds(Source) == sorted({"files", "hub", "mixture", "standard_library", *families})
    assert isinstance(decode(Source, "x.txt", where="data.train"), Files)
