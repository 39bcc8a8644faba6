"""`fullshard.train` in a program that has initialised torch.distributed itself: joined, and left as it was found."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fullshard
from fullshard import SetupError
from tests.small import curve, model_folder, recipe, token_file

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("joined")
    model_folder(folder / "model")
    token_file(folder / "train.jsonl", records=64)
    return folder


def settings(folder: Path, name: str, **sections: Any) -> dict[str, Any]:
    return recipe(folder, name=name, duration={"steps": 3}, **sections)


@pytest.fixture(scope="module")
def launched(folder: Path) -> fullshard.Result:
    """The same run on two ranks that fullshard starts."""
    return fullshard.train(settings(folder, "launched", topology={"device": "cpu", "devices": 2}))


def in_a_program(settings: dict[str, Any], variables: dict[str, str]) -> dict[str, Any]:
    """One rank of a program that made its own process group, with only these variables, and trains in a thread."""
    for name in (*LAUNCHER, "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        os.environ.pop(name, None)
    rank = dist.get_rank()
    os.environ.update({name: value.format(rank=rank) for name, value in variables.items()})
    before, group = dict(os.environ), dist.group.WORLD
    found: list[fullshard.Result] = []
    thread = threading.Thread(target=lambda: found.append(fullshard.train(settings)))
    thread.start()
    thread.join()
    total = torch.ones(1)
    dist.all_reduce(total)
    kept = {name: value for name, value in os.environ.items() if name in (*LAUNCHER, "MASTER_ADDR", "MASTER_PORT")}
    return {
        "metrics": found[0].metrics,
        "live": type(found[0].model).__name__,
        "group": dist.group.WORLD is group and total.item() == dist.get_world_size(),
        "variables": kept == {name: before[name] for name in kept if name in before},
    }


BY_RAY = {"RANK": "{rank}", "WORLD_SIZE": "2", "LOCAL_RANK": "{rank}", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0"}
BY_RAY |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "ACCELERATE_TORCH_DEVICE": "cpu"}


@pytest.mark.parametrize("variables", [{}, BY_RAY], ids=["no launcher", "as Ray sets them"])
def test_a_process_group_of_the_program_is_joined(
    folder: Path, ranks: Any, launched: fullshard.Result, variables: dict[str, str]
) -> None:
    """The losses are those of `fullshard train`, and the group works on. MASTER_PORT is one that cannot be bound."""
    found = ranks.run(in_a_program, settings(folder, f"joined-{len(variables)}"), variables, world=2)
    for each in found:
        assert each["group"]
        assert each["variables"]
        assert each["live"] == "FSDPQwen3ForCausalLM"
    assert curve(found[0]["metrics"], "loss", "grad_norm") == curve(launched.metrics, "loss", "grad_norm")
    assert len(curve(launched.metrics, "loss")) == 3


def nccl_file(settings: dict[str, Any]) -> tuple[set[str], str | None]:
    """Where NCCL writes to while one rank trains, and afterwards."""
    found = set[str]()

    def stop() -> bool:
        found.add(os.environ["NCCL_DEBUG_FILE"])
        return False

    fullshard.train(settings, stop=stop)
    return found, os.environ.get("NCCL_DEBUG_FILE")


def test_nccl_writes_a_file_for_each_rank_of_a_program(folder: Path, ranks: Any) -> None:
    for rank, found in enumerate(ranks.run(nccl_file, settings(folder, "debug", log={"debug": True}), world=2)):
        assert found == ({f"{folder}/runs/debug/nccl-rank-{rank}-%h-%p.txt"}, None)


@pytest.fixture
def without_cpu() -> Iterator[None]:
    """A group of this process whose backend is for GPU tensors only."""
    dist.init_process_group("cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_backend_that_does_not_fit_the_device(folder: Path, without_cpu: None) -> None:
    with pytest.raises(SetupError, match=r"has the backend cuda:gloo, and this run on cpu needs gloo for cpu"):
        fullshard.train(settings(folder, "wrong-backend", topology={"device": "cpu", "devices": 1}))
    assert dist.is_initialized()


def test_a_program_may_ask_to_stop(folder: Path) -> None:
    """In a thread, where no signal is heard: the run saves, and the next call goes on to the losses of a whole run."""
    alone: dict[str, Any] = {"topology": {"device": "cpu", "devices": 1}, "duration": {"steps": 5}}
    parts = settings(folder, "parts") | alone
    found: list[fullshard.Result] = []
    asked = iter([False, True, True, True])
    thread = threading.Thread(target=lambda: found.append(fullshard.train(parts, stop=lambda: next(asked))))
    thread.start()
    thread.join()
    assert (found[0].stopped, found[0].step) == ("signal", 3)  # asked in step 2, read by every rank in step 3
    assert found[0].last_checkpoint == folder / "runs" / "parts" / "checkpoint-3"
    resumed, whole = fullshard.train(parts), fullshard.train(settings(folder, "whole") | alone)
    assert (resumed.stopped, resumed.step) == ("done", 5)
    assert curve(resumed.metrics, "loss") == curve(whole.metrics, "loss")
    with pytest.raises(SetupError, match=r"stop = .* cannot be asked: this call starts 2 processes"):
        fullshard.train(settings(folder, "asked", topology={"device": "cpu", "devices": 2}), stop=lambda: True)
