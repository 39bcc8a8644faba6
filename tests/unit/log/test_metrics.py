from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fullshard.log.metrics import Metrics, encode, last_step, read, scalars


def write(path: Path, steps: range, *, step: int = 0) -> Metrics:
    metrics = Metrics(path, step=step)
    for number in steps:
        metrics.write({"kind": "train", "step": number, "loss": 1.0 / number})
    metrics.close()
    return metrics


def steps(path: Path) -> list[int]:
    return [record["step"] for record in read(path)]


def test_a_record_is_in_the_file_when_write_returns(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "run" / "metrics.jsonl")
    metrics.write({"kind": "train", "step": 1, "loss": 2.5})
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == '{"kind": "train", "step": 1, "loss": 2.5}\n'
    metrics.close()


def test_a_resumed_run_drops_what_came_after_its_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 11))
    resumed = write(path, range(7, 9), step=6)
    assert resumed.dropped == 4
    assert steps(path) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_run_from_the_start_begins_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path)
    metrics.write({"kind": "validation", "step": 0, "loss": 9.0})
    metrics.write({"kind": "train", "step": 1, "loss": 8.0})
    metrics.close()
    assert write(path, range(0), step=0).dropped == 2
    assert path.read_text() == ""


def test_an_incomplete_last_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 4))
    with path.open("a") as file:
        file.write('{"kind": "train", "step": 4, "lo')
    assert steps(path) == [1, 2, 3]
    assert write(path, range(5, 6), step=5).dropped == 1
    assert steps(path) == [1, 2, 3, 5]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_file_that_needs_no_cut_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 4))
    inode = path.stat().st_ino
    assert write(path, range(4, 5), step=3).dropped == 0
    assert path.stat().st_ino == inode
    assert steps(path) == [1, 2, 3, 4]


def test_records_without_a_step_survive_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path)
    metrics.write({"kind": "event", "text": "two lines\u2028in one record"})
    metrics.write({"kind": "event", "step": 9})
    metrics.close()
    Metrics(path, step=5).close()
    assert read(path) == [{"kind": "event", "text": "two lines\u2028in one record"}]


def test_nan_and_inf_are_written_as_null_and_named() -> None:
    text = encode({"step": 1, "loss": float("nan"), "time": {"data": float("inf")}, "ids": [1, float("-inf")]})

    def refuse(word: str) -> None:
        raise AssertionError(f"not JSON: {word}")

    assert json.loads(text, parse_constant=refuse) == {
        "step": 1,
        "loss": None,
        "time": {"data": None},
        "ids": [1, None],
        "not_finite": {"loss": "nan", "time.data": "inf", "ids[1]": "-inf"},
    }


def test_numpy_numbers_are_numbers() -> None:
    assert json.loads(encode({"loss": np.float32(0.5), "step": np.int64(3)})) == {"loss": 0.5, "step": 3}
    assert json.loads(encode({"loss": np.float32("nan")}))["not_finite"] == {"loss": "nan"}


def test_the_last_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert last_step(path) is None
    write(path, range(1, 4))
    assert last_step(path) == 3


@pytest.mark.parametrize(
    ("record", "tags"),
    [
        (
            {"kind": "train", "step": 3, "loss": 1.5, "time": {"data": 0.5}, "note": "x", "flag": True, "gone": None},
            {"train/loss": 1.5, "time/data": 0.5},
        ),
        ({"kind": "validation", "step": 3, "perplexity": 4.5}, {"validation/perplexity": 4.5}),
        ({"kind": "event", "step": 3, "seconds": 1.0}, {}),
    ],
)
def test_records_become_tagged_numbers(record: dict[str, object], tags: dict[str, float]) -> None:
    assert scalars(record) == tags
