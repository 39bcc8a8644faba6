"""Every line of the header, compared with what the run then does: short real runs on one rank."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard.control.triggers import Due
from fullshard.log.metrics import read as read_metrics
from fullshard.setup.run_summary import intervals
from fullshard.setup.step_plan import StepPlan
from tests import small

Run = Callable[..., "Done"]
STEPS = 5
"""Of 16 samples each: 32 records make 2 steps an epoch."""


class Done:
    """A finished run: what its header said, and what it did."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = [line[28:] for line in (folder / "log.txt").read_text().splitlines()]
        self.rows: dict[str, str] = {}
        label = ""
        begin = max(number for number, line in enumerate(self.log) if line.startswith("fullshard: "))
        for line in self.log[begin + 1 :]:
            if not line:
                break
            if found := re.match(r"  (\S.*?)  +(.*)", line):
                label = found[1]
                self.rows[label] = found[2]
            else:
                self.rows[label] += " " + line.strip()
        self.records = read_metrics(folder / "metrics.jsonl")

    def steps(self, **what: str) -> list[int]:
        """The steps of the records that have these values."""
        return [record["step"] for record in self.records if what.items() <= record.items()]

    @property
    def saved(self) -> list[int]:
        return self.steps(event="saved")

    @property
    def validated(self) -> list[int]:
        return self.steps(kind="validation")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("header")
    small.model_folder(folder / "model")
    small.token_file(folder / "train.jsonl", records=32)
    small.token_file(folder / "held.jsonl", records=5, seed=2)
    return folder


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Run:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)

    def train(*, held: bool = False, **sections: Any) -> Done:
        name = re.sub(r"\W", "-", request.node.name)
        data = {"validation": str(folder / "held.jsonl")} if held else {}
        sections = {"duration": {"steps": STEPS}, **sections}
        settings = small.recipe(folder, name=name, data={**data, **sections.pop("data", {})}, **sections)
        small.train(settings)
        return Done(folder / "runs" / name)

    return train


def test_a_run_that_saves_nothing_says_so(run: Run) -> None:
    """The default `best` by loss has nothing to go by."""
    done = run(checkpoint={"at_end": False, "best": "loss"}, evaluate={"parts": ["loss"]})
    assert done.rows["checkpoints"] == (
        "none: nothing will be saved, unless a signal stops the run; no best checkpoint: there is no validation data"
    )
    assert done.rows["evaluate"] == "never: there is no validation data"
    assert done.rows["export"] == "none (checkpoint.at_end = false)"
    assert (done.saved, done.validated) == ([], [])
    assert not list(done.folder.glob("checkpoint-*"))
    assert not (done.folder / "model").exists()
    assert not any("best by" in line for line in done.log)


def test_intervals_longer_than_the_run_are_not_shown(run: Run) -> None:
    done = run(
        held=True,
        checkpoint={"at_end": True, "every_steps": 6, "every_epochs": 4},
        evaluate={"parts": ["loss"], "every_steps": 9, "every_epochs": None},
    )
    assert done.rows["checkpoints"] == "at the end; sharded, training waits for each; the last 3 kept"
    assert done.rows["evaluate"] == "loss at the end"
    assert (done.saved, done.validated) == ([5], [5])


def test_validations_and_saves_happen_when_the_header_says(run: Run) -> None:
    done = run(
        held=True,
        checkpoint={"every_steps": 2, "best": "accuracy", "keep": 1, "export": "best"},
        evaluate={"parts": ["loss"], "every_epochs": 2, "at_start": True},
    )
    assert done.rows["checkpoints"] == (
        "every 2 steps, at each best (highest accuracy), at the end; sharded, training waits for each; the last one "
        "kept, and the best"
    )
    assert done.rows["evaluate"] == "loss before the first step, every 2 epochs, at the end"
    assert done.rows["export"] == "model/, the weights of the best checkpoint"
    assert done.validated == [0, 4, 5]
    assert done.saved == [2, 4, 5]
    best = done.records[-1]["best_step"]
    assert {path.name for path in done.folder.glob("checkpoint-*")} == {f"checkpoint-{step}" for step in {best, 5}}
    assert any(f"(the weights of step {best}, the best)" in " ".join(done.log[i : i + 3]) for i in range(len(done.log)))


