from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import Any

import pytest

from fullshard.contracts.launcher import Topology
from fullshard.dialects.slurm_lists import expand_hosts, tasks_per_node
from fullshard.dist.env import Launch, detect, export, ranks_for
from fullshard.errors import SetupError
from fullshard.proofs.launch import check_launch as check

TORCHRUN = {
    "RANK": "11",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "3",
    "LOCAL_WORLD_SIZE": "8",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "x",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "node[07-08]",
}


def checked(environ: dict[str, str], **changes: Any) -> Launch:
    launch = detect(environ)
    num_gpus = changes.pop("num_gpus", 8)
    check(launch, Topology(**changes), environ, num_gpus=num_gpus)
    return launch


def message_of(environ: dict[str, str], **changes: Any) -> str:
    with pytest.raises(SetupError) as error:
        checked(environ, **changes)
    return str(error.value)


def without(environ: dict[str, str], *names: str, **changes: str) -> dict[str, str]:
    return {**{name: value for name, value in environ.items() if name not in names}, **changes}


def test_without_launcher_variables_the_launcher_is_none() -> None:
    assert detect({}) == Launch("none")
    assert detect({"WORLD_SIZE": "1"}) == Launch("none")
    environ: dict[str, str] = {}
    export(detect({}), environ)
    assert environ == {}


def test_torchrun() -> None:
    expected = Launch("torchrun", 11, 16, 3, 8, 1, 2, "127.0.0.1", 29500)
    assert checked(TORCHRUN) == expected
    assert checked(without(TORCHRUN, "GROUP_RANK", "GROUP_WORLD_SIZE")) == expected


