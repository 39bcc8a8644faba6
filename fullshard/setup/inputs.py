"""What a run has before its ranks connect; run_inputs.py prepares it. Must not do anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from fullshard.data.prepare import Prepared
from fullshard.proofs.same_data import Inventory
from fullshard.setup.step_plan import StepPlan


@dataclass(frozen=True)
class RunInputs:
    """What a run has before its ranks connect."""

    processor: Any
    module: nn.Module
    """The model with its edits and parameters on meta; sharding fills this object."""
    data: Prepared
    plan: StepPlan
    validation_per_device: int
    identity: dict[str, Any]
    """What step N means in the data: must be the same when a checkpoint resumes."""
    content: Inventory
    """The files of `data.train`, to say which of them changed."""
