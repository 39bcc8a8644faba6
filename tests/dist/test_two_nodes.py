"""Two nodes, each with its own network, whose host names resolve to the loopback: they meet, train what one node does,
restart together, and notice when the other one is gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from fullshard.log.metrics import FILE, last_step, read
from tests.dist.namespaces import ADDRESSES, Nodes, NotPermitted, two_nodes
from tests.dist.restarted_runs import KEYS, assert_equal_runs, inputs, restarts, settings
from tests.near import assert_near
from tests.small import curve
from tests.unavailable import unavailable

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 60
STEPS = 6
MET = ("--node-rank", "1", "--master", "zero:29500")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@contextmanager
def made(folder: Path) -> Iterator[Nodes]:
    try:
        with two_nodes(folder) as found:
            yield found
    except NotPermitted as reason:
        unavailable(f"Network namespaces are not permitted here: {reason}. Run as root, in a privileged container.")


@pytest.fixture
def nodes(tmp_path: Path, two: object) -> Iterator[Nodes]:
    """After `two`, which makes its own for a while."""
    with made(tmp_path) as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return inputs(tmp_path_factory.mktemp("nodes"))


def words(folder: Path, name: str, *options: str, steps: int = STEPS) -> list[str]:
    sections: dict[str, Any] = {
        "duration": {"steps": steps},
        "topology": {"device": "cpu", "timeout_s": TIMEOUT_S},
        "schedule": {"kind": "constant"},
        "data": {"shuffle": True, "workers": 0},
        "sharding": {"strategy": "hybrid"},
    }
    (folder / f"{name}.yaml").write_text(json.dumps(settings(folder, name, **sections)))
    return [sys.executable, "-m", "fullshard", "train", str(folder / f"{name}.yaml"), *options]


def train(nodes: Nodes, command: Sequence[str], node: int, *options: str, **more: str) -> subprocess.Popen[str]:
    return nodes.start(node, [*command, *options], cwd=ROOT, env=more, start_new_session=True)


@contextmanager
def both(nodes: Nodes, command: Sequence[str], **more: str) -> Iterator[list[subprocess.Popen[str]]]:
    """The command on both nodes; the first one finds by itself that it is node 0: zero is its own name."""
    running = [
        train(nodes, command, 0, "--nodes", "2", "--master", "zero:29500", **more),
        train(nodes, command, 1, "--nodes", "2", *MET, **more),
    ]
    try:
        yield running
    finally:
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        for process in running:
            process.communicate()


def await_step(running: list[subprocess.Popen[str]], run: Path, step: int) -> None:
    while not ((run / FILE).exists() and (last_step(run / FILE) or 0) >= step):
        assert all(process.poll() is None for process in running), [p.communicate() for p in running]
        time.sleep(0.1)


@pytest.fixture(scope="module")
def one_node(folder: Path) -> Path:
    """Four ranks on one node."""
    done = subprocess.run(words(folder, "one", "--devices", "4"), cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return folder / "runs" / "one"


def losses(run: Path) -> list[tuple[float, ...]]:
    return curve(read(run / FILE), "loss", "grad_norm")


@pytest.fixture(scope="module")
def two(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[str, str]]]:
    """Two ranks on each of two nodes, and nothing happens to them: the run folder, and what each node printed."""
    with made(tmp_path_factory.mktemp("straight")) as nodes, both(nodes, words(folder, "two", "--devices", "2")) as run:
        ends = [process.communicate(timeout=400) for process in run]
    assert [process.returncode for process in run] == [0, 0], ends
    return folder / "runs" / "two", ends


def test_two_nodes_equal_one(two: tuple[Path, list[tuple[str, str]]], one_node: Path) -> None:
    straight, ends = two
    for node, (_, err) in enumerate(ends):
        host = ("first", "second")[node]
        assert (
            f"gloo uses the interface cable{node}, which leads to the other nodes: the name of this host, {host}" in err
        )
    assert "hybrid: 2 x 2 (replicate x shard)" in ends[0][0]
    ours, theirs = losses(straight), losses(one_node)
    assert len(ours) == STEPS
    for found, expected in zip(zip(*ours, strict=True), zip(*theirs, strict=True), strict=True):
        assert_near(found, expected)  # gradients are added up in another order


def test_two_nodes_restart_together(nodes: Nodes, folder: Path, two: tuple[Path, list[tuple[str, str]]]) -> None:
    faulty = folder / "runs" / "restarted"
    faults = json.dumps([{"do": "kill", "rank": 3, "step": 4, "attempt": 0}])
    with both(nodes, words(folder, "restarted", "--devices", "2", "--restarts", "2"), FAULTS=faults) as running:
        ends = [process.communicate(timeout=400) for process in running]
    assert [process.returncode for process in running] == [0, 0], ends
    for _, err in ends:
        assert err.count("Restart 1 of 2: rank 3 on node 1 (host second) was ended by SIGKILL in step 4.") == 1
        assert "All 4 ranks start again" in err
    assert_equal_runs(faulty, two[0], steps=STEPS)
    assert len(restarts(faulty)) == 1


def test_a_mistake_on_one_node_is_the_exit_code_of_both(nodes: Nodes, folder: Path) -> None:
    faults = json.dumps([{"do": "mistake", "rank": 3, "step": 2}])
    with both(nodes, words(folder, "mistake", "--devices", "2", "--restarts", "2"), FAULTS=faults) as running:
        ends = [process.communicate() for process in running]
    assert [process.returncode for process in running] == [2, 2], ends
    assert "train.jsonl: a record that cannot be used. Fix it." in ends[1][1]
    assert (
        "Rank 3 on node 1 (host second) ended with exit code 2 (train.jsonl: a record that cannot be used" in ends[0][1]
    )
    assert all("Restart" not in err for _, err in ends), ends


def test_a_network_that_comes_back_in_time_costs_nothing(
    nodes: Nodes, folder: Path, two: tuple[Path, list[tuple[str, str]]]
) -> None:
    run, go = folder / "runs" / "back", folder / "go"
    hold = json.dumps([{"do": "hold", "rank": 0, "step": 3}])
    with both(nodes, words(folder, "back", "--devices", "2", "--restarts", "2"), FAULTS=hold, GO=str(go)) as running:
        await_step(running, run, 2)
        nodes.cut()
        go.touch()
        time.sleep(8)
        before = last_step(run / FILE) or 0
        nodes.join()
        ends = [process.communicate(timeout=400) for process in running]
    assert [process.returncode for process in running] == [0, 0], ends
    assert before == 2, "it was cut off in step 3"
    assert all("Restart" not in err for _, err in ends), ends
    assert_equal_runs(run, two[0], steps=STEPS)


def cut(nodes: Nodes, running: list[subprocess.Popen[str]]) -> list[int]:
    nodes.cut()
    return [0, 1]


def kill(node: int, running: list[subprocess.Popen[str]]) -> list[int]:
    every = psutil.Process(running[node].pid).children(recursive=True)
    every.append(psutil.Process(running[node].pid))
    for process in every:  # none may see another end, and answer to it
        process.suspend()
    for process in every:
        process.kill()
    return [1 - node]


def kill_node_0(nodes: Nodes, running: list[subprocess.Popen[str]]) -> list[int]:
    """With the store through which all talk."""
    return kill(0, running)


def kill_node_1(nodes: Nodes, running: list[subprocess.Popen[str]]) -> list[int]:
    return kill(1, running)


@pytest.mark.parametrize("lose", [cut, kill_node_0, kill_node_1])
def test_a_lost_node_is_named_and_the_run_continues_on_one(
    nodes: Nodes, folder: Path, one_node: Path, lose: Callable[..., list[int]]
) -> None:
    name = lose.__name__
    run, command = folder / "runs" / name, words(folder, name, "--devices", "2", "--restarts", "2", steps=100_000)
    if lose is cut:
        nameless = train(nodes, command, 1, "--nodes", "2", "--master", f"{ADDRESSES[0]}:29500")
        assert "--node-rank is missing, and 10.77.0.1 is not an address of this machine" in nameless.communicate()[1]
        assert nameless.returncode == 2
    with both(nodes, command, STEP_S="0.2") as running:
        await_step(running, run, 2)
        if lose is cut:
            second = train(nodes, command, 1, "--nodes", "2", "--node-rank", "0", "--master", "zero:29500")
            assert "Two nodes claim --node-rank 0: host" in second.communicate()[1]
        left = lose(nodes, running)
        ends = {node: running[node].communicate(timeout=TIMEOUT_S + 120) for node in left}
    assert [running[node].returncode for node in left] == [1] * len(left), ends
    for node, (_, err) in ends.items():
        other = 1 - node
        assert f"Node {other} (host {('first', 'second')[other]}) has not answered for" in err, err
        assert "it has ended, or the network between the nodes is cut." in err
        assert "with --nodes on those that are left: it continues from the last checkpoint." in err
        assert "traceback is above" not in err
        if lose is not cut:  # a cut may come in a save, which waits so long that the launcher ends the ranks
            assert "lost the connection to another rank, and no rank of this node ended before it" in err
            assert "Crash folder: " in err
        assert "Restart" not in err
    done = (last_step(run / FILE) or 0) + 2
    again = words(folder, name, "--devices", "4", steps=done)
    ended = subprocess.run(again, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0, ended.stderr
    assert "Resuming from" in ended.stdout
    ours, theirs = curve(read(run / FILE), *KEYS), curve(read(one_node / FILE), *KEYS)
    assert [row[0] for row in ours] == list(range(1, done + 1))
    assert_near([row[1] for row in ours][:STEPS], [row[1] for row in theirs][: len(ours)])


def test_variables_of_an_engine_are_enough(nodes: Nodes, folder: Path, one_node: Path) -> None:
    """As in pods of Kubeflow Trainer: the same command on every node, without a flag. Losses are those of one node."""
    job = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_MASTER_ADDR": "zero", "PET_MASTER_PORT": "29400"}
    command = words(folder, "engine")
    # In a cluster any pod may be the first.
    running = [train(nodes, command, node, **job, PET_NODE_RANK=str(node)) for node in (1, 0)]
    ends = [process.communicate(timeout=400) for process in running]
    assert [process.returncode for process in running] == [0, 0], ends
    said = ends[1][0]
    assert "topology.nodes: 2 (Kubernetes) over 1 (default)" in said
    assert "4 ranks" in said
    ours, theirs = losses(folder / "runs" / "engine"), losses(one_node)
    assert len(ours) == STEPS
    for found, expected in zip(zip(*ours, strict=True), zip(*theirs, strict=True), strict=True):
        assert_near(found, expected)
