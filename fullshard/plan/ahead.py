"""Predicted memory in a run: a line for its header, and one beside what rank 0 really uses, after warm-up.

Rank 0 predicts. What is traced for a compiler takes seconds, so it happens in a process of its own, at the lowest
priority. A prediction that fails costs a sentence, never the run. Must not know how anything is predicted.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fullshard.config.part import plain
from fullshard.contracts.launcher import Ranks
from fullshard.contracts.world import World
from fullshard.errors import FullshardError, first_line
from fullshard.faults.micro_batch import described
from fullshard.formatting.readable import size
from fullshard.plan.live import nbytes
from fullshard.recipe import Recipe

GIB = 2**30
WARM_UP = 2
"""Steps of a process until its memory is what it stays: the states of the optimizer exist from the first update on."""
LATER = "is being predicted beside the start"
UNKNOWN = "it cannot be predicted"
Write = Callable[[dict[str, Any]], None]


class Ahead:
    """What one run is predicted to need. Only rank 0 does anything."""

    def __init__(self, recipe: Recipe, module: nn.Module, world: World) -> None:
        """`module` is still empty; it is kept as it is now, for a prediction in this process."""
        self._recipe, self._world = recipe, world
        self._on_gpu = world.device.type == "cuda"
        self._traced = self._on_gpu if recipe.sharding.compile is None else recipe.sharding.compile
        self._module = copy.deepcopy(module) if world.is_main and not self._traced else None
        self._process: subprocess.Popen[str] | None = None
        self._found: dict[str, Any] = {}
        self._tensors: Callable[[], list[torch.Tensor]] = list
        self._step, self._shown = 0, False
        if world.is_main and self._traced and recipe.batch.per_device != "auto":
            self._process = _start(recipe, world)

    def of(self, built: Any) -> list[str]:
        """Lines for the header; takes the model that was built, to measure it later."""
        asked = described(self._recipe.batch, built.plan.per_device)
        if not self._world.is_main:
            return asked
        learner, self._step = built.parts.learner, built.parts.progress.step
        self._tensors = lambda: _held(learner.model, learner.optimizer)
        recipe = _with_rows(self._recipe, built.plan.per_device)
        if self._module is not None:
            self._found = predicted(recipe, Ranks(self._world.local_size, self._world.num_nodes), module=self._module)
        elif self._process is None:
            self._process = _start(recipe, self._world)
        self._look()
        self._shown = bool(self._found)
        return [self._found["text"] if self._found else LATER, *asked]

    @contextlib.contextmanager
    def beside(self, write: Write, say: Callable[[str], None]) -> Iterator[Write]:
        """A `write` that adds the prediction to what is logged, and once says how near it is."""
        said = not self._world.is_main

        def both(record: dict[str, Any]) -> None:
            nonlocal said
            self._look()
            if self._found and not self._shown:
                self._shown = True
                say(f"Memory: {self._found['text']}.")
            trained, known = record["kind"] == "train", "peak" in self._found
            if known and self._on_gpu and trained:
                record = {**record, "predicted_memory_gib": round(self._found["peak"] / GIB, 3)}
            if record.get("event") == "finished" and record["step"] > self._step and known and not said:
                said = True  # a run that ended before it was warm; its last record stays the last
                write(self._compared(record["step"])[1])
            write(record)
            if known and trained and record["step"] >= self._step + WARM_UP and not said:
                said = True
                line, event = self._compared(record["step"])
                say(line)
                write(event)

        try:
            yield both
        finally:
            if self._process is not None:
                with self._process:  # waits until it has ended, and closes its pipe
                    self._process.kill()

    def _look(self) -> None:
        """Takes what the other process has found, if it has ended."""
        if self._process is not None and self._process.poll() is not None:
            text, _ = self._process.communicate()
            self._process, self._found = None, {"text": UNKNOWN}
            with contextlib.suppress(json.JSONDecodeError):
                self._found = json.loads(text)

    def _compared(self, step: int) -> tuple[str, dict[str, Any]]:
        """Real memory beside what was predicted. On a CPU only what is held can be measured exactly."""
        found, more = self._found, ""
        if self._on_gpu:
            what, guess, real = "peak", found["peak"], torch.cuda.max_memory_allocated(self._world.device)
            reserved = torch.cuda.max_memory_reserved(self._world.device)
            more = f"; {size(reserved)} reserved"
        else:
            what, guess, real, reserved = "held between steps", found["held"], nbytes(self._tensors()), None
        error = guess / real - 1 if real else 0.0
        near = "as predicted" if guess == real else f"predicted {size(guess)} ({error:+.1%})"
        event: dict[str, Any] = {"kind": "event", "event": "memory", "step": step, "what": what}
        event |= {"predicted_gib": round(guess / GIB, 6), "real_gib": round(real / GIB, 6), "error": round(error, 4)}
        event |= {"reserved_gib": round(reserved / GIB, 3)} if reserved else {}
        return f"Memory of rank 0, {what}: {size(real)}, {near}{more}.", event


def predicted(recipe: Recipe, ranks: Ranks, *, module: nn.Module | None, gpu: Any = None) -> dict[str, Any]:
    """A sentence, and the bytes that are compared; without these if nothing can be predicted."""
    from fullshard.plan.foreseen import sentence
    from fullshard.plan.predict import Place, Planner

    try:
        own = not type(recipe.objective).__module__.startswith("fullshard.")
        planner = Planner(module, run=not own or gpu is not None)
        found = planner.predict(recipe, Place(ranks.per_node, ranks.nodes, gpu))
    except Exception as error:  # a prediction must not end a run
        return {"text": f"{UNKNOWN}: {type(error).__name__}: {first_line(error)}"}
    numbers = {"peak": found.peak.memory.total, "held": found.held.between_steps}
    return {"text": f"predicted: {sentence(found)}", **numbers}


def _with_rows(recipe: Recipe, rows: int) -> Recipe:
    return recipe.model_copy(update={"batch": recipe.batch.model_copy(update={"per_device": rows})})


def _held(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All tensors of this rank that live from step to step."""
    found = [*model.parameters(), *model.buffers()]
    for state in optimizer.state.values():
        found += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return [part for tensor in found for part in _inner(tensor)]


