"""Ends a run as the system would: every rank kills itself in the middle of it.

An evaluation can do this, as it is called on every rank after every step. Must not know what the run is compared with.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch

from fullshard.checkpoint import folder as files
from fullshard.contracts.evaluation import Evaluation, EvaluationInputs, Findings
from fullshard.log.metrics import FILE, last_step

WAIT_S = 10.0
"""How long to wait for a checkpoint that is written in the background before taking another step."""


class Kill(Evaluation):
    """Sends SIGKILL to every rank after a step, once there is a checkpoint of the previous step or a later one."""

    step: int
    """The step after which the ranks are killed, or the first later one with a checkpoint to resume from."""
    of: str
    """The run folder."""

    @property
    def mark(self) -> Path:
        """The file that says that this part killed the run."""
        return Path(self.of) / f"killed-{self.step}"

    def run(self, inputs: EvaluationInputs) -> Findings:
        # Rank 0 has logged the step before it gets here; another rank may look too early.
        ranks_due = inputs.sum_over_ranks(torch.tensor(float(self._due()), device=inputs.device))
        if float(ranks_due) > 0:
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return Findings()

    def _due(self) -> bool:
        done = last_step(Path(self.of) / FILE) or 0
        if done < self.step:
            return False
        until = time.monotonic() + WAIT_S
        while not self._can_resume() and time.monotonic() < until:
            time.sleep(0.05)
        return self._can_resume()

    def _can_resume(self) -> bool:
        steps = [int(path.name.rpartition("-")[2]) for path in files.published(Path(self.of))]
        return max(steps, default=0) >= self.step - 1
