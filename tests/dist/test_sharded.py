"""Saves of one run share a plan: a later save holds its own values, and tensors of another form are planned anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fullshard.checkpoint.reader import open_tensors
from fullshard.checkpoint.write import OneByOne, Sharded, Snapshot, Target, write
from fullshard.dist import reduce


def saves(run: Path) -> list[bool]:
    """Three saves: other values, then another form. Whether each needed a plan."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    whole = torch.arange(12.0).reshape(6, 2)
    group, sharded, planned = reduce.host_group(60), Sharded(threads=2), []
    for step, rows in ((1, whole), (2, whole + 1), (3, whole[:5])):
        tensors = {"model/w": distribute_tensor(rows, mesh, [Shard(0)]), "model/b": torch.tensor(float(step))}
        before = sharded._plan
        snapshot = Snapshot(step, tensors, {}, {}, {}, best=False)
        write(snapshot, Target(run, None, sharded), group=group)
        planned.append(sharded._plan is not before)
    return planned


def test_a_plan_is_kept_while_the_form_is_the_same(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert ranks.run(saves, tmp_path / "run", world=2) == [[True, False, True]] * 2
    whole = torch.arange(12.0).reshape(6, 2)
    for step, rows in ((1, whole), (2, whole + 1), (3, whole[:5])):
        stored = open_tensors(tmp_path / "run" / f"checkpoint-{step}")
        assert torch.equal(stored.whole("model/w"), rows)
        assert stored.whole("model/b") == step


def test_a_save_that_training_waits_for_holds_one_copy_at_a_time() -> None:
    """DCP itself keeps every copy until a file is written: the whole state once more, on a host short of memory."""
    around = torch.arange(30.0)
    state = {name: around[start : start + 10] for name, start in (("a", 0), ("b", 10), ("c", 20))}
    state["whole"] = torch.ones(4)
    from torchao.optim.subclass_8bit import OptimState8bit

    quantised = OptimState8bit.zeros((4, 256), block_size=256)
    quantised.copy_(torch.linspace(-1, 1, 1024).view(4, 256))
    state["quantised"], numbers = quantised, quantised.dequantize().clone()
    planner = OneByOne()
    planner.set_up_planner(dict(state), is_coordinator=True)
    kept = []
    for item in planner.create_local_plan().items:
        data = planner.resolve_data(item)
        if item.index.fqn in ("a", "b", "c"):
            assert torch.equal(data, state[item.index.fqn])
            assert sum(copy.untyped_storage().nbytes() for copy in kept) == 0
            kept.append(data)
    assert torch.equal(around, torch.arange(30.0))
    assert torch.equal(state["whole"], torch.ones(4)), "what was not copied stays"
    assert torch.equal(quantised.dequantize(), numbers)
