"""What limits a run: every verdict from the phases that lead to it, and the line of a real run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fullshard.profile.verdict import Phases, Tuning, verdict
from tests import small

BUSY = Phases(seconds=10.0, steps=50, data=0.1, host=3.0, idle=6.0, update=0.5)
"""A GPU with work all the time."""
GPU = Tuning(True, 1, 1, 2, compiled=True, recompute="none", precision="bf16", strategy="full")
EIGHT = replace(GPU, ranks=8)
CPU = replace(GPU, gpu=False, compiled=False, precision="fp32")
LAUNCHING = {"host": 9.0, "idle": 0.1}


@pytest.mark.parametrize(
    ("change", "tuning", "mfu", "limit", "setting"),
    [
        ({"data": 1.0}, GPU, 0.5, "data", "data.workers above 2"),
        ({"data": 0.99}, GPU, 0.5, "compute", ""),
        ({"data": 2.0, **LAUNCHING}, EIGHT, 0.1, "data", "data.workers"),
        (LAUNCHING, GPU, 0.1, "host", "batch.per_device"),
        (LAUNCHING, replace(GPU, compiled=False), 0.1, "host", "sharding.compile=true"),
        ({"host": 9.0, "idle": 0.5}, GPU, 0.4, "compute", ""),
        ({"host": 5.9, "idle": 0.1}, GPU, 0.4, "compute", ""),
        ({"update": 2.5}, EIGHT, 0.3, "memory bandwidth", "batch.global"),
        ({}, GPU, 0.35, "compute", ""),
        ({}, replace(GPU, recompute="full"), 0.27, "compute", "activation_checkpointing=selective"),
        ({}, replace(GPU, recompute="full"), 0.25, "memory bandwidth", "batch.per_device"),
        ({}, replace(GPU, precision="fp32"), 0.1, "compute", "precision=bf16"),
        ({}, GPU, 0.34, "memory bandwidth", "batch.per_device"),
        ({}, replace(GPU, compiled=False), 0.2, "memory bandwidth", "sharding.compile=true"),
        ({}, GPU, None, "compute", ""),
        ({}, EIGHT, 0.2, "communication", "sharding.strategy=grad_op"),
        ({}, replace(EIGHT, nodes=2), 0.2, "communication", "sharding.strategy=hybrid"),
        ({}, replace(EIGHT, strategy="grad_op"), 0.2, "communication", "batch.per_device"),
        ({}, EIGHT, None, "compute or communication", "--profile"),
        ({"data": 1.5}, CPU, None, "data", "data.workers"),
        ({"host": 2.0}, CPU, None, "host", "log.every_steps"),
        ({"host": 0.1, "update": 3.0}, CPU, None, "memory bandwidth", "batch.global"),
        ({"host": 0.1}, CPU, None, "compute", ""),
        ({"host": 0.1}, replace(CPU, ranks=2), None, "compute or communication", "--profile"),
    ],
)
def test_every_verdict(change: dict[str, float], tuning: Tuning, mfu: float | None, limit: str, setting: str) -> None:
    found = verdict(replace(BUSY, **change), tuning, mfu=mfu)
    assert found.limit == limit
    assert setting in found.setting
    assert bool(found.setting) == bool(setting)
    assert found.line.startswith(f"Limited by {limit}: ")
    assert ("No setting is likely to help." in found.line) == (not setting)


def test_phases_are_those_of_one_rank_and_of_the_rank_that_waits_longest() -> None:
    ranks = [
        {"data": 0.1, "host": 1.0, "idle": 2.0, "update": 0.5},
        {"data": 3.0, "host": 9.0, "idle": 0.0, "update": 9.0},
    ]
    found = Phases.of(ranks, rank=0, seconds=10.0, steps=50, more=0.5)
    assert found == Phases(10.0, 50, data=3.0, host=1.0, idle=2.5, update=0.5)
    assert found.share("data") == 0.3
    assert replace(found, seconds=0.0).share("data") == 0.0


def test_a_real_run_says_it_once_after_warm_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fullshard.faults import stragglers

    monkeypatch.setattr(stragglers, "STEPS", 4)
    small.model_folder(tmp_path / "model")
    small.token_file(tmp_path / "train.jsonl", records=32)
    alone: dict[str, Any] = {"topology": {"device": "cpu", "devices": 1}, "duration": {"steps": 14}}
    records = small.train(small.recipe(tmp_path, log={"every_steps": 2}, **alone))
    [event] = [record for record in records if record.get("event") == "limit"]
    assert event["step"] == 8, "the first logged step with three steps of warm-up and four that were compared"
    assert event["steps"] >= 4
    assert event["limit"] in ("data", "host", "memory bandwidth", "compute"), "which one depends on the machine"
    assert all(0 <= event[name] <= 1 for name in ("data", "host", "idle", "update"))
    log = (tmp_path / "runs" / "run" / "log.txt").read_text()
    assert log.count("Limited by ") == 1
    assert f"Limited by {event['limit']}: " in log
