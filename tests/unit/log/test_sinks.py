from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from fullshard.contracts.sink import OpenSink, Sink
from fullshard.errors import SetupError, missing_package
from fullshard.log.all_sinks import Sinks


class Kept(OpenSink):
    """Remembers what it got, and fails on request."""

    def __init__(self, *, fail_at: int | None = None, fail_to_close: bool = False) -> None:
        self.steps: list[int] = []
        self.closed = 0
        self._fail_at, self._fail_to_close = fail_at, fail_to_close

    def write(self, record: dict[str, Any]) -> None:
        if self._fail_at is not None and record["step"] >= self._fail_at:
            raise ConnectionError("the server is gone")
        self.steps.append(record["step"])

    def close(self) -> None:
        self.closed += 1
        if self._fail_to_close:
            raise OSError("disk full")


class Keeping(Sink):
    """Hands out a sink that the test holds."""

    held: ClassVar[dict[str, OpenSink | Exception]] = {}
    key: str

    def open(self, folder: Path, *, name: str, recipe: dict[str, Any]) -> OpenSink:
        found = self.held[self.key]
        if isinstance(found, Exception):
            raise found
        return found


def open_sinks(tmp_path: Path, warnings: list[str], **held: OpenSink | Exception) -> Sinks:
    Keeping.held.clear()
    Keeping.held.update(held)
    sinks = [Keeping(key=key) for key in held]
    return Sinks(sinks, tmp_path, name="run", recipe={}, warn=warnings.append)


def test_every_sink_gets_every_record(tmp_path: Path) -> None:
    a, b, warnings = Kept(), Kept(), list[str]()
    sinks = open_sinks(tmp_path, warnings, a=a, b=b)
    for step in (1, 2):
        sinks.write({"kind": "train", "step": step})
    sinks.close()
    assert (a.steps, b.steps) == ([1, 2], [1, 2])
    assert (a.closed, b.closed) == (1, 1)
    assert warnings == []


def test_a_sink_that_fails_later_warns_once_and_is_dropped(tmp_path: Path) -> None:
    bad, good, warnings = Kept(fail_at=2, fail_to_close=True), Kept(), list[str]()
    sinks = open_sinks(tmp_path, warnings, bad=bad, good=good)
    for step in (1, 2, 3, 4):
        sinks.write({"kind": "train", "step": step})
    sinks.close()
    assert bad.steps == [1]
    assert good.steps == [1, 2, 3, 4]
    assert bad.closed == 1
    assert len(warnings) == 1
    assert warnings[0].startswith("log.sinks[0] (")
    assert "failed at step 2 and is dropped: ConnectionError: the server is gone." in warnings[0]


def test_a_sink_that_cannot_open_stops_the_run_and_closes_the_others(tmp_path: Path) -> None:
    good = Kept()
    with pytest.raises(
        SetupError, match=r"log\.sinks\[1\] .* cannot be opened: OSError: no space\. Fix it, or remove it"
    ):
        open_sinks(tmp_path, [], good=good, bad=OSError("no space"))
    assert good.closed == 1


def test_a_missing_package_gives_the_install_line(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"pip install aim$"):
        open_sinks(tmp_path, [], bad=ModuleNotFoundError("No module named 'aim'", name="aim.sdk"))
    with pytest.raises(SetupError, match=r"pip install 'fullshard\[wandb\]'"):
        open_sinks(tmp_path, [], bad=missing_package("wandb", extra="wandb", needed_by="log.sinks: wandb"))


def test_a_sink_that_cannot_close_is_named(tmp_path: Path) -> None:
    warnings: list[str] = []
    open_sinks(tmp_path, warnings, bad=Kept(fail_to_close=True)).close()
    assert len(warnings) == 1
    assert "could not be closed: OSError: disk full." in warnings[0]
