"""Provokes the errors that need a GPU, and writes what they said to recorded_on_gpu.json beside this file.

CUDA and NCCL cannot fail on a machine without them; the tests read the recording instead. To record anew, on a machine
with one GPU: python tests/unit/explain/record_on_gpu.py [FILE]. Each error is had in a process of its own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn


def cuda_out_of_memory() -> None:
    torch.empty(2**42, dtype=torch.uint8, device="cuda")


def cuda_device_side_assert() -> None:
    nn.Embedding(8, 4, device="cuda")(torch.tensor([9], device="cuda")).sum().item()


def cuda_device_number() -> None:
    torch.cuda.set_device(torch.cuda.device_count())


def cuda_in_fork() -> None:
    from torch.utils.data import DataLoader

    torch.zeros(1, device="cuda")
    list(DataLoader([1, 2], num_workers=1, collate_fn=_to_gpu))


def _to_gpu(rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, device="cuda")


def devices_differ() -> None:
    nn.Linear(2, 2, device="cuda")(torch.zeros(1, 2))


def unscale_bf16() -> None:
    weight = nn.Parameter(torch.ones(2, device="cuda", dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)


def compile_without_compiler() -> None:
    with tempfile.TemporaryDirectory() as cache:
        os.environ.update(PATH=cache, TRITON_CACHE_DIR=cache, TORCHINDUCTOR_CACHE_DIR=cache)
        os.environ.pop("CC", None)
        torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device="cuda"))


def nccl_duplicate_gpu() -> None:
    _two_ranks()


def nccl_without_memory() -> None:
    torch.zeros(1, device="cuda")
    _fill_the_gpu()
    _alone()
    dist.all_reduce(torch.empty(0, device="cuda"))
    dist.barrier()


def nccl_timeout() -> None:
    """A collective that does not end, since the GPU is busy with something else."""
    _alone(timeout=timedelta(seconds=3))
    value = torch.zeros(1, device="cuda")
    dist.all_reduce(value)
    torch.cuda.synchronize()
    torch.cuda._sleep(30_000_000_000)
    dist.all_reduce(value)
    torch.cuda.synchronize()


def nccl_over_sockets() -> None:
    os.environ["NCCL_DEBUG"] = "INFO"
    _alone()
    dist.all_reduce(torch.zeros(1, device="cuda"))
    torch.cuda.synchronize()


def _alone(timeout: timedelta = timedelta(seconds=60)) -> None:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


def _fill_the_gpu() -> None:
    size, kept = 2**33, []
    while size >= 2**9:
        try:
            kept.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    _KEPT.extend(kept)


_KEPT: list[torch.Tensor] = []


def _two_ranks() -> None:
    code = (
        "import os, torch, torch.distributed as dist; from datetime import timedelta; "
        "torch.cuda.set_device(0); rank = int(os.environ['RANK']); "
        "store = dist.FileStore(os.environ['MEET'], 2); "
        "dist.init_process_group('nccl', store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30)); "
        "dist.all_reduce(torch.zeros(1, device='cuda')); torch.cuda.synchronize()"
    )
    with tempfile.TemporaryDirectory() as folder:
        started = [
            subprocess.Popen(
                [sys.executable, "-c", code],
                env={**os.environ, "RANK": str(rank), "MEET": f"{folder}/meet"},
                stderr=None if rank == 0 else subprocess.DEVNULL,
            )
            for rank in range(2)
        ]
        for process in started:
            process.wait()


PROVOCATIONS = [
    cuda_out_of_memory,
    cuda_device_side_assert,
    cuda_device_number,
    cuda_in_fork,
    devices_differ,
    unscale_bf16,
    compile_without_compiler,
    nccl_duplicate_gpu,
    nccl_timeout,
    nccl_over_sockets,
    nccl_without_memory,
]
"""The last one fills the GPU, so it comes last and alone."""


def _said(name: str) -> str:
    command = [sys.executable, __file__, "--one", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    # Where this machine keeps things is of no interest.
    return re.sub(r"/[^\s\"]*/(?=site-packages/|tests/)", "", done.stdout + done.stderr)[-12_000:]


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        globals()[sys.argv[2]]()
        return
    target = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).with_name("recorded_on_gpu.json")
    names = [function.__name__ for function in PROVOCATIONS]
    with ThreadPoolExecutor(4) as pool:
        errors = dict(zip(names[:-1], pool.map(_said, names[:-1]), strict=True))
    errors[names[-1]] = _said(names[-1])
    facts = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "cuda": torch.version.cuda}
    target.write_text(json.dumps({**facts, "errors": errors}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
