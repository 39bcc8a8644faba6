"""Where a fault of a drill happens, that it happens once, and which drills there are."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as modules

from fullshard.drills import acts, fault
from fullshard.drills.command import uncompiled
from fullshard.drills.drill import Drills
from fullshard.drills.fault import Fault
from fullshard.drills.kinds import DRILLS, chosen
from fullshard.errors import RecipeError
from fullshard.log.meters import Meters
from fullshard.prove.runs import RunFailed
from fullshard.recipes.read import read

optimizers = importlib.import_module("torch.optim.optimizer")  # torch.optim deletes the name


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What has happened, in order; the fault itself is `fault`."""
    seen: list[str] = []
    monkeypatch.setitem(acts.ACTS, "noted", lambda given: (seen.append("fault"), given)[1])
    monkeypatch.setattr(Meters, "phase", Meters.phase)
    monkeypatch.setenv("RANK", "0")
    return seen


def one_step(folder: Path, seen: list[str]) -> None:
    """A training step with its data and its save, as the loop makes them."""
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with Meters().phase("data"):
        seen.append("data")
    output = layer(torch.ones(1, 2))
    seen.append("forward")
    output.sum().backward()
    seen.append("backward")
    optimizer.step()
    seen.append("update")
    hidden = folder / ".unfinished-checkpoint-4"
    hidden.mkdir(exist_ok=True)
    (hidden / "file").write_text("")
    seen.append("save")


@pytest.mark.parametrize("where", ["data", "forward", "backward", "update", "save"])
def test_a_fault_happens_once_before_its_place_is_over(where: Any, happened: list[str], tmp_path: Path) -> None:
    part = Fault(what="noted", where=where, after=0, rank=0, of=str(tmp_path), name="0")
    hooks = (modules._global_forward_pre_hooks, modules._global_forward_hooks, optimizers._global_optimizer_pre_hooks)
    try:
        fault._PLACES[where](part._act)
        one_step(tmp_path, happened)
        assert happened.count("fault") == 1
        assert happened[happened.index("fault") + 1] == where
        assert part.mark.exists()
        one_step(tmp_path, happened)
        assert happened.count("fault") == 1
    finally:
        for each in hooks:
            each.clear()


def test_a_gradient_becomes_nan_where_the_backward_pass_hands_it_over(tmp_path: Path) -> None:
    part = Fault(what="not_a_number", where="backward", after=0, rank=0, of=str(tmp_path), name="0")
    tensor = torch.ones(2, requires_grad=True)
    doubled = tensor * 2
    doubled.register_hook(part._act)
    doubled.sum().backward()
    assert tensor.grad is not None
    assert tensor.grad.isnan().all()


def test_there_are_many_drills_and_each_has_a_name_and_a_fault() -> None:
    names = [drill.name for drill in DRILLS]
    assert len(set(names)) == len(names) >= 24
    for drill in DRILLS:
        assert drill.to_launcher or drill.faults
        assert all(each.what in acts.ACTS for each in drill.faults)


def test_drills_are_chosen_by_name() -> None:
    assert [drill.name for drill in chosen("killed-save, hangs-data")] == ["killed-save", "hangs-data"]
    assert chosen(None) == DRILLS
    with pytest.raises(RecipeError, match=r"'killed-sav' is not a fault.*killed-save"):
        chosen("killed-sav")


@pytest.mark.parametrize("compiled", [None, True, False])
def test_a_broken_run_is_not_compiled_also_where_that_is_automatic(compiled: bool | None) -> None:
    recipe = read("quickstart").recipe
    asked = recipe.model_copy(update={"sharding": recipe.sharding.model_copy(update={"compile": compiled})})
    assert uncompiled(asked).sharding.compile is False


def test_a_run_that_fails_without_a_fault_shows_its_last_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Drills(read("quickstart").recipe, tmp_path, 2)
    (tmp_path / "straight.txt").write_text("header\nError: no such file\n")
    monkeypatch.setattr(Drills, "_run", lambda *_: 2)
    with pytest.raises(
        RunFailed, match=r"ended with exit code 2. Its last lines:\n    header\n    Error: no such file"
    ):
        runs.straight()
