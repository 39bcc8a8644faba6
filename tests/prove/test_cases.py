"""The runs that a recipe is proven by: the same samples in every step, and one thing at a time other than in it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from fullshard.config.part import plain
from fullshard.contracts.launcher import Ranks
from fullshard.log.console import Console
from fullshard.prove.cases import NAMES, Case, Place, Plan, plan
from fullshard.recipe import Recipe
from fullshard.recipes.read import read_recipe
from fullshard.setup.run_inputs import prepare_inputs
from tests.small import model_folder, recipe, token_file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cases")
    model_folder(path / "model", num_hidden_layers=1)
    token_file(path / "train.jsonl", records=40)
    return path


def place(world: int = 1, **changes: Any) -> Place:
    given: dict[str, Any] = {"folder": Path("/runs"), "ranks": Ranks(world), "device": "cpu", "num_gpus": 0}
    return Place(**{**given, "half": False, "strategy": "full", **changes})


def planned(folder: Path, where: Place, *cases: str, **sections: Any) -> tuple[Recipe, Plan]:
    asked = read_recipe(recipe(folder, **sections))
    world = where.ranks.per_node * asked.topology.nodes
    return asked, plan(
        asked, where, prepare_inputs(asked, world_size=world, console=Console(silent=True)), cases=cases or NAMES
    )


def everyone(found: Plan) -> list[Case]:
    return [case for case in (found.straight, found.killed, found.reference, *found.others) if case is not None]


def changed(before: dict[str, Any], after: dict[str, Any], where: str = "") -> dict[str, Any]:
    """Settings that differ, by key path."""
    found: dict[str, Any] = {}
    for key, value in after.items():
        path = f"{where}{key}"
        if isinstance(value, dict) and isinstance(before.get(key), dict):
            found |= changed(before[key], value, f"{path}.")
        elif before.get(key) != value:
            found[path] = value
    return found


def test_the_straight_run_is_the_recipe_but_for_its_length_and_what_it_writes(folder: Path) -> None:
    asked, found = planned(folder, place(), checkpoint={"every_steps": 100}, evaluate={"parts": ["loss"]})
    assert changed(plain(asked), plain(found.straight.recipe)) == {
        "name": "straight",
        "output": "/runs",
        "checkpoint.every_steps": 2,
        "checkpoint.at_end": False,
        "checkpoint.keep": None,
        "evaluate.every_epochs": None,
        "evaluate.parts": [],
        "log.sample_ids": True,
        "topology.devices": 1,
    }
    assert found.killed is not None
    assert changed(plain(found.straight.recipe), plain(found.killed.recipe)) == {"name": "killed"}


def test_each_case_changes_one_thing(folder: Path) -> None:
    _, found = planned(folder, place(world=2))
    base = plain(found.straight.recipe)
    differences = {case.name: changed(base, plain(case.recipe)) for case in found.others}
    for case, difference in differences.items():
        assert (difference.pop("name"), difference.pop("checkpoint.every_steps")) == (case, 6)
    assert differences == {
        "split": {"batch.per_device": 2},
        "world": {"topology.devices": 1},
        "strategy": {"sharding.strategy": "grad_op"},
    }
    assert [case.ranks.per_node for case in found.others] == [2, 1, 2]
    assert (found.reference, found.notes) == (None, ())


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
def test_every_run_can_divide_the_step(folder: Path, world: int, half: bool) -> None:
    inputs = prepare_inputs(read_recipe(recipe(folder)), world_size=1, console=Console(silent=True))
    for per_device, accumulate in itertools.product([1, 3, 4, 6], [1, 3, 32]):
        own = per_device * accumulate * world
        asked = read_recipe(recipe(folder, batch={"per_device": per_device, "global": own}))
        steps = replace(inputs.plan, per_device=per_device, accumulate=accumulate, world=world)
        found = plan(asked, place(world, half=half), replace(inputs, plan=steps), cases=NAMES)
        for case in everyone(found):
            passes, left = divmod(found.samples_per_step, case.recipe.batch.per_device * case.ranks.per_node)
            assert (left, case.recipe.batch.global_size) == (0, found.samples_per_step), case
            assert 1 <= passes <= 32, case
        if accumulate > 1:
            assert found.samples_per_step > per_device * world, "what accumulates goes on accumulating"
        said = any("samples per step instead of" in note for note in found.notes)
        assert said == (found.samples_per_step != own)


def test_half_precision_and_dropout_have_their_own_reference(folder: Path) -> None:
    model = {"path": str(folder / "model"), "overrides": {"attention_dropout": 0.1}, "lora": {"dropout": 0.2}}
    asked, found = planned(folder, place(half=True), precision="bf16", model=model)
    assert found.reference is not None
    for case in (found.reference, *found.others):
        settings = plain(case.recipe)
        assert settings["precision"] == "fp32"
        assert settings["model"]["overrides"] == {"attention_dropout": 0.0}
        assert settings["model"]["lora"]["dropout"] == 0
    assert plain(found.straight.recipe)["model"] == plain(asked)["model"]
    assert found.straight.recipe.precision == "bf16"
    assert "in fp32 and without dropout, in micro-batches of 2" in found.notes[-1]


def test_8_bit_states_are_kept_in_fp32_where_slices_differ(folder: Path) -> None:
    _, found = planned(folder, place(), optimizer={"kind": "adamw_8bit", "lr": 0.5})
    assert found.reference is not None
    assert (found.reference.recipe.optimizer.kind(), found.reference.recipe.optimizer.lr) == ("adamw", 0.5)
    assert found.straight.recipe.optimizer.kind() == "adamw_8bit"


def test_a_dropout_without_a_setting_is_left_out_with_its_name(folder: Path) -> None:
    asked = read_recipe(recipe(folder))
    inputs = prepare_inputs(asked, world_size=1, console=Console(silent=True))
    inputs.module.add_module("mine", nn.Dropout(0.5))
    found = plan(asked, place(), inputs, cases=("resume", "world"))
    assert found.killed is not None
    assert found.others == ()
    assert "turns off the dropout mine" in found.left_out["world"]


@pytest.mark.parametrize(("num_gpus", "ids"), [(1, None), (8, (3,))])
def test_one_gpu_is_shared_by_two_ranks_over_gloo(folder: Path, num_gpus: int, ids: tuple[int, ...] | None) -> None:
    _, found = planned(folder, place(device="cuda", num_gpus=num_gpus, ranks=Ranks(1, device_ids=ids)))
    split, world, strategy = found.others
    assert world.title == "2 ranks instead of 1, one GPU, from step 2"
    for case in (world, strategy):
        topology = case.recipe.topology
        assert (topology.backend, topology.devices, case.ranks.per_node) == ("gloo", 2, 2)
        assert case.ranks.device_ids == ids
        assert case.recipe.batch.per_device == 2, "the memory of one GPU is there once"
    assert split.recipe.topology.backend == "auto"


def test_several_gpus_keep_theirs_and_several_nodes_become_one(folder: Path) -> None:
    where = place(device="cuda", num_gpus=8, ranks=Ranks(4, device_ids=(1, 3, 5, 7)))
    _, found = planned(folder, where, topology={"nodes": 2, "devices": [1, 3, 5, 7]}, batch={"global": 64})
    split, world, strategy = found.others
    assert (world.ranks.device_ids, world.recipe.topology.backend) == ((1, 3), "auto")
    assert strategy.ranks.device_ids == (1, 3, 5, 7)
    assert {(case.ranks.nodes, case.recipe.topology.nodes) for case in everyone(found)} == {(1, 1)}
    assert "One node instead of 2." in found.notes


def test_only_what_is_asked_for_is_run(folder: Path) -> None:
    _, found = planned(folder, place(half=True), "resume", precision="bf16")
    assert [case.name for case in everyone(found)] == ["straight", "killed"]
    _, found = planned(folder, place(half=True), "world", precision="bf16")
    assert [case.name for case in everyone(found)] == ["reference", "world"]
