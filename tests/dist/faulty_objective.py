"""An objective that injects faults: which one, on which rank, in which step and attempt, is in the variable FAULTS.

`FAULTS=[{"do": "kill", "rank": 1, "step": 4, "attempt": 0}]`; without `attempt` in every one, without `step` while the
rank starts. Imported by the rank before it meets the others.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.contracts.objective import Batch, Terms
from fullshard.errors import DataError, NumericalError
from fullshard.families.language.objectives.causal_lm import CausalLM
from fullshard.faults.steps import FOLDER, step_of

RANK = int(os.environ.get("RANK", -1))
ATTEMPT = len(json.loads(os.environ.get("FULLSHARD_RESTARTS", "[]")))


def step() -> int | None:
    return step_of(Path(os.environ[FOLDER]), RANK)


def due(*kinds: str) -> str | None:
    """The fault that is due here and now."""
    for fault in json.loads(os.environ.get("FAULTS", "[]")):
        here = fault["rank"] == RANK and fault.get("attempt", ATTEMPT) == ATTEMPT and fault["do"] in kinds
        if here and fault.get("step") == (step() if "step" in fault else None):
            return str(fault["do"])
    return None


def out_of_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
    torch.ones(2**32)


def hold(go: Path) -> None:
    while not go.exists():
        time.sleep(0.05)


ACTS: dict[str, Callable[[], Any]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "exit": lambda: os._exit(7),
    "sleep": lambda: time.sleep(3600),
    "hold": lambda: hold(Path(os.environ["GO"])),
    "memory": out_of_memory,
}


class Faulty(CausalLM):
    """Trains as usual but for the faults."""

    def loss(self, model: nn.Module, batch: Batch, aux: dict[str, nn.Module]) -> Terms:
        terms = super().loss(model, batch, aux)
        if not torch.is_grad_enabled():
            return terms
        time.sleep(float(os.environ.get("STEP_S", "0")))
        if found := due(*ACTS):
            ACTS[found]()
        if due("forward"):
            raise RuntimeError("a fault in forward")
        if due("mistake"):
            raise DataError("train.jsonl: a record that cannot be used. Fix it.")
        if due("guard"):
            raise NumericalError("the loss is not a number. Lower the learning rate.")
        if due("backward"):
            terms.loss_sum.register_hook(_fail)
        return terms


def _fail(gradient: torch.Tensor) -> None:
    raise RuntimeError("a fault in backward")


def _break(module: str, owner: str | None, name: str, kind: str) -> None:
    """Makes a function of the package fail where a fault of this kind is due."""
    import importlib

    place: Any = importlib.import_module(module)
    place = getattr(place, owner) if owner else place
    real = getattr(place, name)

    def faulty(*given: Any, **named: Any) -> Any:
        if due(kind):
            raise OSError(5, f"a fault in {kind}")
        return real(*given, **named)

    setattr(place, name, faulty)


if RANK >= 0:
    if due("start"):
        os.kill(os.getpid(), signal.SIGKILL)
    _break("fullshard.data.loader", "_Stream", "take", "data")
    _break("fullshard.checkpoint.saver", "Saver", "save", "save")
