"""Runs of a proof on ranks of the pool, where a kill is only acted; and parts of a user that break resume."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pydantic import PrivateAttr
from torch import nn

from fullshard.config.part import plain
from fullshard.contracts.evaluation import EvaluationInputs, Findings
from fullshard.contracts.objective import Batch, Terms
from fullshard.errors import DataError
from fullshard.families.language.objectives.causal_lm import CausalLM
from fullshard.prove.cases import Case
from fullshard.prove.kill import Kill
from tests.ranks import RankPool


class Abandoned(Exception):
    """Stands for the end of the process."""


class Abandon(Kill):
    """Leaves the run as it is where the real one ends the process, which would take the pool's ranks along."""

    def run(self, inputs: EvaluationInputs) -> Findings:
        if self._due():
            self.mark.touch()
            raise Abandoned
        return Findings()


class Counting(CausalLM):
    """A loss that depends on how many micro-batches this object has seen: what a checkpoint cannot know."""

    _seen: int = PrivateAttr(0)

    def loss(self, model: nn.Module, batch: Batch, aux: dict[str, nn.Module]) -> Terms:
        self._seen += torch.is_grad_enabled()
        terms = super().loss(model, batch, aux)
        return Terms(terms.loss_sum * (1 + 0.01 * self._seen), terms.metrics)


class Clock(CausalLM):
    """A loss that depends on when it is asked for."""

    def loss(self, model: nn.Module, batch: Batch, aux: dict[str, nn.Module]) -> Terms:
        terms = super().loss(model, batch, aux)
        return Terms(terms.loss_sum * (1 + 1e-3 * (time.time_ns() % 1000)), terms.metrics)


class Lopsided(CausalLM):
    """A count that is wrong unless a micro-batch has four samples, as where averages are averaged; and a loss that does
    not go on two ranks."""

    def count(self, batch: Batch) -> int:
        return super().count(batch) if len(batch["sample_ids"]) == 4 else 100

    def loss(self, model: nn.Module, batch: Batch, aux: dict[str, nn.Module]) -> Terms:
        if os.environ["WORLD_SIZE"] == "2":
            raise DataError("two ranks are too many. Use one.")
        return super().loss(model, batch, aux)


def run_case(settings: dict[str, Any], folder: str, resume: str) -> int:
    """One rank of a run; its exit code."""
    from fullshard.recipes.read import read
    from fullshard.run import join

    try:
        return join(read(settings), resume=resume)
    except Abandoned:
        return 1
    except Exception as error:
        (Path(folder) / "rank-0.txt").write_text(f"Error: {error}")
        return 2


def start_in(pool: RankPool, started: list[str]) -> Callable[[Case, Path], int]:
    """Starts cases on the ranks of the pool."""

    def start(case: Case, folder: Path) -> int:
        started.append(case.name)
        settings = plain(case.recipe)
        for part in settings["evaluate"]["parts"]:
            part["kind"] = f"{__name__}.Abandon"
        return int(max(pool.run(run_case, settings, str(folder), case.resume, world=case.ranks.per_node)))

    return start
