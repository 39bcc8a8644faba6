"""Real gloo ranks for tests: processes started once per test run, rendezvous through a file, functions sent by name.

A rank that raises returns its traceback; a collective that hangs fails in time.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

TIMEOUT_S = 150  # blocks and 8-bit updates compile for a minute while the other rank waits
SHARED = [
    "diffusers.models.transformers.dit_transformer_2d",
    "fullshard.build",
    "fullshard.check.preflight",
    "fullshard.loop",
    "fullshard.families.language.objectives.causal_lm",
    "peft",
    "torch.distributed.checkpoint",
    "transformers.models.qwen3.modeling_qwen3",
]
"""What most runs import: read once, in the process that every rank is forked from before it does anything."""


class RankPool:
    """Up to `size` ranks; each call runs a module-level function on the first `world` of them."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(SHARED)
        self._ranks: list[tuple[Any, Connection]] = []

    def run(self, function: Callable[..., Any], *args: Any, world: int, nodes: int = 1, **kwargs: Any) -> list[Any]:
        """What the function returns on each rank, in rank order."""
        while len(self._ranks) < world:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self._ranks.append((process, ours))
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(world):
                place = {"rank": rank, "world": world, "nodes": nodes, "store": os.path.join(folder, "store")}
                self._ranks[rank][1].send((place, function, args, kwargs))
            answers = [self._answer(rank) for rank in range(world)]
        failures = [f"rank {rank}:\n{text}" for rank, (text, _) in enumerate(answers) if text]
        if failures:
            raise AssertionError("\n".join(failures))
        return [value for _, value in answers]

    def _answer(self, rank: int) -> tuple[str | None, Any]:
        process, pipe = self._ranks[rank]
        if not pipe.poll(TIMEOUT_S + 60):
            self.close()
            return f"no answer within {TIMEOUT_S + 60} s", None
        try:
            return pipe.recv()  # type: ignore[no-any-return]
        except EOFError:
            process.join()
            self._ranks = self._ranks[:rank]
            return f"the process died with exit code {process.exitcode}", None

    def close(self) -> None:
        for process, _ in self._ranks:
            process.kill()
            process.join()
        self._ranks = []


def _serve(pipe: Connection) -> None:
    import warnings

    warnings.simplefilter("error", ResourceWarning)
    import torch
    import torch.distributed as dist

    from fullshard.kernels.amx import avoid_broken_amx

    avoid_broken_amx()
    torch.set_num_threads(1)
    while True:
        try:
            place, function, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            _enter(place)
            pipe.send((None, function(*args, **kwargs)))
        except BaseException:
            pipe.send((traceback.format_exc(), None))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _enter(place: dict[str, Any]) -> None:
    import torch.distributed as dist

    rank, world = place["rank"], place["world"]
    local = world // place["nodes"]
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank % local), LOCAL_WORLD_SIZE=str(local))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500", TORCHELASTIC_USE_AGENT_STORE="True")
    os.environ.update(GROUP_RANK=str(rank // local), GROUP_WORLD_SIZE=str(place["nodes"]))
    store = dist.FileStore(place["store"], world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT_S))
