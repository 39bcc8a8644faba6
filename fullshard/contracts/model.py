"""The contract of a model family: how a model is built, where its values come from, how it is written out.

A family builds plain single-device modules. Must not know objectives, ranks or torch.distributed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from fullshard.config.part import Part, kinds
from fullshard.contracts.optimizer import Group

if TYPE_CHECKING:
    import torch
    from torch import nn


class Weights(Protocol):
    """Stored tensors by parameter name, readable in part, so that a rank reads only its own rows."""

    def names(self) -> set[str]:
        """The parameters and buffers that are stored."""

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows `start` to `stop` (of dim 0) of one tensor, on the CPU, in its stored dtype; all of a 0-d tensor."""


@dataclass(frozen=True)
class Continuation:
    """How to continue a text."""

    tokens: int
    """The most tokens to add."""
    temperature: float
    """0: always the most likely token."""
    top_p: float
    """With a temperature: sample from the most likely tokens that together have this probability."""
    seed: int
    ends: frozenset[int]
    """Tokens that end a text."""
    plain: bool = False
    """Without settings stored beside the weights, such as a penalty on repetition."""


class Family(Part):
    """A family of models."""

    folder: ClassVar[str] = "fullshard.models"
    default_kind: ClassVar[str | None] = "hf"
    required: ClassVar[tuple[str, ...]] = ("build",)
    loader: ClassVar[str | None] = None
    """What loads an exported folder: `package.Class.from_pretrained`."""
    adapter_loader: ClassVar[str | None] = None
    """The same for exported adapters, if it differs."""
    never_trained: ClassVar[tuple[str, ...]] = ()
    """Name patterns of parameters that no objective uses: frozen, and left out of checkpoints."""
    forward_methods: ClassVar[tuple[str, ...]] = ()
    """Methods of the module, besides `forward`, that an objective calls."""
    usual: ClassVar[dict[str, Any] | None] = None
    """The objective and evaluations for evaluating one of its models without a recipe; None: it needs a recipe."""

    @classmethod
    def recognises(cls, folder: Path) -> bool:
        """Whether the files in a folder are a model of this family and of no other."""
        return False

    @classmethod
    def from_short(cls, value: Any) -> Any:
        if isinstance(value, str) and value in kinds(cls) and not Path(value).exists():
            return {"kind": value}
        return {"path": value} if isinstance(value, str) else value

    @classmethod
    def with_base(cls, settings: dict[str, Any], base: str, *, is_checkpoint: bool) -> dict[str, Any] | None:
        """The settings with another base: a fullshard checkpoint or what `path` takes; None if they have no base."""
        return {**settings, "path": base} if "path" in settings and not is_checkpoint else None

    def with_processor(self, folder: Path) -> Self:
        """The same settings with the tokenizer or processor in `folder`, if the family takes one."""
        return self

    def without_noise(self, module: nn.Module, *, fp32: bool) -> Self:
        """The same settings without dropout and other noise; with `fp32` also without half-precision-only kernels."""
        return self

    def unpacked(self) -> Self:
        """The same settings without kernels that need packed rows."""
        return self

    def attention_kernel(self) -> str | None:
        """The attention kernel that the settings ask for, if any."""
        return None

    def compute_precision(self) -> str | None:
        """The precision it computes in, as in a recipe; None: that of the run."""
        return None

    def hub_names(self) -> dict[str, tuple[str, str | None]]:
        """Name and revision of each folder or hub repository that it reads, by recipe key."""
        return {}

    def prepare(self, texts: Iterable[str], *, cache: Path, fingerprint: str = "") -> None:
        """Fetches or makes what the model needs on disk (weights, a tokenizer trained on `texts`), once, before ranks
        meet. `fingerprint` is that of `texts`: the key by which `processor` finds what was made."""

    def processor(self, *, cache: Path, fingerprint: str = "") -> Any:
        """The tokenizer or processor of the model, if it has one."""
        return None

    def load_processor(self, folder: Path, *, where: str) -> Any:
        """The tokenizer or processor that was saved with a checkpoint in `folder`, if there is one."""
        return None

    def config_of(self, module: nn.Module) -> dict[str, Any]:
        """The library's own settings that the module was built from, if it keeps them."""
        return {}

    def problems(self, module: nn.Module) -> list[tuple[str, str]]:
        """What would stop the first forward pass, found without running it; each with what to do."""
        return []

    def embedding_rows(self, module: nn.Module) -> int | None:
        """Rows of the token embedding, if there is one."""
        return None

    def stored_rows(self) -> int | None:
        """Rows of the token embedding in the stored weights, if there are any."""
        return None

    def build(self, *, processor: Any) -> nn.Module:
        """The module with its edits (LoRA, frozen parts, resized embedding): parameters on meta, buffers real."""
        raise NotImplementedError

    def weights(self, module: nn.Module) -> Weights | None:
        """The stored values; None: the model starts from scratch."""
        return None

    def stored_in(self) -> Path | None:
        """The folder of safetensors files with the stored values; None: from scratch, or another format."""
        return None

    def initialise(self, unit: nn.Module, *, root: nn.Module) -> None:
        """Gives fresh values to the parameters of `unit`, a module of `root`; skips those on meta."""
        raise NotImplementedError

    def load_with(self, folder: str, *, adapter: bool) -> str | None:
        """The line of Python that loads an exported folder; None if only fullshard can load it."""
        loader = (self.adapter_loader if adapter else None) or self.loader
        return f"{loader}({folder!r})" if loader else None

    def groups(self, module: nn.Module) -> list[Group]:
        """Parameter groups that follow from its settings; those of optimizer.groups come first."""
        return []

    def resting(self, module: nn.Module) -> set[str]:
        """Names of parameters that only some samples need, such as a vision tower's: a step may not use them."""
        return set()

    def stop_tokens(self, module: nn.Module) -> set[int]:
        """Tokens that end a text, besides those of the tokenizer."""
        return set()

    @property
    def keeps_cache(self) -> bool:
        """Whether it generates with a key-value cache."""
        return type(self).continued is not Family.continued

    def continued(
        self,
        module: nn.Module,
        rows: Sequence[Sequence[int]],
        way: Continuation,
        *,
        device: torch.device,
        in_step: bool,
        media: Mapping[str, torch.Tensor],
    ) -> list[list[int]] | None:
        """The tokens after each row, generated with a key-value cache; None: the family has no cache, and
        the objective is asked for every token. `in_step`: other ranks call this too. `media`: inputs beside tokens."""
        return None

    def longest(self, module: nn.Module) -> int | None:
        """The longest sequence that the model has positions for; None: any."""
        return None

    def blocks(self, module: nn.Module) -> list[str] | None:
        """The modules that are sharded, recomputed and compiled one by one; None: found by structure."""
        return None

    def rehearse(self, module: nn.Module) -> None:
        """Runs a forward pass on meta, which shows the parts that are called from outside their block; may raise."""

    def storage_dtype(self, name: str, parameter: nn.Parameter) -> torch.dtype:
        """The dtype a parameter is stored in: fp32 for everything that is trained."""
        import torch

        return torch.float32

    def choose_kernels(self, module: nn.Module, *, device: str, compute: torch.dtype, packed: bool) -> str:
        """Makes the choices that depend on the device, such as the attention kernel; describes what was chosen."""
        return "the module's own"

    def flops_per_token(self, module: nn.Module, *, length: int) -> float:
        """Floating-point operations per token of one training step: 6·N + 6·L·d·s unless the family knows better."""
        return 6.0 * sum(p.numel() for p in module.parameters())

    def media_flops(self, module: nn.Module) -> dict[str, float]:
        """The same per unit of another quantity that the encoder counts: {"image_tokens": 3e9}."""
        return {}

    def adapters(self, module: nn.Module) -> set[str]:
        """The parameters of adapters; empty: the model itself is trained."""
        return set()

    def exports(self, module: nn.Module, name: str) -> bool:
        """Whether `export` needs this parameter; it does not need the frozen base of adapters."""
        return True

    def export(
        self, module: nn.Module, tensors: Iterator[tuple[str, torch.Tensor]], folder: Path, *, processor: Any
    ) -> None:
        """Writes whole tensors, one at a time, as a folder that the ecosystem's own loader reads.

        A family may take more keywords, which `fullshard export` passes on request: `dtype` (None: as stored),
        `shard_bytes` (at most, per file) and `merged` (add adapters to the weights; they come first)."""
        raise NotImplementedError
