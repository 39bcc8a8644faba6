"""What `check --quick` warns of, `train` says in its header: the same words, once, on the screen and in log.txt."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import small
from tests.check.healthy_recipe import Workspace
from tests.ranks import RankPool

CASES: dict[str, tuple[str, Callable[[Workspace], None]]] = {}
"""The check that must warn, and what is done to the recipe."""


def case(check: str) -> Callable[[Callable[[Workspace], None]], Callable[[Workspace], None]]:
    def put(make: Callable[[Workspace], None]) -> Callable[[Workspace], None]:
        CASES[make.__name__] = check, make
        return make

    return put


@case("learning rate")
def lr_of_a_hundred(workspace: Workspace) -> None:
    workspace.set("optimizer", lr=100)


@case("leakage")
def validation_that_is_train(workspace: Workspace) -> None:
    workspace.set("data", validation=str(workspace.folder / "train.jsonl"))
    workspace.set("evaluate", parts=["loss"])


@case("leakage")
def every_validation_record_is_trained_on(workspace: Workspace) -> None:
    lines = (workspace.folder / "train.jsonl").read_text().splitlines(keepends=True)
    (workspace.folder / "validation.jsonl").write_text("".join(lines[:9]))
    workspace.set("data", validation=str(workspace.folder / "validation.jsonl"))
    workspace.set("evaluate", parts=["loss"])


@case("duplicates")
def nearly_all_records_repeat_one(workspace: Workspace) -> None:
    lines = (workspace.folder / "train.jsonl").read_text().splitlines(keepends=True)
    (workspace.folder / "train.jsonl").write_text("".join([lines[0]] * 63 + lines[1:2]))


@case("batch")
def one_record(workspace: Workspace) -> None:
    lines = (workspace.folder / "train.jsonl").read_text().splitlines(keepends=True)
    (workspace.folder / "train.jsonl").write_text(lines[0])


@case("validation")
def nearly_everything_is_held_out(workspace: Workspace) -> None:
    workspace.set("data", holdout=0.99)
    workspace.set("evaluate", parts=["loss"])
    workspace.recipe["batch"] = {"per_device": 1}


@case("no effect")
def held_out_for_no_evaluation(workspace: Workspace) -> None:
    workspace.set("data", holdout=0.1)


@case("workers")
def far_more_workers_than_cores(workspace: Workspace) -> None:
    workspace.set("data", workers=2 * len(os.sched_getaffinity(0)) + 1)


@case("no effect")
def offload_on_a_cpu(workspace: Workspace) -> None:
    workspace.set("sharding", cpu_offload=True)


@case("no effect")
def a_key_of_fsdp1(workspace: Workspace) -> None:
    workspace.set("sharding", use_orig_params=True)


@case("no effect")
def warm_up_as_long_as_the_run(workspace: Workspace) -> None:
    workspace.set("schedule", warmup=50)
    workspace.recipe["duration"] = {"steps": 2}


@case("weight decay")
def weight_decay_of_ten(workspace: Workspace) -> None:
    workspace.set("optimizer", weight_decay=10, lr=1e-4)


@pytest.fixture(autouse=True)
def _one_step(workspace: Workspace) -> None:
    workspace.recipe["duration"] = {"steps": 1}
    workspace.set("checkpoint", at_end=False)


@pytest.mark.parametrize("name", CASES)
def test_train_shows_the_warnings_of_check(name: str, workspace: Workspace) -> None:
    check, make = CASES[name]
    make(workspace)
    report = json.loads(workspace.run("check", "--quick", "--json").stdout)
    warnings = [finding for finding in report["findings"] if finding["level"] == "warning"]
    assert check in {finding["check"] for finding in warnings}
    result = workspace.run("train", "--devices", "1")
    print(result.output)
    assert result.exit_code == 0
    for finding in warnings:
        sentence = f"warning {finding['check']}: {finding['text']} {finding['remedy']}"
        assert " ".join(result.stdout.split()).count(sentence) == 1
        assert logged(workspace.folder / "runs" / "run" / "log.txt").count(sentence) == 1
    # Nothing is said a second time in other words.
    assert len(re.findall(r"^ *warning ", result.stdout, flags=re.MULTILINE)) == len(warnings)


def test_a_healthy_run_has_no_warnings(workspace: Workspace) -> None:
    result = workspace.run("train", "--devices", "1")
    assert (result.exit_code, "warning" in result.stdout) == (0, False)


def test_several_ranks_warn_once(workspace: Workspace, ranks: RankPool) -> None:
    workspace.set("optimizer", lr=100)
    ranks.run(small.train, workspace.recipe, world=2)
    log = logged(workspace.folder / "runs" / "run" / "log.txt")
    assert log.count("warning") == log.count("warning learning rate: optimizer.lr = 100") == 1


def test_a_run_that_fails_before_its_header_still_warns(workspace: Workspace) -> None:
    workspace.set("optimizer", lr=100)
    earlier = workspace.folder / "runs" / "run"
    earlier.joinpath("checkpoint-1").mkdir(parents=True)
    earlier.joinpath("checkpoint-1", "manifest.json").write_text("{}")  # not whole
    result = workspace.run("train", "--devices", "1")
    print(result.output)
    assert result.exit_code == 2
    assert "warning: learning rate: optimizer.lr = 100" in " ".join(result.stdout.split())


def logged(path: Path) -> str:
    """The lines of a log without times and ranks, as one text."""
    return " ".join(" ".join(line.split()[4:]) for line in path.read_text().splitlines())
