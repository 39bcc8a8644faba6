"""What `check --quick` warns of, `train` says in its header: the same words, once, on the screen and in log.txt."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import small
from tests.check.healthy_recipe import Seed, healthy_place, seed_in
from tests.ranks import RankPool

CASES: dict[str, tuple[str, Callable[[Seed], None]]] = {}
"""The check that must warn, and what is done to the recipe."""


def case(check: str) -> Callable[[Callable[[Seed], None]], Callable[[Seed], None]]:
    def put(make: Callable[[Seed], None]) -> Callable[[Seed], None]:
        CASES[make.__name__] = check, make
        return make

    return put


@case("learning rate")
def lr_of_a_hundred(seed: Seed) -> None:
    seed.set("optimizer", lr=100)


@case("leakage")
def validation_that_is_train(seed: Seed) -> None:
    seed.set("data", validation=str(seed.folder / "train.jsonl"))
    seed.set("evaluate", parts=["loss"])


@case("leakage")
def every_validation_record_is_trained_on(seed: Seed) -> None:
    lines = (seed.folder / "train.jsonl").read_text().splitlines(keepends=True)
    (seed.folder / "validation.jsonl").write_text("".join(lines[:9]))
    seed.set("data", validation=str(seed.folder / "validation.jsonl"))
    seed.set("evaluate", parts=["loss"])


@case("duplicates")
def nearly_all_records_repeat_one(seed: Seed) -> None:
    lines = (seed.folder / "train.jsonl").read_text().splitlines(keepends=True)
    (seed.folder / "train.jsonl").write_text("".join([lines[0]] * 63 + lines[1:2]))


@case("batch")
def one_record(seed: Seed) -> None:
    lines = (seed.folder / "train.jsonl").read_text().splitlines(keepends=True)
    (seed.folder / "train.jsonl").write_text(lines[0])


@case("validation")
def nearly_everything_is_held_out(seed: Seed) -> None:
    seed.set("data", holdout=0.99)
    seed.set("evaluate", parts=["loss"])
    seed.recipe["batch"] = {"per_device": 1}


@case("no effect")
def held_out_for_no_evaluation(seed: Seed) -> None:
    seed.set("data", holdout=0.1)


@case("workers")
def far_more_workers_than_cores(seed: Seed) -> None:
    seed.set("data", workers=2 * len(os.sched_getaffinity(0)) + 1)


@case("no effect")
def offload_on_a_cpu(seed: Seed) -> None:
    seed.set("sharding", cpu_offload=True)


@case("no effect")
def a_key_of_fsdp1(seed: Seed) -> None:
    seed.set("sharding", use_orig_params=True)


@case("no effect")
def warm_up_as_long_as_the_run(seed: Seed) -> None:
    seed.set("schedule", warmup=50)
    seed.recipe["duration"] = {"steps": 2}


@case("weight decay")
def weight_decay_of_ten(seed: Seed) -> None:
    seed.set("optimizer", weight_decay=10, lr=1e-4)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return healthy_place(tmp_path_factory.mktemp("healthy"))


@pytest.fixture
def seed(healthy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Seed]:
    seed = seed_in(tmp_path, healthy, monkeypatch)
    seed.recipe["duration"] = {"steps": 1}
    seed.set("checkpoint", at_end=False)
    with seed.held:
        yield seed


@pytest.mark.parametrize("name", CASES)
def test_train_says_what_check_warns_of(name: str, seed: Seed) -> None:
    check, make = CASES[name]
    make(seed)
    told = json.loads(seed.ask("check", "--quick", "--json").stdout)
    warnings = [finding for finding in told["findings"] if finding["level"] == "warning"]
    assert check in {finding["check"] for finding in warnings}
    result = seed.ask("train", "--devices", "1")
    print(result.output)
    assert result.exit_code == 0
    for finding in warnings:
        sentence = f"warning {finding['check']}: {finding['text']} {finding['remedy']}"
        assert " ".join(result.stdout.split()).count(sentence) == 1
        assert logged(seed.folder / "runs" / "run" / "log.txt").count(sentence) == 1
    # Nothing is said a second time in other words.
    assert result.stdout.count("warning") == len(warnings)


def test_a_run_without_a_mistake_warns_of_nothing(seed: Seed) -> None:
    result = seed.ask("train", "--devices", "1")
    assert (result.exit_code, "warning" in result.stdout) == (0, False)


def test_several_ranks_warn_once(seed: Seed, ranks: RankPool) -> None:
    seed.set("optimizer", lr=100)
    ranks.run(small.train, seed.recipe, world=2)
    log = logged(seed.folder / "runs" / "run" / "log.txt")
    assert log.count("warning") == log.count("warning learning rate: optimizer.lr = 100") == 1


def test_a_run_that_dies_before_its_header_has_warned(seed: Seed) -> None:
    seed.set("optimizer", lr=100)
    earlier = seed.folder / "runs" / "run"
    earlier.joinpath("checkpoint-1").mkdir(parents=True)
    earlier.joinpath("checkpoint-1", "manifest.json").write_text("{}")  # not whole
    result = seed.ask("train", "--devices", "1")
    print(result.output)
    assert result.exit_code == 2
    assert "warning: learning rate: optimizer.lr = 100" in " ".join(result.stdout.split())


def logged(path: Path) -> str:
    """The lines of a log without times and ranks, as one text."""
    return " ".join(" ".join(line.split()[4:]) for line in path.read_text().splitlines())
