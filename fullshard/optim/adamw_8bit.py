"""AdamW with 8-bit states, from torchao: a quarter of the optimizer's memory."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from fullshard.errors import missing_package
from fullshard.optim.adamw import AdamW

if TYPE_CHECKING:
    import torch
    from torch import nn

logger = logging.getLogger(__name__)


class AdamW8bit(AdamW):
    """Adam with decoupled weight decay and blockwise 8-bit states. The first step takes longer: it compiles."""

    packages: ClassVar[Mapping[str, str]] = {"torchao": "fullshard[optim]"}
    compiles: ClassVar[bool] = True
    saves_full: ClassVar[bool] = False  # blocks are quantised slice by slice

    def state_bytes(self, parameter_bytes: int) -> int:
        return 2

    def unquantised(self) -> AdamW:
        return AdamW(**{name: getattr(self, name) for name in AdamW.model_fields})

    def open(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        logger.warning("8-bit AdamW compiles its update in the first step; on a CPU that takes up to a minute")
        groups = self.groups(named_parameters)
        optimizer: torch.optim.Optimizer = _optimizer_class()(groups, lr=self.lr, betas=self.betas, eps=self.eps)
        return optimizer


def _optimizer_class() -> Any:
    """torchao's optimizer, with torch's autograd cache switched off in `step`: the cache key is the shape of the whole
    parameter, so a rank with fewer rows would get another rank's compiled update, and fail."""
    from torch._functorch import config as functorch_config

    try:
        from torchao.optim import AdamW8bit as TorchaoAdamW8bit
    except ImportError as error:
        raise missing_package("torchao", extra="optim", needed_by="optimizer.kind = adamw_8bit") from error

    class Uncached(TorchaoAdamW8bit):  # type: ignore[misc, unused-ignore]
        def step(self, closure: Any = None) -> Any:
            with functorch_config.patch(enable_autograd_cache=False):
                return super().step(closure)

    return Uncached


__all__ = ["AdamW8bit"]
