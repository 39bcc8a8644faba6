"""Peak compute of a device: dense bf16 operations per second by the vendor's data sheet (fp16 without bf16). Sparsity
figures are never used.

Must not import torch: it takes the device's name. An unknown name has no peak, and the run reports no MFU.
"""

from __future__ import annotations

import re

_PEAKS = {
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


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 (else fp16) operations per second of one device, or None when its name is not known."""
    parts = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    if parts & _SLOWER:
        return None
    for (name, variant), peak in _VARIANTS.items():
        if {name, variant} <= parts:
            return peak
    found = [peak for peak, names in _PEAKS.items() if parts & set(names.split())]
    return found[0] if len(found) == 1 else None
