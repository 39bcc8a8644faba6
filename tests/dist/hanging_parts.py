"""An encoder and an objective that make one rank hang, as HANG says (KIND:RANK), once the run has logged two steps."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.contracts.data import Features
from fullshard.contracts.objective import Batch, Terms
from fullshard.families.language.encoders.text import Text
from fullshard.families.language.objectives.causal_lm import CausalLM


def due(*kinds: str) -> bool:
    """Whether this rank hangs now; the file `hangs` in the run folder then says so."""
    kind, _, rank = os.environ.get("HANG", "").partition(":")
    log = Path(os.environ.get("HANG_LOG", "/none"))
    if kind not in kinds or rank != os.environ.get("RANK") or not log.exists() or log.read_text().count("train") < 2:
        return False
    log.with_name("hangs").touch()
    return True


class Reading(Text):
    """Reads more in the loader."""

    def collate(self, samples: Sequence[Features], *, length: int | None) -> dict[str, Any]:
        self.read()
        return super().collate(samples, length=length)

    def read(self) -> None:
        if due("data"):
            time.sleep(1000)
        if due("slow"):
            go = Path(os.environ["HANG_LOG"]).with_name("go")
            while not go.exists():
                time.sleep(0.1)


class Stuck(CausalLM):
    """Stops in the forward pass."""

    def loss(self, model: nn.Module, batch: Batch, aux: dict[str, nn.Module]) -> Terms:
        if torch.is_grad_enabled():
            time.sleep(0.3 if os.environ.get("HANG") == "healthy:1" else 0)
            self.misbehave()
        return super().loss(model, batch, aux)

    def misbehave(self) -> None:
        if due("gil"):
            hold_the_gil()
        if due("mismatch"):
            torch.distributed.all_reduce(torch.ones(3))
        if due("stop"):
            os.kill(os.getpid(), signal.SIGSTOP)
        if due("kill"):
            os.kill(os.getpid(), signal.SIGKILL)


def hold_the_gil() -> None:
    """Waits in C for a byte that never comes; PyDLL keeps the GIL meanwhile."""
    reader, _ = os.pipe()
    ctypes.PyDLL(None).read(reader, ctypes.create_string_buffer(1), 1)
