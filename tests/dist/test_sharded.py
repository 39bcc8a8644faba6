"""Saves of one run share a plan: a later save holds its own values, and tensors of another form are planned anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fullshard.checkpoint.reader import open_tensors
from fullshard.checkpoint.sharded import Sharded
from fullshard.checkpoint.write import Snapshot, Target, write
from fullshard.dist import reduce


def saves(run: Path) -> list[bool]:
    """Three saves: other values, then another form. Whether each needed a plan."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    whole = torch.arange(12.0).reshape(6, 2)
    group, sharded, planned = reduce.host_group(60), Sharded(threads=2), []
    for step, rows in ((1, whole), (2, whole + 1), (3, whole[:5])):
        tensors = {"model/w": distribute_tensor(rows, mesh, [Shard(0)]), "model/b": torch.tensor(float(step))}
        before = sharded._plan
        snapshot = Snapshot(step, tensors, [], reduce.OnItsWay(torch.zeros(0)), {}, {}, False)
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
