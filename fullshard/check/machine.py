"""Facts about this machine: GPUs and their links, driver, cores, memory, limits, packages.

Only reads; other modules decide what a fact means for a run, so that tests can describe any machine.
Must not know recipes. Never guesses: what cannot be read is None.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import resource
import shutil
import subprocess
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fullshard.contracts.launcher import Ranks
from fullshard.explain.host_memory import memory_left
from fullshard.launch.local import num_cores

OPTIONAL = ("flash_attn", "kernels", "tensorboard", "torchao", "triton", "wandb")
"""Packages that only some recipes need."""


@dataclass(frozen=True)
class Gpu:
    """One GPU that torch sees."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int

    def describe(self) -> str:
        major, minor = self.capability
        return f"{self.name} (compute capability {major}.{minor}, {self.memory_bytes / 2**30:.1f} GiB)"


@dataclass(frozen=True)
class Machine:
    """What this machine offers a run."""

    torch: str
    """The version of torch."""
    cores: int
    """Cores that this process may use."""
    memory_bytes: int
    """Available host memory."""
    open_files: int
    """How many files one process may have open."""
    shm_bytes: int | None
    """Free bytes in /dev/shm; None without it."""
    packages: frozenset[str]
    """Optional packages that are installed."""
    unmet_requirements: tuple[str, ...] = ()
    """Required packages that are missing or have an unsupported version, one sentence each."""
    compiler: str | None = None
    """A C++ compiler, which compiled blocks need."""
    gpus: tuple[Gpu, ...] = ()
    cuda: str | None = None
    """The CUDA version that torch was built for; None for a build without."""
    nccl: str | None = None
    driver: str | None = None
    """The version of the NVIDIA driver; None without one."""
    links: Mapping[tuple[int, int], str] | None = None
    """How two GPUs are connected, in nvidia-smi's words (NV18, PIX, SYS); None if unknown."""
    python: tuple[int, int] = sys.version_info[:2]

    def has(self, package: str) -> bool:
        """Whether an optional package is installed."""
        known = package in OPTIONAL
        return package in self.packages if known else importlib.util.find_spec(package) is not None

    def used(self, ranks: Ranks) -> list[Gpu]:
        """The GPUs that the ranks of this node run on."""
        if ranks.device_ids is not None:
            return [self.gpus[index] for index in ranks.device_ids if index < len(self.gpus)]
        return list(self.gpus[: ranks.per_node])


def inspect(*, links: bool = True) -> Machine:
    """This machine; `links` asks nvidia-smi how GPUs are connected, which takes a second."""
    import torch

    with warnings.catch_warnings():
        # An old driver shows as no GPUs, which the environment section reports.
        warnings.simplefilter("ignore")
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    properties = [torch.cuda.get_device_properties(index) for index in range(num_gpus)]
    uuids = [str(getattr(found, "uuid", "")) for found in properties]
    return Machine(
        torch=torch.__version__,
        cores=num_cores(),
        memory_bytes=memory_left(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        shm_bytes=shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None,
        packages=frozenset(name for name in OPTIONAL if getattr(importlib.util.find_spec(name), "origin", None)),
        unmet_requirements=unmet_requirements(),
        compiler=next(filter(None, map(shutil.which, (os.environ.get("CXX") or "g++", "clang++", "c++"))), None),
        gpus=tuple(Gpu(p.name, (p.major, p.minor), p.total_memory) for p in properties),
        cuda=torch.version.cuda,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if num_gpus else None,
        driver=_driver(),
        links=_links(uuids) if links and num_gpus > 1 else None,
    )


def unmet_requirements(distribution: str = "fullshard") -> tuple[str, ...]:
    """Required packages that are missing or have an unsupported version; torch is checked separately."""
    from packaging.requirements import Requirement

    found = []
    try:
        wanted = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:  # run from a source folder: requirements are unknown
        return ()
    for requirement in map(Requirement, wanted):
        if requirement.name == "torch" or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{requirement.name} is not installed, {requirement.specifier} is required")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            found.append(f"{requirement.name} {version} is installed, {requirement.specifier} is required")
    return tuple(found)


def _driver() -> str | None:
    """From the kernel module, or from nvidia-smi where a container hides that file."""
    module = Path("/proc/driver/nvidia/version")
    if module.exists() and (found := re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", module.read_text())):
        return found[1]
    lines = _smi("--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    return lines[0].strip() if lines else None


def _links(uuids: list[str]) -> dict[tuple[int, int], str] | None:
    """torch counts only visible GPUs, nvidia-smi counts all, so they are matched by UUID."""
    listed = _smi("--query-gpu=index,uuid", "--format=csv,noheader").splitlines()
    places = {uuid.strip().removeprefix("GPU-"): int(index) for index, uuid in (line.split(",") for line in listed)}
    matrix = read_links(_smi("topo", "-m"))
    numbers = [places.get(uuid.removeprefix("GPU-")) for uuid in uuids]
    found: dict[tuple[int, int], str] = {}
    for i, a in enumerate(numbers):
        for j, b in enumerate(numbers[:i]):
            if a is None or b is None or (a, b) not in matrix:
                return None
            found[j, i] = matrix[a, b]
    return found


def read_links(table: str) -> dict[tuple[int, int], str]:
    """The pairs of GPUs in what `nvidia-smi topo -m` prints."""
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in table.splitlines()]
    head = next((row for row in rows if row and row[0] == "GPU0"), [])
    columns = [int(word[3:]) for word in head if re.fullmatch(r"GPU\d+", word)]
    found = {}
    for row in rows:
        # The header line also starts with GPU0, but its second word is another GPU, not an X or a link.
        if row and re.fullmatch(r"GPU\d+", row[0]) and len(row) > 1 and not row[1].startswith("GPU"):
            for column, link in zip(columns, row[1:], strict=False):
                found[int(row[0][3:]), column] = link
    return {pair: link for pair, link in found.items() if pair[0] != pair[1]}


def _smi(*arguments: str) -> str:
    """What nvidia-smi prints; empty if it is missing or fails."""
    if (program := shutil.which("nvidia-smi")) is None:
        return ""
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
