"""Saves and restores the generators that dropout draws from, to run a forward pass again with the same numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RngState:
    """The generators' states at one moment."""

    host: torch.Tensor
    device: torch.Tensor | None

    @staticmethod
    def now(device: torch.device) -> RngState:
        """Does not wait for the device: its generator's state is on the host."""
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return RngState(torch.get_rng_state(), cuda)

    def restore(self, device: torch.device) -> None:
        torch.set_rng_state(self.host)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device, device)