def test_the_header_describes_the_model(run: Run) -> None:
    done = run(
        held=True,
        ema=0.9,
        evaluate={"parts": ["loss"]},
        schedule={"kind": "linear", "warmup": 0.4},
        sharding={"strategy": "full", "activation_checkpointing": "full"},
    )
    assert done.rows["ema"] == "decay 0.9, warmed up; the average is validated"
    assert done.rows["export"] == "model/, the averaged weights of the last step"
    assert done.rows["optimizer"] == (
        "adamw, lr 0.01, linear schedule after 2 steps of warm-up, gradients clipped at norm 1"
    )
    rates = [record["lr"] for record in done.records if record["kind"] == "train"]
    assert rates[:3] == pytest.approx([0.005, 0.01, 0.01]), "two steps of warm-up"
    sharding = done.rows["sharding"].removesuffix("; linear layers by oneDNN")  # on some processors
    assert sharding == "full: 1 x 1 (replicate x shard); one rank, so nothing is sharded; whole within a step"
    assert done.rows["compile"] == "off"
    assert done.rows["recompute"] == "activation checkpointing full"
    assert done.rows["workers"] == "none: each rank reads its data between steps"
    assert done.rows["attention"] == "sdpa"
    assert done.rows["world"] == "1 rank, CPU, gloo"
    units = json.loads((done.folder / "units.json").read_text())["units"]
    classes = Counter(unit["class_name"] for unit in units)
    named = ", ".join(f"{number} x {name}" for name, number in classes.items())
    assert done.rows["units"] == f"{named} (3 x Qwen3DecoderLayer in model.layers; 1 tied group)"
    assert done.rows["precision"].startswith("fp32 (storage float32, compute float32, reduce float32, no scaler")
    assert {(*unit["storage"], unit["compute"], unit["reduce"]) for unit in units} == {("float32",) * 3}
    assert done.rows["batch"].startswith("16 ")
    assert [record["samples"] for record in done.records if record["kind"] == "train"] == [16, 32, 48, 64, 80]
    assert done.rows["steps"].startswith("5 = 2.5 epochs x 2 per epoch (32 ")
    assert Path(done.rows["run folder"]) == done.folder
    assert f"  Total: {sum(unit['parameters'] for unit in units):,} (26.42K)" in done.log


def test_a_resumed_run_shows_its_checkpoint_and_the_remaining_steps(run: Run) -> None:
    settings: dict[str, Any] = {"held": True, "evaluate": {"parts": ["loss"], "at_start": True, "every_epochs": None}}
    run(**settings, duration={"steps": 4}, checkpoint={"every_steps": 4})
    done = run(**settings, checkpoint={"every_steps": 4})
    assert done.rows["resumed"] == f"{done.folder}/checkpoint-4 at step 4"
    assert done.rows["evaluate"] == "loss at the end", "the start is long past"
    assert done.rows["checkpoints"].startswith("at the end; ")
    assert done.validated == [0, 4, 5]
    assert done.saved == [4, 5]


def test_without_blocks_compile_and_recompute_are_off(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, *args, **settings: compiled.append(self))
    done = run(
        ema={"decay": 0.9, "warmup": False},
        sharding={"wrap": {"whole": True}, "compile": True, "activation_checkpointing": "selective"},
        checkpoint={"at_end": False},
    )
    none = "off: it works block by block, and the model is one unit"
    assert (done.rows["compile"], done.rows["recompute"]) == (none, none)
    assert compiled == []
    assert done.rows["ema"] == "decay 0.9", "nothing is validated"


def test_workers_and_saves_in_the_background(run: Run) -> None:
    done = run(data={"workers": 1}, checkpoint={"asynchronous": True, "keep": None, "every_steps": 2})
    assert done.rows["workers"] == "1 loader process per rank"
    assert done.rows["checkpoints"] == "every 2 steps, at the end; sharded, in the background; all kept"
    assert len(list(done.folder.glob("checkpoint-*"))) == 3


@pytest.mark.parametrize(
    ("due", "done", "expected"),
    [
        (Due(3, None), 0, ["every 3 steps"]),
        (Due(1, None), 0, ["every step"]),
        (Due(3, None), 3, []),  # of steps 4 and 5 none is due
        (Due(6, None), 0, []),
        (Due(None, 1), 4, ["every epoch"]),  # the run ends in its third epoch
        (Due(None, 3), 0, ["every 3 epochs"]),
        (Due(None, 2), 4, []),
        (Due(None, 4), 0, []),
        (Due(None, None, 15), 0, ["every 15 minutes"]),
    ],
)
def test_only_intervals_within_the_remaining_steps_are_listed(due: Due, done: int, expected: list[str]) -> None:
    plan = StepPlan(num_rows=32, per_device=4, accumulate=4, world=1, steps_per_epoch=2, total_steps=STEPS)
    assert intervals(due, plan, done) == expected
    epochs = {-(-step // 2) for step in range(done + 1, STEPS + 1)}
    steps = any(due.after_step(step) for step in range(done + 1, STEPS + 1))
    assert bool(expected) == (steps or any(due.after_epoch(epoch) for epoch in epochs) or due.every_minutes is not None)
