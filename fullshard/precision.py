"""Precision: one word in the recipe, four facts in the run (storage, compute, reduce, scaler).

Must not know models or FSDP. torch is imported only when a word is resolved against a device.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullshard.errors import SetupError
from fullshard.part import did_you_mean

if TYPE_CHECKING:
    import torch

SPELLINGS = {
    "auto": ("auto",),
    "bf16": ("bf16", "bf16-mixed", "bfloat16"),
    "fp16": ("fp16", "16-mixed", "float16", "16"),
    "fp32": ("fp32", "32", "32-true", "float32", "none", "no"),
}


def check_word(word: Any) -> str:
    """The house spelling of a precision; every spelling of the field is accepted."""
    if word is None or word is False:
        return "fp32"
    text = str(word).lower().replace("_", "-").removeprefix("torch.")
    for name, spellings in SPELLINGS.items():
        if text in spellings:
            return name
    known = [s for spellings in SPELLINGS.values() for s in spellings]
    raise ValueError(f"not a precision{did_you_mean(text, known)}; allowed: {', '.join(known)}")


@dataclass(frozen=True)
class ResolvedPrecision:
    """What precision means in this run."""

    word: str
    compute: torch.dtype
    reason: str
    scaler: bool

    def describe(self) -> str:
        compute = str(self.compute).removeprefix("torch.")
        scaler = "with loss scaling" if self.scaler else "no scaler"
        return f"{self.word} (storage float32, compute {compute}, reduce float32, {scaler}; {self.reason})"


def resolve_precision(word: str, device: torch.device) -> ResolvedPrecision:
    """Decides `auto` by the hardware; an explicit request that cannot be met is an error, never a silent switch."""
    import torch

    has_bf16 = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)
    if word == "bf16" and not has_bf16:
        raise SetupError(
            f"precision = bf16: {torch.cuda.get_device_name(device)} has compute capability "
            f"{'.'.join(map(str, torch.cuda.get_device_capability(device)))}, and bf16 needs 8.0. "
            "Use precision: fp16 or auto."
        )
    if word == "auto":
        chosen = "bf16" if has_bf16 else "fp16"
        reason = "auto: this device computes in bf16" if has_bf16 else "auto: bf16 needs compute capability 8.0"
    else:
        chosen, reason = word, "as asked for"
    compute = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[chosen]
    return ResolvedPrecision(chosen, compute, reason, scaler=chosen == "fp16")


def avoid_broken_amx() -> None:
    """Some virtual machines announce AMX and then end the process that uses it: try it in a child, and do without.

    To be called before the first matrix product of the process: oneDNN decides once which instructions it uses."""
    announced = Path("/proc/cpuinfo")
    if "ONEDNN_MAX_CPU_ISA" in os.environ or not announced.exists() or "amx_bf16" not in announced.read_text():
        return
    with warnings.catch_warnings():
        # Python warns of a fork beside threads; this child touches nothing that they could hold.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        import torch

        torch.set_num_threads(1)
        square = torch.ones(64, 64, dtype=torch.bfloat16)
        os._exit(int(float((square @ square)[0, 0]) != 64.0))
    _, status = os.waitpid(child, 0)
    if status != 0:
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"
