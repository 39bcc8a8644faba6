"""Joining: a rank reports which others are missing; the device follows the rule."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

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
