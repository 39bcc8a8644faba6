"""AdamW with 8-bit states, from torchao: a quarter of the optimizer's memory."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import ClassVar

import torch
from torch import nn
from torch._functorch import config as functorch_config

from fullshard.errors import missing_package
from fullshard.optim.adamw import AdamW

logger = logging.getLogger(__name__)


class AdamW8bit(AdamW):
    """Adam with decoupled weight decay; states in blocks of 8-bit numbers. The first step compiles for a while."""

    packages: ClassVar[Mapping[str, str]] = {"torchao": "fullshard[optim]"}
    compiles: ClassVar[bool] = True
    saves_full: ClassVar[bool] = False  # blocks are quantised slice by slice

    def state_bytes(self, parameter_bytes: int) -> int:
        return 2

    def unquantised(self) -> AdamW:
        return AdamW(**{name: getattr(self, name) for name in AdamW.model_fields})

    def open(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        try:
            from torchao.optim import AdamW8bit as TorchaoAdamW8bit
        except ImportError as error:
            raise missing_package("torchao", extra="optim", needed_by="optimizer.kind = adamw_8bit") from error
        # torch keys this cache by the shape of the whole parameter: a rank with fewer rows would be given the compiled
        # update of another rank, and fail.
        functorch_config.enable_autograd_cache = False
        logger.warning("8-bit AdamW compiles its update in the first step; on a CPU that takes up to a minute")
        groups = self.groups(named_parameters)
        optimizer: torch.optim.Optimizer = TorchaoAdamW8bit(groups, lr=self.lr, betas=self.betas, eps=self.eps)
        return optimizer


__all__ = ["AdamW8bit"]
