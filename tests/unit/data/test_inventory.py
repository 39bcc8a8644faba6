"""Changed data is described by what changed: files added, removed and changed, with their records and sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fullshard.control.resume import _other_data
from fullshard.data.sources.files import Files
from fullshard.proofs.same_data import changes, inventory


def write(path: Path, records: int, *, word: str = "a") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": f"{word} {n}"}) + "\n" for n in range(records)))
    return path


def of(folder: Path) -> dict[str, dict[str, Any]]:
    return inventory(Files(path=str(folder)).open())


def test_an_inventory_lists_files_with_records_and_sizes(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a.jsonl", 3), write(tmp_path / "b.jsonl", 5)]
    found = of(tmp_path)
    assert list(found) == [str(path) for path in paths]
    assert [entry["records"] for entry in found.values()] == [3, 5]
    assert [entry["size_bytes"] for entry in found.values()] == [path.stat().st_size for path in paths]
    assert json.loads(json.dumps(found)) == found


def test_what_changed_is_named_file_by_file(tmp_path: Path) -> None:
    for name, records in (("a", 3), ("b", 5), ("c", 4)):
        write(tmp_path / f"{name}.jsonl", records, word=name)
    before = of(tmp_path)
    was = (tmp_path / "a.jsonl").stat().st_size
    write(tmp_path / "a.jsonl", 4, word="a")
    (tmp_path / "b.jsonl").unlink()
    write(tmp_path / "d.jsonl", 7, word="d")
    now, a, d = of(tmp_path), tmp_path / "a.jsonl", tmp_path / "d.jsonl"
    lines = changes(before, now)
    assert lines == [
        f"added {d} (7 records in {d.stat().st_size} bytes)",
        f"removed {tmp_path / 'b.jsonl'} (5 records in {before[str(tmp_path / 'b.jsonl')]['size_bytes']} bytes)",
        f"changed {a} (3 records in {was} bytes then, 4 records in {a.stat().st_size} bytes now)",
    ]
    change = _other_data(before, now, ["data.train.split: train then, test now", "seed: 1 then, 2 now"])
    assert change == f"content of data.train has changed: {'; '.join(lines)}; data.train.split: train then, test now"


def test_a_moved_folder_is_not_a_change(tmp_path: Path) -> None:
    write(tmp_path / "here" / "a.jsonl", 3)
    before = of(tmp_path / "here")
    (tmp_path / "here").rename(tmp_path / "there")
    assert changes(before, of(tmp_path / "there")) == []


def test_a_checkpoint_that_lists_no_files_says_so(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", 3)
    assert "the checkpoint does not say what" in _other_data({}, of(tmp_path), [])
    assert _other_data(of(tmp_path), of(tmp_path), []).endswith("the order of its files")


def test_many_changes_are_counted(tmp_path: Path) -> None:
    write(tmp_path / "0.jsonl", 1)
    before = of(tmp_path)
    for number in range(1, 9):
        write(tmp_path / f"{number}.jsonl", number, word=str(number))
    [line] = changes(before, of(tmp_path))
    assert line.endswith("and 5 more")
