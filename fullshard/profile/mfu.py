"""MFU (model FLOPs utilisation): the share of the devices' peak that the model's own arithmetic reaches.

MFU = sum over quantities (per second x flops of one) / (peak flops of one device x ranks). Quantities are counted over
all ranks; flops are as the model family states them (6·N + 6·L·d·s per token of a decoder, those of image or audio
towers added); the peak is the vendor's dense bf16 figure. Must not know how time is measured, nor import torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_PEAKS = {  # dense bf16 operations per second; fp16 where a device has no bf16
    2500e12: "GB200",
    2250e12: "B200",
    989e12: "H200 GH200 H100 H800",
    362e12: "L40S",
    312e12: "A100 A800",
    181e12: "L40",
    165e12: "A30 4090",
    150e12: "A40",
    125e12: "A10 V100",
    121e12: "L4",
    71e12: "3090",
    70e12: "A10G",
    65e12: "T4",
}
_VARIANTS = {("H100", "PCIE"): 756e12, ("H100", "NVL"): 835e12}
_SLOWER = {"LAPTOP", "MIG", "MAX", "D"}
"""Words in a name that mark a cut-down device, whose peak the table does not know."""


@dataclass(frozen=True)
class Mfu:
    """The formula of one run."""

    flops: Mapping[str, float]
    """Of one training step, for one unit of each logged quantity that costs any: {"tokens": 6e9}."""
    peak: float | None
    """Of one device, per second; None: not known, and then no MFU is claimed."""
    ranks: int
    device: str

    @classmethod
    def of(cls, main: str, flops: tuple[float, Mapping[str, float]], *, device: str, ranks: int) -> Mfu:
        """`flops` are those of the `main` quantity, then of others."""
        return cls({main: flops[0], **flops[1]}, peak_flops(device), ranks, device)

    def share(self, amounts: Mapping[str, float], seconds: float) -> float | None:
        """The MFU of a time in which these amounts were trained on; None if it is not known."""
        done = sum(amounts.get(name, 0.0) * each for name, each in self.flops.items())
        return done / seconds / (self.peak * self.ranks) if self.peak and any(self.flops.values()) else None

    def describe(self) -> str:
        """The formula in numbers; its names are those of a record in metrics.jsonl."""
        if self.peak is None:
            return f"not logged: the peak of {self.device} is not known"
        terms = [f"{name}_per_second x {each:.6g}" for name, each in self.flops.items() if each]
        done = " + ".join(terms)
        return f"{f'({done})' if len(terms) > 1 else done} / ({self.peak:.6g} x {self.ranks})"


def peak_flops(device_name: str) -> float | None:
    """Peak operations per second of one device; None if its name is not known, and then the run reports no MFU."""
    parts = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    if parts & _SLOWER:
        return None
    for (name, variant), peak in _VARIANTS.items():
        if {name, variant} <= parts:
            return peak
    found = [peak for peak, names in _PEAKS.items() if parts & set(names.split())]
    return found[0] if len(found) == 1 else None
