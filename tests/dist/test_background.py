"""Saves in the background, on real ranks: the same checkpoints as those training waits for, and no failure is lost."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from fullshard.checkpoint import folder as files
from fullshard.checkpoint.reader import open_tensors
from fullshard.contracts.evaluation import Evaluation, EvaluationInputs, Findings
from fullshard.log.metrics import FILE, read
from tests.ranks import RankPool
from tests.small import curve, model_folder, recipe, token_file, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("background")
    model_folder(path / "model")
    token_file(path / "train.jsonl", records=90)
    return path


def settings(folder: Path, name: str, **sections: Any) -> dict[str, Any]:
    sections["checkpoint"] = {"every_steps": 1, "keep": None, "asynchronous": True} | sections.get("checkpoint", {})
    return recipe(folder, name=name, duration={"steps": 5}, **sections)


class FullDisk(Evaluation):
    """After the third validation the disk is full for rank 1: it cannot write a file larger than 64 kB. The save after
    the first has ended by then, as the one after the second waited for it."""

    seen: ClassVar[list[int]] = []

    def run(self, inputs: EvaluationInputs) -> Findings:
        self.seen.append(1)
        if len(self.seen) == 3 and os.environ["RANK"] == "1":
            resource.setrlimit(resource.RLIMIT_FSIZE, (65536, resource.RLIM_INFINITY))
        return Findings()


def outcome(chosen: dict[str, Any], memory: int | None = None, later: int | None = None) -> tuple[str, str]:
    """How a rank's run ended, on a host with so much memory left, and another amount when a save comes near."""
    import fullshard.checkpoint.background
    from fullshard.recipes.read import read as read_recipe
    from fullshard.run import execute

    before, asked = fullshard.checkpoint.background.memory_left, []

    def left() -> int:
        asked.append(1)
        given = memory if len(asked) == 1 or later is None else later
        return before() if given is None else given

    fullshard.checkpoint.background.memory_left = left
    FullDisk.seen.clear()
    try:
        return "stopped", execute(read_recipe(chosen), resume="auto").stopped
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        fullshard.checkpoint.background.memory_left = before
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def run_folder(chosen: dict[str, Any]) -> Path:
    return Path(chosen["output"], chosen["name"])


def steps(chosen: dict[str, Any]) -> list[int]:
    return [files.step_of(path) for path in files.published(run_folder(chosen))]


@pytest.mark.parametrize("world", [1, 2])
def test_a_background_save_holds_the_step_it_was_asked_for(ranks: RankPool, folder: Path, world: int) -> None:
    """Every step is saved while the next one runs: a tensor copied too late would be that of the next step."""
    waited = settings(folder, f"waited-{world}", checkpoint={"asynchronous": False})
    chosen = settings(folder, f"background-{world}")
    for each in (waited, chosen):
        assert ranks.run(outcome, each, world=world) == [("stopped", "done")] * world
    assert steps(chosen) == steps(waited) == [1, 2, 3, 4, 5]
    assert "in the background" in (run_folder(chosen) / "log.txt").read_text()
    for step in (1, 3, 5):
        ours, theirs = (open_tensors(run_folder(each) / files.name_of(step)) for each in (chosen, waited))
        assert ours.names() == theirs.names()
        for name in theirs.names():
            assert torch.equal(ours.whole(name), theirs.whole(name)), (step, name)
    saved = [r for r in read(run_folder(chosen) / FILE) if r.get("event") == "saved"]
    assert [r["step"] for r in saved] == [1, 2, 3, 4, 5]


def test_a_run_resumes_from_a_background_save(ranks: RankPool, folder: Path) -> None:
    straight = curve(read(folder / "runs" / "waited-2" / FILE), "step", "loss", "grad_norm")
    chosen = settings(folder, "goes-on")
    from_it = str(folder / "runs" / "background-2" / "checkpoint-2")
    assert curve(ranks.run(train, chosen, resume=from_it, world=2)[0], "step", "loss", "grad_norm") == straight[2:]


