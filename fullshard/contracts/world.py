"""This rank among all ranks, and its device. Must not know how ranks meet, nor what they are for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class World:
    """This rank, all ranks, and the device that belongs to this rank."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    backend: str
    timeout_s: float = 600.0

    @property
    def num_nodes(self) -> int:
        return self.size // self.local_size

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def device_name(self) -> str:
        import torch

        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"

    def describe(self) -> str:
        nodes = f" on {self.num_nodes} nodes" if self.num_nodes > 1 else ""
        return f"{self.size} {'rank' if self.size == 1 else 'ranks'}{nodes}, {self.device_name}, {self.backend}"
