"""Peak compute of a device: dense bf16 operations per second by the vendor's data sheet (fp16 without bf16). Sparsity
figures are never used.

Must not import torch: it takes the device's name. An unknown name has no peak, and the run reports no MFU.
"""

from __future__ import annotations

import re

_PEAKS = {
    "B200": 2250e12,
    "GB200": 2500e12,
    "H200": 989e12,
    "GH200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A40": 150e12,
    "A30": 165e12,
    "A10": 125e12,
    "A10G": 70e12,
    "4090": 165e12,
    "3090": 71e12,
    "V100": 125e12,
    "T4": 65e12,
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
    found = [peak for name, peak in _PEAKS.items() if name in parts]
    return found[0] if len(found) == 1 else None