def test_a_failure_in_the_background_is_raised_on_every_rank_at_the_next_step(ranks: RankPool, folder: Path) -> None:
    chosen = settings(folder, "full-disk", checkpoint={"every_steps": 2})
    chosen |= {"duration": {"steps": 1000}, "evaluate": {"every_steps": 2, "parts": [{"kind": f"{__name__}.FullDisk"}]}}
    ends = ranks.run(outcome, chosen, world=2)
    assert [kind for kind, _ in ends] == ["CheckpointError"] * 2, ends
    assert all("cannot be written (rank 1: [Errno 27] File too large" in said for _, said in ends), ends
    assert steps(chosen) in ([2], [2, 4]), "the save of step 4 may have been under way"
    last = max(row[0] for row in curve(read(run_folder(chosen) / FILE), "step"))
    assert last <= 10, "the save of step 6 failed, and the run went on as if it had not"


def test_too_little_host_memory_is_an_error_on_request_and_otherwise_a_warning(ranks: RankPool, folder: Path) -> None:
    chosen = settings(folder, "short")
    for kind, said in ranks.run(outcome, chosen, memory=1000, world=2):
        assert kind == "SetupError"
        assert "checkpoint.asynchronous = true: Saving in the background needs" in said


def test_enough_host_memory_is_enough(ranks: RankPool, folder: Path) -> None:
    chosen = settings(folder, "enough", checkpoint={"every_steps": 5})
    assert ranks.run(outcome, chosen, memory=2_000_000, world=2) == [("stopped", "done")] * 2


def log_of(chosen: dict[str, Any]) -> str:
    return (run_folder(chosen) / "log.txt").read_text()


def test_without_memory_when_a_save_is_near_training_waits(ranks: RankPool, folder: Path) -> None:
    chosen = settings(folder, "gone", checkpoint={"every_steps": 5})
    assert ranks.run(outcome, chosen, later=1000, world=2) == [("stopped", "done")] * 2
    assert steps(chosen) == [5]
    assert "in the background" in log_of(chosen), "it was meant to"
    said = [
        line for line in log_of(chosen).splitlines() if "rank 0" in line and "training waits for every save" in line
    ]
    assert len(said) == 1, said
    assert "Saving in the background needs" in said[0]
    assert "1000 bytes are available" in said[0]


def watched(chosen: dict[str, Any], refuse_on: int | None = None) -> tuple[tuple[str, str], int]:
    """How a rank's run ended, and how often it took memory for a copy; one rank may be refused it."""
    from fullshard.checkpoint.background import Region

    opened, taken = Region.open, []

    def counted(region: Region, device: torch.device) -> None:
        taken.append(1)
        if os.environ["RANK"] == str(refuse_on):
            raise OSError(12, "Cannot allocate memory")
        opened(region, device)

    Region.open = counted  # type: ignore[method-assign]
    try:
        return outcome(chosen), len(taken)
    finally:
        Region.open = opened  # type: ignore[method-assign]


def test_no_memory_is_taken_while_no_save_is_due(ranks: RankPool, folder: Path) -> None:
    none = settings(folder, "no-save", checkpoint={"every_steps": None, "at_end": False})
    assert ranks.run(watched, none, world=2) == [(("stopped", "done"), 0)] * 2
    # The same run with a save at its end takes it once, on every rank.
    some = settings(folder, "one-save", checkpoint={"every_steps": None, "at_end": True})
    assert ranks.run(watched, some, world=2) == [(("stopped", "done"), 1)] * 2


def test_if_one_rank_lacks_memory_all_wait_and_the_save_is_complete(ranks: RankPool, folder: Path) -> None:
    chosen = settings(folder, "refused", checkpoint={"every_steps": 2})
    assert ranks.run(watched, chosen, refuse_on=1, world=2) == [(("stopped", "done"), 1)] * 2
    assert steps(chosen) == [2, 4, 5]
    assert "Rank 1 has no host memory to save in the background (OSError: [Errno 12]" in log_of(chosen)