def _inner(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that one is made of: the shard of a distributed one, the parts of a quantised one."""
    if hasattr(tensor, "to_local"):
        return _inner(tensor.to_local())
    if hasattr(tensor, "__tensor_flatten__"):
        return [part for name in tensor.__tensor_flatten__()[0] for part in _inner(getattr(tensor, name))]
    return [tensor]


def _start(recipe: Recipe, world: World) -> subprocess.Popen[str] | None:
    """This file as a process of its own, which sees no GPU and joins no ranks."""
    gpu = None
    if world.device.type == "cuda":
        properties = torch.cuda.get_device_properties(world.device)
        gpu = [properties.name, properties.total_memory]
    asked = {"recipe": plain(recipe), "per_node": world.local_size, "nodes": world.num_nodes, "gpu": gpu}
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "fullshard.plan.ahead"],
            env={**alone, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(asked, default=str))
        process.stdin.close()
        process.stdin = None  # `communicate` would use it
    except OSError:
        return None
    return process


def _alone() -> None:
    """Predicts what standard input asks for, and prints it."""
    from fullshard.faults.orphans import end_soon_after
    from fullshard.plan.hardware import gpu_like
    from fullshard.recipes.read import read_recipe

    os.nice(19)
    end_soon_after(os.getppid(), grace_s=0.0)
    answer = os.dup(1)
    os.dup2(2, 1)  # code of the user's own may print
    asked = json.load(sys.stdin)
    gpu = gpu_like(*asked["gpu"]) if asked["gpu"] else None
    try:
        ranks = Ranks(asked["per_node"], asked["nodes"])
        found = predicted(read_recipe(asked["recipe"]), ranks, module=None, gpu=gpu)
    except FullshardError as error:
        found = {"text": f"{UNKNOWN}: {first_line(error)}"}
    os.write(answer, json.dumps(found).encode())


if __name__ == "__main__":
    _alone()
