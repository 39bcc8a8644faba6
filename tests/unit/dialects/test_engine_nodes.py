"""What Kubeflow Trainer, SkyPilot and dstack say about the nodes of a job, and what `fullshard train` makes of it."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.dialects import engine_nodes
from fullshard.errors import AbsentError, SetupError
from tests.small import model_folder, recipe, token_file

KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "2",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "localhost",
    "PET_MASTER_PORT": "29400",
}
SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "127.0.0.1\n10.0.0.2\n",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_NUM_NODES": "2",
}
DSTACK = {
    "DSTACK_NODE_RANK": "1",
    "DSTACK_MASTER_NODE_IP": "127.0.0.1",
    "DSTACK_NODES_NUM": "2",
    "DSTACK_GPUS_PER_NODE": "0",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("engine")
    model_folder(made / "model", num_hidden_layers=1)
    token_file(made / "train.jsonl", records=16)
    return made


@pytest.mark.parametrize(
    ("environ", "name", "settings", "master"),
    [
        (KUBEFLOW, "Kubernetes", {"topology.devices": 2, "topology.nodes": 2}, "localhost:29400"),
        (
            SKYPILOT,
            "SkyPilot",
            {"topology.device": "cuda", "topology.devices": 8, "topology.nodes": 2},
            "127.0.0.1:29500",
        ),
        (DSTACK, "dstack", {"topology.nodes": 2}, "127.0.0.1:29500"),
        ({**DSTACK, "MASTER_PORT": "31000"}, "dstack", {"topology.nodes": 2}, "127.0.0.1:31000"),
        ({**DSTACK, "DSTACK_MASTER_NODE_IP": "::1"}, "dstack", {"topology.nodes": 2}, "[::1]:29500"),
    ],
)
def test_variables_give_nodes_ranks_and_a_place_to_meet(
    environ: dict[str, str], name: str, settings: dict[str, object], master: str
) -> None:
    found = engine_nodes.settings(environ)
    assert found is not None
    assert (found.name, found.settings) == (name, settings)
    assert engine_nodes.meeting(environ, nodes=2, timeout_s=1) == (1, master)


def test_one_node_meets_nobody() -> None:
    for environ in (
        {"PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "nowhere", "PET_NPROC_PER_NODE": "3"},
        {"SKYPILOT_NODE_IPS": "10.0.0.1", "SKYPILOT_NODE_RANK": "0"},
        {"DSTACK_NODES_NUM": "1"},
        {},
    ):
        found = engine_nodes.settings(environ)
        assert (found.settings if found else {}) == ({"topology.devices": 3} if "PET_NNODES" in environ else {})
        assert engine_nodes.meeting(environ, nodes=1, timeout_s=1) == (None, None)


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("auto", {}),
        ("gpu", {"topology.device": "cuda"}),
        ("cpu", {"topology.device": "cpu", "topology.devices": len(os.sched_getaffinity(0))}),
        ("4", {"topology.devices": 4}),
    ],
)
def test_processes_per_node_are_torchruns_words(text: str, settings: dict[str, object]) -> None:
    found = engine_nodes.nodes_of({"PET_NPROC_PER_NODE": text})
    assert found is not None
    assert found.settings == settings


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        ({**KUBEFLOW, "PET_NNODES": "1:4"}, "PET_NNODES=1:4 is a range"),
        ({**KUBEFLOW, "PET_NPROC_PER_NODE": "many"}, "PET_NPROC_PER_NODE=many is not a number of ranks, auto, gpu or"),
        ({**KUBEFLOW, "PET_NODE_RANK": "x"}, "PET_NODE_RANK=x is not a whole number"),
        (
            {"PET_NNODES": "2"},
            "PET_NNODES=2 is set but PET_NODE_RANK and PET_MASTER_ADDR are not; Kubernetes sets all three.",
        ),
        ({**SKYPILOT, "SKYPILOT_NUM_NODES": "3"}, "SKYPILOT_NUM_NODES=3, but SKYPILOT_NODE_IPS has 2 addresses"),
        (
            {"DSTACK_NODES_NUM": "2", "DSTACK_NODE_RANK": "0"},
            "DSTACK_NODES_NUM=2 is set but DSTACK_MASTER_NODE_IP is not; dstack sets both.",
        ),
        (
            {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "0"},
            "SKYPILOT_NUM_NODES=2 is set but SKYPILOT_NODE_IPS is not; SkyPilot sets both.",
        ),
        ({"SKYPILOT_NODE_RANK": "1"}, "SKYPILOT_NODE_RANK=1 is set but SKYPILOT_NUM_NODES is not"),
        ({"DSTACK_MASTER_NODE_IP": "10.0.0.1"}, "DSTACK_MASTER_NODE_IP=10.0.0.1 is set but DSTACK_NODES_NUM is not"),
        ({**SKYPILOT, "SKYPILOT_NODE_IPS": "10.0.0.1"}, "SKYPILOT_NUM_NODES=2, but SKYPILOT_NODE_IPS has 1 address."),
        ({**SKYPILOT, "SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0"}, "=1, but SKYPILOT_NODE_IPS has 2 add"),
        ({**SKYPILOT, "SKYPILOT_NODE_RANK": "5"}, "SKYPILOT_NODE_RANK=5, but SKYPILOT_NUM_NODES=2: nodes have the"),
        ({"PET_NODE_RANK": "1"}, "PET_NODE_RANK=1, but PET_NNODES=1: nodes have the numbers 0."),
        ({**DSTACK, "DSTACK_NODES_NUM": "0"}, "DSTACK_NODES_NUM=0 is not a number of nodes: 1 or more"),
        ({**DSTACK, "MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a port: 1 to 65535"),
        (
            {**SKYPILOT, **DSTACK, "DSTACK_NODES_NUM": "3"},
            "SkyPilot and dstack both describe this node, and differ: SKYPILOT_NUM_NODES=2, this is node 1, node 0 at "
            "127.0.0.1, 8 ranks against DSTACK_NODES_NUM=3",
        ),
        ({**SKYPILOT, **DSTACK, "DSTACK_GPUS_PER_NODE": "4"}, "8 ranks against DSTACK_NODES_NUM=2"),
    ],
)
def test_variables_that_cannot_be_meant_are_named(environ: dict[str, str], problem: str) -> None:
    with pytest.raises(SetupError) as error:
        engine_nodes.nodes_of(environ)
    assert problem in str(error.value)


def test_two_engines_may_say_the_same() -> None:
    found = engine_nodes.nodes_of({**SKYPILOT, **DSTACK})
    assert found is not None
    assert (found.engine, found.master) == ("SkyPilot", "127.0.0.1:29500")


def test_ranks_of_a_launcher_are_left_alone() -> None:
    assert engine_nodes.nodes_of({**KUBEFLOW, "LOCAL_RANK": "0"}) is None


def test_a_name_that_nobody_knows_is_waited_for_and_then_worth_another_try() -> None:
    environ = {**KUBEFLOW, "PET_MASTER_ADDR": "node-0.does-not-exist.invalid"}
    with pytest.raises(AbsentError, match="name of node 0, node-0.does-not-exist.invalid, was not known") as error:
        engine_nodes.meeting(environ, nodes=2, timeout_s=0.1)
    assert error.value.exit_code == 1  # 2 would end a job for good


def test_a_name_may_become_known_later(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, known = [], socket.getaddrinfo

    def later(host: str, *rest: object) -> object:
        asked.append(host)
        if len(asked) < 3:
            raise socket.gaierror(-2, "Name or service not known")
        return known("127.0.0.1", None)

    monkeypatch.setattr(socket, "getaddrinfo", later)
    environ = {**KUBEFLOW, "PET_MASTER_ADDR": "job-node-0-0.job"}
    assert engine_nodes.meeting(environ, nodes=2, timeout_s=60) == (1, "job-node-0-0.job:29400")
    assert asked == ["job-node-0-0.job"] * 3


def dry_run(folder: Path, environ: dict[str, str], *words: str, **topology: int) -> tuple[int, str]:
    """The exit code and the text of `train --dry-run` for a recipe with this topology."""
    values = recipe(folder, name="a", topology=topology)
    (folder / "recipe.yaml").write_text(json.dumps(values))
    done = CliRunner().invoke(app, ["train", str(folder / "recipe.yaml"), "--dry-run", *words], env=environ)
    return done.exit_code, done.output


def test_the_dry_run_says_where_the_nodes_come_from(folder: Path) -> None:
    code, text = dry_run(folder, KUBEFLOW)
    assert code == 0, text
    assert "topology.nodes: 2 (Kubernetes) over 1 (default)" in text
    assert "topology.devices: 2 (Kubernetes) over auto (default)" in text
    assert "x 4 ranks" in text


def test_a_dry_run_does_not_wait_for_another_node(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_nodes, "_wait_for_name", lambda *_, **__: pytest.fail("it waits"))
    code, text = dry_run(folder, {**DSTACK, "DSTACK_MASTER_NODE_IP": "node-0.does-not-exist.invalid"})
    assert code == 0, text
    assert "x 2 ranks" in text


def test_a_flag_wins_over_the_engine(folder: Path) -> None:
    code, text = dry_run(folder, KUBEFLOW, "--nodes", "1", "--devices", "1")
    assert code == 0, text
    assert "topology.nodes: 1 (command line) over 2 (Kubernetes)" in text
    assert "x 1 rank" in text


def test_a_recipe_that_contradicts_the_engine_is_refused(folder: Path) -> None:
    code, text = dry_run(folder, KUBEFLOW, nodes=4)
    assert code == 2
    assert "topology.nodes = 4 in the recipe, but Kubernetes started 2 nodes (PET_NNODES=2)" in text
    code, text = dry_run(folder, KUBEFLOW, "topology.nodes=2", nodes=4)
    assert code == 0, text


def test_rank_and_world_size_that_count_nodes_give_way(folder: Path) -> None:
    """Kubeflow's training operator sets both, as numbers of nodes."""
    code, text = dry_run(folder, {**KUBEFLOW, "RANK": "1", "WORLD_SIZE": "2"})
    assert code == 0, text
    assert "x 4 ranks" in text