def test_the_variables_are_those_torchrun_sets() -> None:
    script = "import json, os; print(json.dumps(dict(os.environ)))"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "--no-python"]
    environ = {name: value for name, value in os.environ.items() if "MASTER" not in name}
    done = subprocess.run(
        [*command, sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environ
    )
    real = json.loads(done.stdout.strip().splitlines()[-1])
    launch = detect(real)
    assert (launch.launcher, launch.rank, launch.world, launch.local_world) == ("torchrun", 0, 1, 1)
    assert {name: real[name] for name in launch.variables()} == launch.variables()


def test_accelerate() -> None:
    assert checked({**TORCHRUN, "ACCELERATE_MIXED_PRECISION": "bf16"}).launcher == "accelerate"
    alone = checked({"ACCELERATE_MIXED_PRECISION": "no"})
    assert (alone.launcher, alone.rank, alone.world) == ("accelerate", 0, 1)


def test_slurm() -> None:
    launch = detect(SLURM)
    assert launch == Launch("slurm", 5, 8, 1, 4, 1, 2, "node07", launch.master_port)
    ports = {detect({**SLURM, "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i % 4)}).master_port for i in range(8)}
    assert ports == {launch.master_port}
    assert detect({**SLURM, "SLURM_JOB_ID": "4712"}).master_port != launch.master_port
    environ: dict[str, str] = {}
    export(launch, environ)
    assert (environ["RANK"], environ["LOCAL_RANK"], environ["MASTER_ADDR"]) == ("5", "1", "node07")


def test_master_addr_overrides_the_address_from_slurm() -> None:
    launch = checked({**SLURM, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"})
    assert (launch.master_addr, launch.master_port) == ("127.0.0.1", 1234)


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "n[1-2]"},  # the shell of salloc
        {**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # srun --pty bash
        without(SLURM, "SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID", SLURM_PROCID="0"),  # the script of sbatch
    ],
)
def test_a_single_process_in_a_slurm_allocation_has_no_launcher(environ: dict[str, str]) -> None:
    assert detect(environ) == Launch("none")


def test_torchrun_inside_slurm_is_torchrun() -> None:
    assert detect({**SLURM, **TORCHRUN}).launcher == "torchrun"


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node7", ["node7"]),
        ("node[01-03,07]", ["node01", "node02", "node03", "node07"]),
        ("a1,b[2-3],c", ["a1", "b2", "b3", "c"]),
        ("rack[1-2]n[08-10]", [f"rack{r}n{n}" for r in (1, 2) for n in ("08", "09", "10")]),
        ("gpu-[9-11].cluster", ["gpu-9.cluster", "gpu-10.cluster", "gpu-11.cluster"]),
    ],
)
def test_host_lists(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


def test_tasks_per_node() -> None:
    assert tasks_per_node("8(x2),4") == [8, 8, 4]


# What would hang


def test_rank_set_to_the_node_number_is_refused() -> None:
    hand_set = {"RANK": "1", "WORLD_SIZE": "16", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    message = message_of(hand_set, nodes=2)
    assert message.startswith("RANK=1 and WORLD_SIZE=16 are set, LOCAL_RANK and LOCAL_WORLD_SIZE not")
    assert "RANK looks like the number of this node" in message
    assert "--nodes 2 --node-rank" in message
    assert "looks like the number of this node" in message_of({**hand_set, "LOCAL_RANK": "3"})


def test_a_rank_that_contradicts_the_local_rank_is_refused() -> None:
    message = message_of(without(TORCHRUN, RANK="1"))
    assert "rank 3 of node 1 with 8 ranks per node must be RANK=11. RANK looks like the number of this node." in message
    assert "must be RANK=11" in message_of(without(TORCHRUN, RANK="12"))


def test_one_process_per_node_with_several_gpus_is_refused() -> None:
    message = message_of({"RANK": "3", "WORLD_SIZE": "16", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, nodes=2)
    assert "starts one process per node instead of 16 in all" in message
    assert "fullshard train RECIPE --devices" in message


def test_one_slurm_task_on_a_node_with_many_gpus_is_refused() -> None:
    lonely = {**SLURM, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
    lonely |= {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "MASTER_ADDR": "127.0.0.1"}
    assert "7 of them would stay idle. Use srun --ntasks-per-node=8" in message_of(lonely)
    assert checked(lonely, num_gpus=1).world == 2
    assert checked(lonely, device="cpu").world == 2


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (without(TORCHRUN, RANK="16"), "RANK=16 does not exist among WORLD_SIZE=16"),
        (without(TORCHRUN, RANK="-1"), "RANK=-1 does not exist"),
        (without(TORCHRUN, LOCAL_RANK="8"), "LOCAL_RANK=8 does not exist among the LOCAL_WORLD_SIZE=8"),
        (without(TORCHRUN, WORLD_SIZE="15"), "WORLD_SIZE=15 is not 2 nodes x 8 ranks"),
        (without(TORCHRUN, "MASTER_ADDR"), "MASTER_ADDR not set: 16 ranks do not know where to meet"),
        (without(TORCHRUN, "MASTER_ADDR", "MASTER_PORT"), "MASTER_ADDR and MASTER_PORT not set"),
        (without(TORCHRUN, MASTER_ADDR="no-such-host.invalid"), "cannot find the host 'no-such-host.invalid'"),
        (without(TORCHRUN, RANK="one"), "RANK=one is not a whole number"),
        (without(TORCHRUN, MASTER_PORT="http"), "MASTER_PORT=http is not a whole number"),
        (without(TORCHRUN, "RANK"), "WORLD_SIZE=16 is set, RANK is not"),
        (without(TORCHRUN, "WORLD_SIZE"), "RANK=11 is set, WORLD_SIZE is not"),
        ({**SLURM, "SLURM_PROCID": "2", "MASTER_ADDR": "127.0.0.1"}, "must be RANK=5. Use srun --distribution=block"),
    ],
)
def test_contradictory_launcher_variables_are_refused(environ: dict[str, str], words: str) -> None:
    assert words in message_of(environ)


def test_a_master_port_in_use_is_refused() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        mine = without(TORCHRUN, RANK="0", LOCAL_RANK="0", GROUP_RANK="0", MASTER_PORT=str(port))
        assert checked(mine).rank == 0  # torchrun's agent holds it, for us
        message = message_of(without(mine, "TORCHELASTIC_USE_AGENT_STORE"))
        assert f"MASTER_PORT={port}: port {port} cannot be used on this machine" in message
        assert "Choose another port" in message
        with pytest.raises(SetupError, match=f"--master 127.0.0.1:{port}: port {port} cannot be used"):
            ranks(nodes=2, master=f"127.0.0.1:{port}")
        assert ranks(nodes=2, node_rank=1, master=f"127.0.0.1:{port}").node_rank == 1


def test_more_ranks_than_gpus_are_refused_unless_over_gloo() -> None:
    assert "8 ranks on this node, but torch sees 2 GPUs here" in message_of(TORCHRUN, num_gpus=2)
    assert "Use --devices 2" in message_of(TORCHRUN, num_gpus=2)
    assert checked(TORCHRUN, num_gpus=2, device="cpu")
    assert checked(TORCHRUN, num_gpus=0)
    assert checked(TORCHRUN, num_gpus=1, backend="gloo")
    assert "topology.device = cuda, but torch sees no GPU" in message_of(TORCHRUN, num_gpus=0, device="cuda")


# Ranks that we start


def test_node_rank_may_be_omitted_only_on_the_master() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert ranks(nodes=2, master=f"127.0.0.1:{port}").node_rank == 0
    with pytest.raises(SetupError) as error:
        ranks(nodes=2, master="192.0.2.1:29500")  # an address that no machine has
    assert str(error.value) == (
        "--nodes 2 --master 192.0.2.1:29500: --node-rank is missing, and 192.0.2.1 is not an address of this machine, "
        "so this is not node 0. Give --node-rank 1."
    )


def ranks(**changes: Any) -> Any:
    options = {name: changes.pop(name) for name in ("num_gpus", "node_rank", "master") if name in changes}
    return ranks_for(Topology(**{"timeout_s": 60.0, **changes}), **{"num_gpus": 4, **options})


def test_what_devices_mean() -> None:
    assert ranks().per_node == 4
    assert ranks(num_gpus=0).per_node == 1
    assert ranks(device="cpu").per_node == 1
    assert ranks(device="cpu", devices=7).per_node == 7
    assert ranks(devices=2).device_ids is None
    chosen = ranks(devices=[1, 3])
    assert (chosen.per_node, chosen.device_ids, chosen.timeout_s) == (2, (1, 3), 60.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"devices": 8}, "8 ranks on this node, but torch sees 4 GPUs"),
        ({"devices": [4]}, "this node has no GPU 4; its GPUs are numbered 0 to 3"),
        ({"devices": [0, 1], "num_gpus": 0}, "names GPUs, but this run is on the CPU: torch sees no GPU here"),
        ({"devices": [0], "device": "cpu"}, "names GPUs, but this run is on the CPU. Give a process count"),
        ({"device": "cuda", "num_gpus": 0}, "torch sees no GPU here"),
        ({"nodes": 2}, "--nodes 2 needs a place where the nodes meet"),
        (
            {"nodes": 2, "node_rank": 2, "master": "127.0.0.1:1"},
            "--node-rank 2 does not exist: 2 nodes are numbered 0 to 1",
        ),
        ({"node_rank": 1}, "--node-rank 1 does not exist: 1 node is numbered 0. Check"),
        ({"nodes": 2, "master": "10.0.0.1"}, "--master 10.0.0.1 is not HOST:PORT"),
        ({"nodes": 2, "master": "host:port"}, "is not HOST:PORT"),
        ({"nodes": 2, "node_rank": 1, "master": "no-such.invalid:1"}, "cannot find the host 'no-such.invalid'"),
    ],
)
def test_impossible_topologies_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SetupError) as error:
        ranks(**changes)
    assert words in str(error.value)


def test_reading_the_environment_imports_no_torch() -> None:
    modules = "fullshard.dist.env, fullshard.launch.local, fullshard.recipes.read"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
