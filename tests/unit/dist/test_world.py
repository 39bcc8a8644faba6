"""Joining: a rank reports which others are missing; the device follows the rule."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
from torch.distributed import TCPStore

from fullshard.dist.world import choose_device_type
from fullshard.errors import SetupError

CODE = """
from fullshard.dist.world import join
from fullshard.errors import SetupError
try:
    join(device="cpu", backend="auto", timeout_s=1)
except SetupError as error:
    print(error)
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_missing_ranks_are_named_after_the_timeout(rank: int) -> None:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    environment = {**os.environ, **place, "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True)
    assert f"Rank {rank} waited topology.timeout_s = 1 s at localhost:{port} for rank {1 - rank} of 2" in done.stdout
    assert "Check that every node runs the same command" in done.stdout


def test_requesting_a_missing_gpu_is_an_error() -> None:
    assert choose_device_type("auto") == "cpu"
    with pytest.raises(SetupError, match="topology.device = cuda, but torch sees no GPU"):
        choose_device_type("cuda")


def test_a_single_process_ignores_the_master_address() -> None:
    code = (
        CODE.replace("    join(", "    world = join(")
        + "print(world.size)\nfrom fullshard.dist.world import leave\nleave()"
    )
    environment = {**os.environ, "MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


def test_restarted_ranks_see_nothing_of_those_before() -> None:
    """As under `torchrun --max-restarts`: the agent keeps its store, where the ranks of the first attempt have met."""
    code = """
import torch
from fullshard.dist.world import join, leave
world = join(device="cpu", backend="gloo", timeout_s=300)
total = torch.tensor(10 ** world.rank)
torch.distributed.all_reduce(total)
print(int(total))
leave()
"""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    agent = {**os.environ, **place, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "run"}
    for attempt in ("0", "1"):
        numbers = [{"RANK": rank, "LOCAL_RANK": rank, "TORCHELASTIC_RESTART_COUNT": attempt} for rank in ("0", "1")]
        command, output = [sys.executable, "-c", code], subprocess.PIPE
        ranks = [subprocess.Popen(command, env={**agent, **own}, text=True, stdout=output) for own in numbers]
        assert [rank.communicate()[0] for rank in ranks] == ["11\n", "11\n"]
