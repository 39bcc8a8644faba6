"""GPUs by name: memory, and the rates that time is predicted from.

Peak operations are those of the MFU that runs log. Bandwidths are the vendors' figures for one direction; what a
collective reaches of them is in speed.py. Must not know models or recipes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from fullshard.config.part import did_you_mean
from fullshard.errors import SetupError
from fullshard.profile.mfu import peak_flops

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU in a node of its kind."""

    name: str
    memory: float
    """Bytes that torch reports."""
    flops: float | None
    """Dense bf16 operations per second; None: unknown, so no time is predicted."""
    memory_rate: float
    """Bytes per second of its own memory."""
    node_rate: float
    """Bytes per second that one GPU sends to others in its node."""
    network_rate: float
    """Bytes per second that one GPU's share of the network sends to other nodes."""
    host_rate: float
    """Bytes per second to host memory."""


def _gpu(name: str, label: str, gib: float, memory: float, node: float, network: float, host: float) -> Gpu:
    return Gpu(name, gib * GIB, peak_flops(label), memory * 1e12, node * 1e9, network * 1e9, host * 1e9)


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("b200", "NVIDIA B200", 178.4, 8.0, 900, 50, 55),
        _gpu("h200", "NVIDIA H200", 139.8, 4.8, 450, 50, 55),
        _gpu("h100", "NVIDIA H100 80GB HBM3", 79.2, 3.35, 450, 50, 55),
        _gpu("a100-80", "NVIDIA A100-SXM4-80GB", 79.2, 2.0, 300, 25, 25),
        _gpu("a100-40", "NVIDIA A100-SXM4-40GB", 39.4, 1.55, 300, 25, 25),
        _gpu("l40s", "NVIDIA L40S", 44.4, 0.86, 28, 12.5, 25),
        _gpu("a10g", "NVIDIA A10G", 22.1, 0.6, 14, 6.25, 14),
        _gpu("4090", "NVIDIA GeForce RTX 4090", 23.6, 1.0, 14, 3.1, 25),
        _gpu("3090", "NVIDIA GeForce RTX 3090", 23.7, 0.94, 14, 3.1, 14),
    )
}
"""Node: NVLink where the GPU has it, PCIe otherwise. Network: 400 Gbit/s per GPU for H100 and newer, 200 for A100."""


def gpu_named(text: str) -> Gpu:
    """A GPU of the table, or any other by its memory in GiB: `--gpu 48`, `--gpu 48GiB`."""
    word = text.lower().removeprefix("nvidia-").removeprefix("rtx-")
    if word in GPUS:
        return GPUS[word]
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:gib|gb)?", word)
    if found and float(found[1]) > 0:
        # Rates unknown: memory only.
        return Gpu(f"a GPU of {found[1]} GiB", float(found[1]) * GIB, None, 1e12, 14e9, 3e9, 14e9)
    near = did_you_mean(word, list(GPUS))
    raise SetupError(f"--gpu {text}: not known{near}. Known: {', '.join(GPUS)}; or give its memory: --gpu 48GiB.")


def with_network(gpu: Gpu, gbit: float | None) -> Gpu:
    """The same with another share of the network, in Gbit/s per GPU."""
    if gbit is not None and not 0 < gbit < float("inf"):
        raise SetupError(f"--network {gbit:g}: give the Gbit/s of one GPU to other nodes, more than 0.")
    return gpu if gbit is None else replace(gpu, network_rate=gbit * 1e9 / 8)


def gpu_here(device: str) -> Gpu | None:
    """The first GPU of this machine, if a run on `device` would use it."""
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        return None
    return gpu_like(torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory)


def gpu_like(name: str, memory: int) -> Gpu:
    """The nearest of the table to what torch says of a GPU; its memory as torch says."""
    words = name.lower()
    known = [gpu for key, gpu in GPUS.items() if key.split("-")[0] in words]
    near = min(known, key=lambda gpu: abs(gpu.memory - memory), default=gpu_named(f"{memory / GIB:.1f}"))
    return replace(near, memory=float(memory))
