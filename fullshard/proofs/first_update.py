"""The proof of the first update: every gradient is finite, not all are zero, and weights changed.

`train_step` calls `remember` before the optimizer and `prove` after it. The verdict is the same on all ranks.
Must not know losses, models or the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import nn

from fullshard.dist import reduce
from fullshard.dist.gradients import inspect
from fullshard.dist.values import checksums
from fullshard.errors import NumericalError, SetupError
from fullshard.formatting.plural import counted


class FirstUpdate:
    """Checks the first update that moves weights, and does nothing afterwards."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        say: Callable[[str], None],
        resting: Collection[str] = (),
    ) -> None:
        self._trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._optimizer, self._say, self._resting = optimizer, say, resting
        self._proven = False
        self._before: torch.Tensor | None = None
        """A checksum of each parameter before the update."""

    def remember(self) -> None:
        """Call before an update: remembers the weights. With a learning rate of 0 there is nothing to prove."""
        if not self._proven and any(self._rates()):
            self._before = checksums([p for _, p in self._trained])

    @torch.no_grad()
    def prove(self, left_out: Callable[[], bool]) -> None:
        """Call after an update that the loss scaler did not skip, while the gradients are still there."""
        if self._proven or self._before is None or left_out():
            return
        self._proven = True
        found = torch.stack([inspect(p.grad) for _, p in self._trained]).cpu()
        changed = (checksums([p for _, p in self._trained]) != self._before)[:, None]
        # A small parameter is on one rank only: what is true of one slice is true of the parameter.
        everywhere = torch.stack(reduce.gather_objects(torch.cat([found, changed], dim=1))).any(dim=0)
        self._check(*(self._named(flags) for flags in everywhere.unbind(dim=1)))

    def _rates(self) -> list[float]:
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def _named(self, flags: torch.Tensor) -> list[str]:
        return [name for (name, _), flag in zip(self._trained, flags.tolist(), strict=True) if flag]

    def _check(self, missing: list[str], broken: list[str], moving: list[str], moved: list[str]) -> None:
        trained = counted(len(self._trained), "trained parameter")
        of = f"of {trained}"
        if broken:
            raise NumericalError(
                f"At the first update {len(broken)} {of} have a gradient that is not finite: {_some(broken)}. "
                "Look for records with extreme values, lower optimizer.lr, or try precision: fp32."
            )
        rested = [name for name in missing if name in self._resting]
        if missing := [name for name in missing if name not in self._resting]:
            raise SetupError(
                f"At the first update {len(missing)} {of} have no gradient: {_some(missing)}. The loss does not depend "
                f"on them, and they would never learn. Freeze them: model.freeze: [{', '.join(missing[:3])}], or check "
                "that the model runs them."
            )
        if not moving:
            raise NumericalError(
                f"At the first update the gradients of all {trained} are zero: nothing would be learned. Check that "
                "some labels are not masked, and that the loss depends on what is trained (model.lora, model.freeze)."
            )
        if not moved:
            raise NumericalError(
                f"The first update left all {trained} unchanged: with a learning rate of {max(self._rates()):g} every "
                "change is smaller than the last digit of the weights. Raise optimizer.lr, shorten schedule.warmup, or "
                "use another precision than bf16-pure."
            )
        still = len(set(moving) - set(moved))
        lost = f"; {still} have a gradient but did not change: the update is below their last digit" if still else ""
        lost += f"; {len(rested)} belong to towers that no sample of this step needs" if rested else ""
        self._say(
            f"First update proven: the gradients {of} are finite, {len(moving)} are not zero, {len(moved)} "
            f"parameters changed{lost}."
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
