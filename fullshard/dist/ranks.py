"""Which ranks a run starts on this machine, and whether they can meet.

Must not import torch (the caller counts the GPUs), and must not know models or data.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from fullshard.contracts.launcher import Ranks
from fullshard.errors import SetupError
from fullshard.formatting.plural import counted
from fullshard.launch.rendezvous import is_local


def ranks_for(
    *,
    device: str,
    devices: int | str | Sequence[int],
    nodes: int,
    num_gpus: int,
    timeout_s: float,
    node_rank: int | None = None,
    master: str | None = None,
    backend: str = "auto",
) -> Ranks:
    """The ranks to start on this node: `devices` is a count, GPU ids or "auto" (every GPU; one process on a CPU)."""
    node_rank = check_nodes(nodes=nodes, node_rank=node_rank, master=master)
    on_cpu = device == "cpu" or (device == "auto" and num_gpus == 0)
    if isinstance(devices, str):
        check_devices(1, num_gpus=num_gpus, wanted_device=device, backend=backend)
        return Ranks(1 if on_cpu else num_gpus, nodes, node_rank, master, timeout_s=timeout_s)
    if isinstance(devices, int):
        if devices < 1:
            raise SetupError(f"topology.devices = {devices}: at least one rank is needed. Use --devices 1.")
        check_devices(devices, num_gpus=num_gpus, wanted_device=device, backend=backend)
        return Ranks(devices, nodes, node_rank, master, timeout_s=timeout_s)
    ids = tuple(devices)
    if on_cpu:
        raise SetupError(
            f"topology.devices = {list(ids)} names GPUs, but this run is on the CPU"
            f"{'' if device == 'cpu' else ': torch sees no GPU here'}. Give the number of processes: --devices "
            f"{len(ids)}."
        )
    check_devices(len(ids), num_gpus=num_gpus, wanted_device=device, backend=backend)
    if max(ids) >= num_gpus:
        raise SetupError(
            f"topology.devices = {list(ids)}: there is no GPU {max(ids)} here; the GPUs are numbered 0 to "
            f"{num_gpus - 1}. Choose from these."
        )
    return Ranks(len(ids), nodes, node_rank, master, device_ids=ids, timeout_s=timeout_s)


def check_devices(per_node: int, *, num_gpus: int, wanted_device: str, backend: str = "auto") -> None:
    """Raises SetupError when a node has too few GPUs for its ranks; ranks share one only over gloo."""
    if wanted_device == "cuda" and num_gpus == 0:
        raise SetupError(
            "topology.device = cuda, but torch sees no GPU here. Use topology.device=cpu, or check the driver, "
            "CUDA_VISIBLE_DEVICES and that this torch is a CUDA build."
        )
    if wanted_device != "cpu" and num_gpus and per_node > num_gpus and backend != "gloo":
        raise SetupError(
            f"{per_node} ranks on this node, but torch sees {counted(num_gpus, 'GPU')} here, and NCCL needs one GPU "
            f"per rank. Use --devices {num_gpus}, more nodes, or topology.device=cpu."
        )


def check_nodes(*, nodes: int, node_rank: int | None, master: str | None) -> int:
    """Which node this is, for ranks that fullshard starts itself. Raises SetupError when nodes could not find each
    other."""
    if node_rank is not None and not 0 <= node_rank < nodes:
        raise SetupError(
            f"--node-rank {node_rank} does not exist: {counted(nodes, 'node')} {'is' if nodes == 1 else 'are'} "
            f"numbered 0{f' to {nodes - 1}' if nodes > 1 else ''}. Check --nodes and --node-rank."
        )
    if nodes == 1:
        return 0
    if master is None:
        raise SetupError(
            f"--nodes {nodes} needs a place where the nodes meet. On every node run the same command with --nodes "
            f"{nodes} --node-rank 0 (then 1, ...) --master HOST:PORT, where HOST is the address of node 0, such as "
            "10.0.0.1:29500."
        )
    host, port = split_address(master)
    resolve_host(host, f"--master {master}")
    if node_rank is None and not is_local(host):
        others = "1" if nodes == 2 else f"1 to {nodes - 1}, another on each node"
        raise SetupError(
            f"--nodes {nodes} --master {master}: --node-rank is missing, and {host} is not an address of this machine, "
            f"so this is not node 0. Give --node-rank {others}."
        )
    if not node_rank:
        probe_port(port, f"--master {master}")
    return node_rank or 0


def split_address(master: str) -> tuple[str, int]:
    """HOST:PORT in its two parts."""
    host, _, port = master.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise SetupError(
            f"--master {master} is not HOST:PORT. Write the address of node 0 and a free port: 10.0.0.1:29500."
        )
    return host.strip("[]"), int(port)


def resolve_host(host: str, where: str) -> None:
    """Raises SetupError when this machine does not know the host."""
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        raise SetupError(
            f"{where}: this machine cannot find the host {host!r}. Use the IP address of node 0, or a name that "
            "resolves here."
        ) from None


def probe_port(port: int, where: str) -> None:
    """Raises SetupError when the port of this machine is in use."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise SetupError(
                f"{where}: port {port} cannot be used on this machine ({error.strerror}); another run may have it. "
                f"Choose another port, the same on every node."
            ) from None
