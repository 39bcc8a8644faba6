"""Runs something a second time with the same random numbers. Must not know what is run."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Randomness:
    """The state of the generators that dropout draws from, at one moment."""

    host: torch.Tensor
    device: torch.Tensor | None

    @staticmethod
    def now(device: torch.device) -> Randomness:
        """Takes no time on the device: its generator's state lies on the host."""
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return Randomness(torch.get_rng_state(), cuda)

    def restore(self, device: torch.device) -> None:
        torch.set_rng_state(self.host)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device, device)
