"""Two nodes, each with its own network, whose host names resolve to the loopback: they meet, and a cut is reported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fullshard.log.metrics import FILE, last_step, read
from tests.dist.namespaces import ADDRESSES, Nodes, NotPermitted, two_nodes
from tests.small import model_folder, recipe, token_file

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 30


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    try:
        with two_nodes(tmp_path) as made:
            yield made
    except NotPermitted as reason:
        pytest.skip(f"network namespaces are not permitted here: {reason}")


def train(nodes: Nodes, folder: Path, node: int, *options: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "fullshard",
        "train",
        str(folder / "recipe.yaml"),
        "--devices",
        "1",
        "--nodes",
        "2",
    ]
    return nodes.start(node, [*command, *options], cwd=ROOT, start_new_session=True)


@pytest.mark.slow
def test_two_nodes_meet_train_and_notice_a_cut(nodes: Nodes, tmp_path: Path) -> None:
    model_folder(tmp_path / "model", num_hidden_layers=1)
    token_file(tmp_path / "train.jsonl", records=64)
    sections: dict[str, Any] = {
        "duration": {"steps": 1_000_000},
        "topology": {"device": "cpu", "timeout_s": TIMEOUT_S},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe(tmp_path, name="two", **sections)))
    nameless = train(nodes, tmp_path, 1, "--master", f"{ADDRESSES[0]}:29500")
    assert "--node-rank is missing, and 10.77.0.1 is not an address of this machine" in nameless.communicate()[1]
    assert nameless.returncode == 2
    running = [
        train(nodes, tmp_path, 0, "--master", "zero:29500"),  # without --node-rank: zero is this machine
        train(nodes, tmp_path, 1, "--node-rank", "1", "--master", "zero:29500"),
    ]
    try:
        metrics = tmp_path / "runs" / "two" / FILE
        while not (metrics.exists() and (last_step(metrics) or 0) >= 2):
            assert all(process.poll() is None for process in running), [p.communicate() for p in running]
            time.sleep(0.1)
        second = train(nodes, tmp_path, 1, "--node-rank", "0", "--master", "zero:29500")
        assert "Two nodes claim --node-rank 0: host" in second.communicate()[1]
        nodes.cut()
        ends = [process.communicate() for process in running]
    finally:
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert [process.returncode for process in running] == [1, 1], ends
    for rank, (_, err) in enumerate(ends):
        assert f"Rank {rank} (process" in err
        assert "lost the connection to another rank, and no rank of this node ended before it" in err
        assert "(collective-timeout)" in err
        assert "network between the nodes" in " ".join(err.split())
        assert "traceback is above" not in err
        assert "Crash folder: " in err


@pytest.mark.slow
def test_variables_of_an_engine_are_enough(nodes: Nodes, tmp_path: Path) -> None:
    """As in pods of Kubeflow Trainer: the same command on every node, without a flag. Losses are those of one node."""
    model_folder(tmp_path / "model", num_hidden_layers=1)
    token_file(tmp_path / "train.jsonl", records=64)
    sections = {"duration": {"steps": 3}, "topology": {"device": "cpu", "timeout_s": 2 * TIMEOUT_S}}
    for name in ("engine", "alone"):
        (tmp_path / f"{name}.yaml").write_text(json.dumps(recipe(tmp_path, name=name, **sections)))
    command = [sys.executable, "-m", "fullshard", "train"]
    job = {"PET_NNODES": 2, "PET_NPROC_PER_NODE": 2, "PET_MASTER_ADDR": "zero", "PET_MASTER_PORT": 29400}
    running = []
    for node in (1, 0):  # in a cluster any pod may be the first
        variables = [f"{name}={value}" for name, value in {**job, "PET_NODE_RANK": node}.items()]
        words = ["env", *variables, *command, str(tmp_path / "engine.yaml")]
        running.append(nodes.start(node, words, cwd=ROOT, start_new_session=True))
    alone = subprocess.run([*command, str(tmp_path / "alone.yaml")], cwd=ROOT, capture_output=True, text=True)
    ends = [process.communicate() for process in running]
    assert [process.returncode for process in running] == [0, 0], ends
    assert alone.returncode == 0, alone.stderr
    said = ends[1][0]
    assert "topology.nodes: 2 (Kubernetes) over 1 (default)" in said
    assert "4 ranks" in said
    losses = [_losses(tmp_path / "runs" / name / FILE) for name in ("engine", "alone")]
    assert len(losses[0]) == 3
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def _losses(path: Path) -> list[float]:
    return [record["loss"] for record in read(path) if record["kind"] == "train"]
