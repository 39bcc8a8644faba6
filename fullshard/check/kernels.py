"""Which attention kernel a run will use, which others are available, and what compiled blocks need.

Must not know models beyond the name of the kernel they ask for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fullshard.check.findings import Finding, error, ok, warning
from fullshard.check.machine import Gpu, Machine
from fullshard.dist.precision import ResolvedPrecision
from fullshard.hf.architecture.attention import NOT_INSTALLED
from fullshard.kernels import flash4
from fullshard.recipe import Recipe

FLASH = (8, 0)
"""The compute capability that flash kernels need, torch's and flash-attn's: Ampere, not Turing or Volta."""
_GENERATIONS = {(7, 5): "Turing", (7, 0): "Volta", (6, 0): "Pascal", (6, 1): "Pascal"}


def attention(
    asked: str, *, packed: bool, gpus: Sequence[Gpu], precision: ResolvedPrecision, machine: Machine
) -> Iterator[Finding]:
    """Whether the requested kernel can run, and which one will."""
    no_flash = _no_flash(gpus, precision)
    installed = bool(machine.packages & {"flash_attn", "kernels"})
    chosen = asked if asked != "auto" else "varlen for packed rows" if packed and not no_flash else "sdpa"
    if asked == "flash_attention_2" and (no_flash or not installed):
        # Kernels differ in speed, not in what they compute, so another one will do.
        instead = "sdpa" if no_flash or not packed else "varlen"
        text = f"model.attention = flash_attention_2 falls back to {instead}: {no_flash or NOT_INSTALLED}."
        remedy = "Set model.attention=auto to choose by device without this warning."
        if not no_flash:
            remedy = f"Install it with: pip install flash-attn --no-build-isolation. {remedy}"
        yield warning("attention", text, remedy)
    elif asked == flash4.WORD and (lacks := no_flash or flash4.lacking(capability=_lowest(gpus), head_dim=None)):
        instead = "sdpa" if no_flash or not packed else "varlen"
        text = f"model.attention = {asked} falls back to {instead}: {lacks}."
        yield warning("attention", text, "Set model.attention=auto to choose by device without this warning.")
    elif asked == "varlen" and no_flash:
        yield error("attention", f"model.attention = {asked}: {no_flash}.", "Use model.attention=sdpa, or auto.")
    elif asked == "flex_attention" and not gpus:
        text = "model.attention = flex_attention: torch has no backward pass for it on a CPU; it needs a GPU."
        yield error("attention", text, "Use model.attention=sdpa, or auto.")
    else:
        others = ["sdpa", "eager"]
        others += ["flex_attention"] if gpus else []
        others += [] if no_flash else ["varlen"]
        others += ["flash_attention_2"] if installed and not no_flash else []
        left = [name for name in others if name != chosen.split()[0]]
        lacking = f"; no flash kernels: {no_flash}" if no_flash and gpus else ""
        why = " if the model supports it" if asked == "auto" else ", as requested"
        yield ok("attention", f"{chosen}{why}; also available: {', '.join(left)}{lacking}")


def _lowest(gpus: Sequence[Gpu]) -> tuple[int, int] | None:
    return min((gpu.capability for gpu in gpus), default=None)


def _no_flash(gpus: Sequence[Gpu], precision: ResolvedPrecision) -> str | None:
    """Why flash kernels cannot run."""
    if not gpus:
        return "flash kernels need a GPU, and this run uses the CPU"
    old = [gpu for gpu in gpus if gpu.capability < FLASH]
    if old:
        generation = _GENERATIONS.get(old[0].capability, "")
        found = ".".join(map(str, old[0].capability))
        name = f"{old[0].name} ({generation})" if generation else old[0].name
        return f"{name} has compute capability {found}, flash kernels need 8.0"
    if precision.compute.itemsize > 2:
        return f"flash kernels compute in bf16 or fp16, precision is {precision.word}"
    return None


def compiler(recipe: Recipe, machine: Machine, *, on_gpu: bool) -> Iterator[Finding]:
    """torch.compile needs a C++ compiler on the machine, and Triton on a GPU."""
    compiled = recipe.sharding.compile if recipe.sharding.compile is not None else on_gpu
    optimizer = recipe.optimizer.kind() if recipe.optimizer.compiles else None
    if not compiled and optimizer is None:
        return
    who = "sharding.compile" if compiled else f"optimizer.kind = {optimizer}"
    off = " with ".join(
        (["sharding.compile=false"] if compiled else []) + (["optimizer.kind=adamw"] if optimizer else [])
    )
    missing = []
    if machine.compiler is None:
        missing.append(("a C++ compiler", "Install one: apt install g++, or conda install gxx"))
    if on_gpu and "triton" not in machine.packages:
        missing.append(("the package triton", "Install it with: pip install triton"))
    for what, remedy in missing:
        yield error("compiler", f"{who} needs {what}, which is not installed.", f"{remedy}; or turn it off: {off}.")
    if not missing:
        yield ok("compiler", f"{machine.compiler}{' and Triton' if on_gpu else ''}, for {who}")
