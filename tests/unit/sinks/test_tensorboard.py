from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fullshard.config.part import decode
from fullshard.contracts.sink import Sink
from fullshard.errors import SetupError
from fullshard.log.all_sinks import Sinks
from fullshard.log.metrics import Metrics
from fullshard.sinks.tensorboard import TensorBoard


def curve(folder: Path, tag: str) -> list[tuple[int, float]]:
    """What TensorBoard itself reads back."""
    events = EventAccumulator(str(folder / "logs"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def life(folder: Path, *, resume: int, until: int, offset: float = 0.0) -> None:
    metrics = Metrics(folder / "metrics.jsonl", step=resume)
    sink = TensorBoard().open(folder, name="run", recipe={})
    for step in range(resume + 1, until + 1):
        record = {"kind": "train", "step": step, "loss": step + offset, "time": {"data": 0.5}}
        metrics.write(record)
        sink.write(record)
    metrics.close()
    sink.close()


def test_it_is_found_by_its_kind() -> None:
    assert isinstance(decode(Sink, "tensorboard", where="log.sinks[0]"), TensorBoard)


def test_numbers_read_back_by_tensorboard(tmp_path: Path) -> None:
    life(tmp_path, resume=0, until=3)
    assert curve(tmp_path, "train/loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert curve(tmp_path, "time/data") == [(1, 0.5), (2, 0.5), (3, 0.5)]


def test_train_and_validation_have_separate_tags_and_events_have_no_tag(tmp_path: Path) -> None:
    sink = TensorBoard().open(tmp_path, name="run", recipe={})
    sink.write({"kind": "validation", "step": 4, "loss": 2.0, "perplexity": 8.0})
    sink.write({"kind": "event", "step": 4, "event": "saved", "seconds": 1.0})
    sink.close()
    events = EventAccumulator(str(tmp_path / "logs"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["validation/loss", "validation/perplexity"]


@pytest.fixture(autouse=True)
def _files_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of one process and second are told apart by a count, which sorts wrongly from 9 to 10; runs are further
    apart than that."""
    from tensorboard.summary.writer import event_file_writer

    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))


def test_a_resumed_curve_does_not_double_back(tmp_path: Path) -> None:
    life(tmp_path, resume=0, until=6)
    life(tmp_path, resume=4, until=7, offset=0.5)
    assert curve(tmp_path, "train/loss") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 5.5), (6, 6.5), (7, 7.5)]


def test_a_run_from_the_start_hides_an_earlier_one(tmp_path: Path) -> None:
    life(tmp_path, resume=0, until=6)
    life(tmp_path, resume=0, until=2, offset=0.5)
    assert curve(tmp_path, "train/loss") == [(1, 1.5), (2, 2.5)]


def test_a_missing_package_gives_the_install_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(SetupError, match=r"log.sinks\[0\] \(tensorboard\) .* pip install tensorboard$"):
        Sinks([TensorBoard()], tmp_path, name="run", recipe={}, warn=lambda line: None)
