"""Publishing a checkpoint: its pointers and what retention leaves, even if a kill comes between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fullshard.checkpoint import folder as files
from fullshard.checkpoint.write import Snapshot, Target, _publish
from tests import bucket
from tests.unit.checkpoint.test_folder import names

bucket.install()


@pytest.fixture(params=["local", "bucket"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / "run" if request.param == "local" else files.place(f"{bucket.url(tmp_path / 'b')}/runs/run")


def publish(run: Path, step: int, *, best_step: int | None, keep: int = 1) -> None:
    files.begin(run, step)
    facts = {"progress": {"step": step, "best_step": best_step}}
    snapshot = Snapshot(step, {}, {}, facts, {}, best=best_step == step)
    _publish(Target(run, keep, None), snapshot, {"step": step, "files": {}})


class Killed(BaseException):
    pass


def test_a_kill_between_the_two_pointers_does_not_lose_the_best(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(run, 1, best_step=1)
    point = files.point

    def killed(run: Path, pointer: str, target: Path) -> None:
        if pointer == "best":
            raise Killed
        point(run, pointer, target)

    monkeypatch.setattr(files, "point", killed)
    with pytest.raises(Killed):
        publish(run, 2, best_step=2)
    monkeypatch.setattr(files, "point", point)
    pointers: dict[str, Any] = {name: files.pointed(run, name) for name in ("last", "best")}
    assert {name: path.name for name, path in pointers.items()} == {"last": "checkpoint-2", "best": "checkpoint-1"}
    for step in (3, 4, 5):  # the run continues from `last`, which says that its own step is the best
        publish(run, step, best_step=2)
    assert names(run) == ["checkpoint-2", "checkpoint-5"]
    assert files.pointed(run, "best") == run / "checkpoint-2"


def test_a_best_that_was_never_saved_moves_no_pointer(run: Path) -> None:
    publish(run, 1, best_step=1)
    publish(run, 3, best_step=2)
    assert files.pointed(run, "best") == run / "checkpoint-1"
