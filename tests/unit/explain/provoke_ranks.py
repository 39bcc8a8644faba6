"""Real errors of sharding and of ranks that talk to each other. Each function is named after its entry."""

from __future__ import annotations

import os
import signal
import socket
import struct
import traceback
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import RankPool
from tests.unit.explain.process_group import alone

CPU = torch.device("cpu")


def tied_over_units() -> None:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 4, bias=False))
    model[1].weight = model[0].weight
    with alone():
        for module in (model[0], model[1], model):
            fully_shard(module)
        model(torch.tensor([1]))


def mixed_with_dtensor() -> None:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with alone():
        fully_shard(model)
        nn.functional.linear(torch.ones(1, 2), model[0].weight)


def mixed_gradient_norm() -> None:
    from torch.distributed.fsdp import fully_shard

    with alone():
        torch.nn.utils.clip_grad_norm_(_half_sharded(fully_shard).parameters(), 1.0)


def mixed_gradient_norm__in_an_optimizer() -> None:
    from torch.distributed.fsdp import fully_shard

    with alone():
        torch.optim.AdamW(_half_sharded(fully_shard).parameters(), foreach=True).step()


def _half_sharded(fully_shard: Any) -> nn.Module:
    """A model with gradients whose root was not sharded."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(model[0])
    model(torch.ones(1, 2)).sum().backward()
    return model


def fsdp1_storage_freed(ranks: RankPool) -> str:
    return str(ranks.run(_use_a_freed_view, world=2)[0])


def _use_a_freed_view() -> str:
    from torch.distributed.fsdp import FullyShardedDataParallel

    class Keeps(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept.append(self.weight)
            return super().forward(x)

    kept: list[torch.Tensor] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 is deprecated
        unit = FullyShardedDataParallel(Keeps(4, 4), device_id=CPU)
        model = FullyShardedDataParallel(nn.Sequential(unit), device_id=CPU)
    with torch.no_grad():
        model(torch.ones(1, 4))
    # How autograd makes a view again, for the backward pass of a transposed weight.
    return _error_of(lambda: kept[0].detach().as_strided((4, 4), (1, 4), 0))


def ready_only_once() -> None:
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=True)

    with alone():
        model = DistributedDataParallel(Checkpointed(), find_unused_parameters=True)
        model(torch.ones(1, 2, requires_grad=True)).sum().backward()


def hang_up() -> None:
    """What torch's launcher does when its terminal is closed."""
    from torch.distributed.elastic.multiprocessing.api import _terminate_process_handler

    _terminate_process_handler(signal.SIGHUP, None)


def weight_must_be_2d(ranks: RankPool) -> str:
    return str(ranks.run(_use_a_part, world=2)[0])


def _use_a_part() -> str:
    from torch.distributed.fsdp import FullyShardedDataParallel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 is deprecated
        model = nn.Sequential(nn.Embedding(4, 2))
        FullyShardedDataParallel(model, device_id=CPU, use_orig_params=True)
    with torch.no_grad():
        return _error_of(lambda: model[0](torch.tensor([1])))


def wrap_class_not_found() -> None:
    from accelerate import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["NoSuchLayer"]
    )
    plugin.set_auto_wrap_policy(nn.Linear(2, 2))


def device_map_in_training() -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    model = nn.Linear(2, 2)
    model.hf_device_map = {"a": 0, "b": "cpu"}
    with alone():
        try:
            accelerator = Accelerator(cpu=True)
            accelerator.state.distributed_type = "MULTI_CPU"
            accelerator.prepare_model(model)
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)


def unused_parameters() -> None:
    from torch.nn.parallel import DistributedDataParallel

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    with alone():
        model = DistributedDataParallel(Half())
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()


def backend_for_cpu() -> None:
    """A group whose only backend is for CUDA tensors, as NCCL's is; gloo stands in for it."""
    with alone("cuda:gloo"):
        dist.all_reduce(torch.ones(1))


def launcher_variables() -> None:
    kept = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if name in os.environ}
    try:
        next(dist.rendezvous("env://"))
    finally:
        os.environ.update(kept)


def ranks_did_not_meet__store() -> None:
    dist.TCPStore("localhost", 0, world_size=2, is_master=True, timeout=timedelta(seconds=1))


def ranks_did_not_meet__nobody_there() -> None:
    dist.TCPStore("localhost", _closed_port(), world_size=2, is_master=False, timeout=timedelta(seconds=1))


def port_in_use() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        dist.TCPStore("localhost", port, world_size=1, is_master=True, timeout=timedelta(seconds=5))


def peer_lost(ranks: RankPool) -> str:
    return str(ranks.run(_leave_early, world=2)[0])


def _leave_early() -> str:
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        store.set("left", "yes")
        return ""
    store.wait(["left"])
    return _error_of(lambda: dist.recv(torch.ones(1), src=1))


def peer_lost__reset() -> None:
    """A connection that its other side drops with data unread, as a killed process's system does."""
    with socket.create_server(("localhost", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        theirs, _ = server.accept()
        ours.sendall(b"never read")
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        theirs.close()
        ours.recv(1)


def peer_lost__store() -> None:
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("localhost", server.port, is_master=False, wait_for_workers=False)
    del server
    client.get("never")


def collective_timeout(ranks: RankPool) -> str:
    return str(ranks.run(_do_not_come, world=2)[0])


def _do_not_come() -> str:
    group = dist.new_group(timeout=timedelta(seconds=1))
    text = _error_of(lambda: dist.all_reduce(torch.ones(1), group=group)) if dist.get_rank() == 0 else ""
    dist.barrier()
    return text


def collectives_differ(ranks: RankPool) -> str:
    return str(ranks.run(_two_shapes, world=2)[0])


def _two_shapes() -> str:
    def differ() -> None:
        store = dist.PrefixStore("checked", dist.distributed_c10d._get_default_store())
        backend = dist.ProcessGroupGloo(store, dist.get_rank(), 2, timedelta(seconds=5))
        checked = dist.distributed_c10d._create_process_group_wrapper(
            backend, "checked", store, dist.get_rank(), 2, timedelta(seconds=5)
        )
        checked.allreduce([torch.ones(1 + dist.get_rank())]).wait()

    text = _error_of(differ)
    dist.barrier()
    return text


def rank_killed__torchrun() -> str:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    failure = ProcessFailure(local_rank=1, pid=os.getpid(), exitcode=-signal.SIGKILL, error_file="no file")
    return str(ChildFailedError("train.py", {1: failure}))


def rank_killed__fullshard() -> str:
    from fullshard.explain.ended import how

    return f"Rank 1 (process 77) {how(-signal.SIGKILL)}. The other ranks were stopped."


def no_cuda() -> None:
    torch.ones(1, device="cuda")


def _closed_port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def _error_of(call: Any) -> str:
    try:
        call()
    except Exception:
        return traceback.format_exc()
    return "no error"
