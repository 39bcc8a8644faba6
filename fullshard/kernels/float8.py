"""Matrix products in float8, by torchao: `precision: float8`.

The linear layers of blocks round both factors of each product to 8 bits, with one scale per tensor: forward, and both
products of the backward pass. Stored weights, gradients and everything else are as in bf16. Only training steps round:
validation, proofs and generation compute in bf16, as the exported model will. Must not know models, ranks or recipes.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from fullshard.errors import RecipeError, SetupError, missing_package

if TYPE_CHECKING:
    import torch
    from torch import nn

SPELLINGS = {
    "float8": ("float8", "fp8"),
    "float8-gather": ("float8-gather", "fp8-gather"),
    "float8-emulated": ("float8-emulated",),
    "float8-gather-emulated": ("float8-gather-emulated",),
}
"""gather: ranks also send each other the weights of these layers in float8. emulated: products of rounded factors in
fp32, on any device and slowly; for tests."""
CAPABILITY = (8, 9)
"""The compute capability with float8 products: Ada and Hopper."""
EXTRA = "float8"


@dataclass(frozen=True)
class Float8:
    """How the products of a model's blocks are computed in float8."""

    gathered: bool
    emulated: bool

    @classmethod
    def of(cls, word: str) -> Float8 | None:
        """For a word of `precision`; None without float8."""
        return cls("gather" in word, "emulated" in word) if word in SPELLINGS else None

    def convert(self, module: nn.Module, blocks: Collection[str], exact: Collection[str]) -> None:
        """Converts the linear layers that `choose` takes, in place. Names, parameters and their dtypes stay."""
        chosen, _ = choose(module, blocks, exact, emulated=self.emulated)
        try:
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        except ImportError as error:
            raise missing_package("torchao", extra=EXTRA, needed_by="precision = float8") from error
        # Padded: the number of tokens is the inner dimension of a weight's gradient, and need not divide by 16.
        config = Float8LinearConfig(
            enable_fsdp_float8_all_gather=self.gathered, emulate=self.emulated, pad_inner_dim=True
        )
        convert_to_float8_training(module, config=config, module_filter_fn=lambda _, name: name in chosen)
        for name in chosen:
            module.get_submodule(name).__class__ = _rounds_in_training()

    def describe(self, module: nn.Module, blocks: Collection[str], exact: Collection[str]) -> str:
        """For the header: which layers, and which are left out."""
        chosen, left_out = choose(module, blocks, exact, emulated=self.emulated)
        how = "emulated in fp32 and slow, for tests" if self.emulated else "torchao, one scale per tensor"
        sent = "; gathered in float8" if self.gathered else ""
        rest = f"; in bf16: {', '.join(left_out)}" if left_out else ""
        return f"{_names(chosen)} ({how}{sent}; training steps only){rest}"


def require(word: str, *, capability: tuple[int, int] | None, name: str) -> None:
    """Raises unless a GPU of this compute capability (None: a CPU) has float8 products, or they are emulated."""
    asked = Float8.of(word)
    if asked is None or asked.emulated or (capability is not None and capability >= CAPABILITY):
        return
    has = "is no GPU" if capability is None else f"has compute capability {'.'.join(map(str, capability))}"
    raise SetupError(
        f"precision = {word}: {name} {has}, and float8 needs 8.9 (Ada, Hopper or newer). Use precision: bf16 or auto."
    )


def packages(word: str) -> Mapping[str, str]:
    """What a word of `precision` needs, with the name to install it by."""
    return {"torchao": f"fullshard[{EXTRA}]"} if word in SPELLINGS else {}


def without(word: str) -> str:
    """The precision for reading a trained model: float8 is for training steps only, and needs its own hardware."""
    return "bf16" if word in SPELLINGS else word


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A stored parameter without the class that gathers it in float8: the same memory. Checkpoints hold this one, so
    that reading them needs no torchao."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor) or not hasattr(mine := tensor.to_local(), "fsdp_pre_all_gather"):
        return tensor
    sizes: dict[str, Any] = {"shape": tensor.shape, "stride": tensor.stride()}
    return DTensor.from_local(cast(Any, mine)._tensor, tensor.device_mesh, tensor.placements, run_check=False, **sizes)


def choose(
    module: nn.Module, blocks: Collection[str], exact: Collection[str], *, emulated: bool
) -> tuple[list[str], list[str]]:
    """Names of the linear layers in blocks that float8 pays for; and what is left out, named with the reason."""
    from torch import nn

    uses = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    chosen, left_out = [], []
    for name, layer in module.named_modules():
        if not isinstance(layer, nn.Linear):
            continue
        if not _within(name, blocks):
            left_out.append((name, "not in a block"))
        elif _within(name, exact):
            left_out.append((name, "fp32"))
        elif ".lora_" in name:
            left_out.append((name, "adapter"))
        elif uses[id(layer.weight)] > 1:
            left_out.append((name, "tied"))
        elif reason := _too_small(layer, emulated=emulated):
            left_out.append((name, reason))
        elif type(layer) is nn.Linear or hasattr(layer, "linear_mm_config"):  # or converted already
            chosen.append(name)
        else:
            left_out.append((name, type(layer).__name__))
    if not chosen:
        raise RecipeError(
            "precision = float8: no linear layer in the model's blocks is large enough to gain from it: its sizes must "
            "divide by 16, and its input be larger than 4,096 or its output larger than 1,024. Use precision: bf16."
        )
    kinds = Counter((_short(name), reason) for name, reason in left_out)
    return chosen, [f"{_times(count, name)} ({reason})" for (name, reason), count in kinds.items()]


def _too_small(layer: nn.Linear, *, emulated: bool) -> str | None:
    if layer.in_features % 16 or layer.out_features % 16:
        return "sizes do not divide by 16"
    # torchao's own limit for one scale per tensor, measured on an H100. Emulation is for small models.
    small = layer.in_features <= 4096 and layer.out_features <= 1024
    return "small" if small and not emulated else None


@functools.cache
def _rounds_in_training() -> type[nn.Module]:
    from torch.nn import functional
    from torchao.float8.float8_linear import Float8Linear
    from torchao.float8.float8_training_tensor import Float8TrainingTensor

    class Float8InTraining(Float8Linear):  # type: ignore[misc]
        """Rounds its factors in training only. A scale is that of the whole tensor, so rounded outputs would depend on
        which samples share a batch, and no proof about what a position sees could hold."""

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            if self.training:
                return super().forward(input)  # type: ignore[no-any-return]
            weight: Any = self.weight
            if isinstance(weight, Float8TrainingTensor):  # as gathered
                weight = weight.to_original_precision()
            return functional.linear(input, weight, self.bias)

    return Float8InTraining


def _within(name: str, units: Collection[str]) -> bool:
    return any(name.startswith(f"{unit}.") or name == unit for unit in units)


def _names(names: Collection[str]) -> str:
    kinds = Counter(_short(name) for name in names)
    return ", ".join(_times(count, name) for name, count in kinds.items())


def _short(name: str) -> str:
    """The last word of a layer's name; of an adapter, that of the layer that it adapts."""
    words = [word for word in name.split(".") if word != "base_layer"]
    adapter = next((place for place, word in enumerate(words) if word.startswith("lora_")), None)
    return words[adapter] if adapter is not None else words[-1]


def _times(count: int, name: str) -> str:
    return f"{count} x {name}" if count > 1 else name
