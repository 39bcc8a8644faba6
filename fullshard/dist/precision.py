"""Precision: one word in the recipe means storage dtype, compute dtype, reduce dtype and loss scaling.

Must not know models or FSDP. Imports torch only to resolve a word for a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fullshard.config.part import did_you_mean
from fullshard.errors import SetupError
from fullshard.kernels import float8

if TYPE_CHECKING:
    import torch

SPELLINGS = {
    "auto": ("auto",),
    "bf16": ("bf16", "bf16-mixed", "bfloat16"),
    "fp16": ("fp16", "16-mixed", "float16", "16"),
    "fp32": ("fp32", "32", "32-true", "float32", "none", "no"),
    "bf16-pure": ("bf16-pure", "bf16-true", "pure-bf16"),
    **float8.SPELLINGS,
}
AS_ASKED = "as requested"
REFUSED = ("fp16-pure", "16-true", "pure-fp16", "fp16-true")


def check_word(word: Any) -> str:
    """Our spelling of a precision; every common spelling is accepted."""
    if word is None or word is False:
        return "fp32"
    text = str(word).lower().replace("_", "-").removeprefix("torch.")
    for name, spellings in SPELLINGS.items():
        if text in spellings:
            return name
    if text in REFUSED:
        raise ValueError(
            "fp16 weights cannot be trained: updates vanish, and the loss scaler refuses their gradients; "
            "fp16 computes in fp16 and keeps fp32 weights"
        )
    known = [s for spellings in SPELLINGS.values() for s in spellings]
    allowed = ", ".join(name for name in SPELLINGS if "emulated" not in name)
    raise ValueError(f"not a precision{did_you_mean(text, known)}; allowed: {allowed}")


@dataclass(frozen=True)
class ResolvedPrecision:
    """What precision means in this run."""

    word: str
    storage: torch.dtype
    """Of trained parameters; frozen ones may keep the dtype of their file."""
    compute: torch.dtype
    reason: str
    scaler: bool

    def describe(self) -> str:
        storage, compute = (str(dtype).removeprefix("torch.") for dtype in (self.storage, self.compute))
        scaler = "with loss scaling" if self.scaler else "no scaler"
        return f"{self.word} (storage {storage}, compute {compute}, reduce float32, {scaler}; {self.reason})"

    def warning(self) -> str | None:
        """What the user should know about this choice."""
        if self.word == "bf16-pure":
            return (
                "precision = bf16-pure keeps weights and Adam state in bf16, with 8 bits: an update smaller than 1/256 "
                "of a weight is lost. Half the memory; precision: bf16 keeps both in fp32 and computes as fast."
            )
        return None

    def switched(self) -> str | None:
        """The line to print if `auto` could not be bf16."""
        if self.word == "fp16" and self.reason != AS_ASKED:
            return f"precision = auto became fp16 with a loss scaler: {self.reason.removeprefix('auto: ')}."
        return None


def resolve_precision(word: str, device: torch.device) -> ResolvedPrecision:
    import torch

    if device.type != "cuda":
        return resolve_for(word, capability=None)
    return resolve_for(
        word, capability=torch.cuda.get_device_capability(device), name=torch.cuda.get_device_name(device)
    )


def resolve_for(word: str, *, capability: tuple[int, int] | None, name: str = "the GPU") -> ResolvedPrecision:
    """Decides `auto` by a GPU's compute capability (None: a CPU). A request that cannot be met is an error."""
    import torch

    has_bf16 = capability is None or capability >= (8, 0)
    if word.startswith("bf16") and not has_bf16:
        raise SetupError(
            f"precision = {word}: {name} has compute capability {'.'.join(map(str, capability or ()))}, and bf16 needs "
            "8.0. Use precision: fp16 or auto."
        )
    float8.require(word, capability=capability, name=name if capability else "this machine's CPU")
    chosen, reason = word, AS_ASKED
    if word == "auto":
        chosen = "bf16" if has_bf16 else "fp16"
        reason = "auto: this device computes in bf16" if has_bf16 else "auto: bf16 needs compute capability 8.0"
    compute = {"fp16": torch.float16, "fp32": torch.float32}.get(chosen, torch.bfloat16)
    storage = compute if chosen == "bf16-pure" else torch.float32
    return ResolvedPrecision(chosen, storage, compute, reason, scaler=chosen == "fp16")
