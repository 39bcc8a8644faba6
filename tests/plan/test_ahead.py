"""Predicted memory in real runs: in the header, and beside what rank 0 holds after warm-up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard.contracts.launcher import Ranks
from fullshard.contracts.world import World
from fullshard.log.metrics import FILE, read
from fullshard.plan.ahead import Ahead, predicted
from fullshard.plan.hardware import gpu_like
from fullshard.recipes.read import read_recipe
from fullshard.report import tables
from fullshard.report.folders import Run
from fullshard.setup.run_inputs import build_module
from tests import small
from tests.ranks import RankPool

RANKS, WORLD = Ranks(1, 1), World(0, 1, 0, 1, torch.device("cpu"), "gloo")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("ahead")
    small.model_folder(place / "model")
    small.token_file(place / "train.jsonl", records=64)
    return place


@pytest.mark.parametrize(
    ("world", "changes"),
    [
        (1, {"batch": {"per_device": "auto", "global": 16}}),
        (2, {"ema": 0.9, "precision": "bf16-pure"}),
        (2, {"model": {"lora": {"r": 4}}, "duration": {"steps": 1}}),
        (4, {"optimizer": {"kind": "adamw_8bit"}, "sharding": {"strategy": "grad_op"}}),
    ],
)
def test_a_run_says_what_is_predicted_and_what_it_holds(
    world: int, changes: dict[str, Any], folder: Path, ranks: RankPool
) -> None:
    name = f"run-{world}-{'-'.join(changes)}"
    ranks.run(small.train, small.recipe(folder, name=name, **changes), world=world)
    records = read(folder / "runs" / name / FILE)
    (found,) = [record for record in records if record.get("event") == "memory"]
    assert found["what"] == "held between steps"
    assert found["error"] == 0
    assert found["predicted_gib"] == found["real_gib"] > 0
    assert found["step"] == min(2, records[-1]["step"])
    log = (folder / "runs" / name / "log.txt").read_text()
    assert "predicted: a rank holds parameters" in log
    assert log.count("Memory of rank 0, held between steps: ") == (found["step"] == 2)
    assert records[-1]["event"] == "finished"
    tiles = {title: remark for title, _, remark in tables.tiles(Run(folder / "runs" / name, name))}
    assert tiles["held between steps"] == "by rank 0, as predicted"


def test_what_is_traced_is_predicted_by_a_process_of_its_own(folder: Path) -> None:
    recipe = read_recipe(small.recipe(folder, name="traced", sharding={"compile": True}))
    ahead = Ahead(recipe, build_module(recipe, None), WORLD)
    assert ahead._process is not None
    ahead._process.wait()
    records: list[dict[str, Any]] = []
    said: list[str] = []
    ahead._on_gpu = True  # the numbers of a GPU are those of the CUDA allocator; here is none
    ahead._compared = lambda step: ("compared", {"event": "memory", "step": step})  # type: ignore[method-assign]
    with ahead.beside(records.append, said.append) as write:
        write({"kind": "train", "step": 1})
        write({"kind": "train", "step": 2})
    assert said[0].startswith("Memory: predicted: a rank holds parameters")
    assert said[1:] == ["compared"]
    assert [record.get("event") for record in records] == [None, None, "memory"]
    alone = predicted(recipe, RANKS, module=None)
    assert ahead._found == alone
    assert records[0]["predicted_memory_gib"] == round(alone["peak"] / 2**30, 3)


def test_a_run_that_ends_first_leaves_nothing_of_that_process(folder: Path) -> None:
    recipe = read_recipe(small.recipe(folder, name="short", sharding={"compile": True}))
    ahead = Ahead(recipe, build_module(recipe, None), WORLD)
    process = ahead._process
    assert process is not None
    with ahead.beside(lambda record: None, print):
        pass
    assert process.returncode is not None
    assert process.stdout is not None
    assert process.stdout.closed


def test_a_gpu_is_described_to_that_process_by_name_and_memory(folder: Path) -> None:
    recipe = read_recipe(small.recipe(folder, name="gpu"))
    found = predicted(recipe, RANKS, module=None, gpu=gpu_like("NVIDIA H200", 150_000_000_000))
    assert " on h200, " in found["text"]
    assert "139.7 GiB" in found["text"]


def test_what_cannot_be_predicted_costs_a_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = read_recipe(small.recipe(folder, name="unknown"))
    monkeypatch.setattr("fullshard.plan.predict.held", lambda *_, **__: 1 / 0)
    found = predicted(recipe, RANKS, module=None)
    assert found == {"text": "it cannot be predicted: ZeroDivisionError: division by zero"}
    ahead, records, said = Ahead(recipe, build_module(recipe, None), WORLD), list[dict[str, Any]](), list[str]()
    ahead._found = found
    with ahead.beside(records.append, said.append) as write:
        write({"kind": "train", "step": 2})
    assert said == ["Memory: it cannot be predicted: ZeroDivisionError: division by zero."]
    assert records == [{"kind": "train", "step": 2}]
