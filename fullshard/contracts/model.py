"""The contract of a model family: how a model is built, where its values come from, how it is written out.

A family builds plain single-device modules. Must not know objectives, ranks or torch.distributed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, runtime_checkable

from fullshard.config.part import Part, kinds

if TYPE_CHECKING:
    import torch
    from torch import nn


class Weights(Protocol):
    """Stored tensors by parameter name, readable in part, so that a rank reads only its own rows."""

    def names(self) -> set[str]:
        """The module's parameter and buffer names that are stored."""
        ...

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows `start` to `stop` (of dim 0) of one tensor, on the CPU, in its stored dtype; a 0-d tensor is whole."""
        ...


@runtime_checkable
class TokenModel(Protocol):
    """A module that hands hidden states and its head to a loss, so that full logits never exist."""

    def hidden_states_and_head(self, reduce: Any, **inputs: Any) -> Any:
        """`reduce(hidden_states, head)`, called inside the forward pass."""
        ...


@dataclass(frozen=True)
class Continuation:
    """How a text is continued."""

    tokens: int
    """The most that are added."""
    temperature: float
    """0: always the most likely token."""
    top_p: float
    """With a temperature: only the most likely tokens that together have this share."""
    seed: int
    ends: frozenset[int]
    """Tokens that end a text."""


class Family(Part):
    """A family of models."""

    folder: ClassVar[str] = "fullshard.models"
    default_kind: ClassVar[str | None] = "hf"
    required: ClassVar[tuple[str, ...]] = ("build",)
    loader: ClassVar[str | None] = None
    """What reads an exported folder, as one would type it: `package.Class.from_pretrained`."""
    adapter_loader: ClassVar[str | None] = None
    """The same for exported adapters, where it is another."""
    never_trained: ClassVar[tuple[str, ...]] = ()
    """Patterns over names of parameters that no objective uses: frozen, and kept out of checkpoints."""
    forward_methods: ClassVar[tuple[str, ...]] = ()
    """Methods of the module, besides `forward`, that an objective calls."""

    usual: ClassVar[dict[str, Any] | None] = None
    """What a recipe needs beside model and data to evaluate one of its models by itself: objective and evaluations;
    None: only a run's recipe says that."""

    @classmethod
    def recognises(cls, folder: Path) -> bool:
        """Whether a folder holds a model of this family, and of no other, by the files in it."""
        return False

    @classmethod
    def from_short(cls, value: Any) -> Any:
        if isinstance(value, str) and value in kinds(cls) and not Path(value).exists():
            return {"kind": value}
        return {"path": value} if isinstance(value, str) else value

    @classmethod
    def with_base(cls, settings: dict[str, Any], base: str, *, is_checkpoint: bool) -> dict[str, Any] | None:
        """The settings with other weights to start from, a fullshard checkpoint or what `path` takes; None where they
        name none."""
        return {**settings, "path": base} if "path" in settings and not is_checkpoint else None

    def with_processor(self, folder: Path) -> Self:
        """The same family with the tokenizer or processor in `folder`; itself where it takes none."""
        return self

    def without_noise(self, module: nn.Module, *, fp32: bool) -> Self:
        """The same family without dropout and other random noise; with `fp32` also without kernels that compute in half
        precision only."""
        return self

    def unpacked(self) -> Self:
        """The same family without kernels that need packed rows."""
        return self

    def attention_kernel(self) -> str | None:
        """The attention kernel that the settings ask for; None where they choose none."""
        return None

    def compute_precision(self) -> str | None:
        """The precision that it computes in, as `precision` in a recipe; None: that of the run."""
        return None

    def hub_names(self) -> dict[str, tuple[str, str | None]]:
        """What is read from a folder or the hub: name and revision, by recipe key."""
        return {}

    def prepare(self, texts: Iterable[str], *, cache: Path, fingerprint: str = "") -> None:
        """Fetches or makes what the model needs on disk (weights, a tokenizer from `texts`), once, before ranks meet.

        `fingerprint` stands for the content of `texts`: what was made from them is found again by it."""

    def processor(self, *, cache: Path, fingerprint: str = "") -> Any:
        """The tokenizer or processor that goes with the model, or None; the same `fingerprint` as in `prepare`."""
        return None

    def load_processor(self, folder: Path, *, where: str) -> Any:
        """The tokenizer or processor that lies in a folder, as it was saved with a checkpoint; None without one."""
        return None

    def config_of(self, module: nn.Module) -> dict[str, Any]:
        """The settings that the module was built from, as its library keeps them; empty where it keeps none."""
        return {}

    def problems(self, module: nn.Module) -> list[tuple[str, str]]:
        """What would stop the first forward pass of a module, found without one; each with what to do."""
        return []

    def embedding_rows(self, module: nn.Module) -> int | None:
        """Rows of the token embedding; None where the model takes no tokens, or does not say."""
        return None

    def stored_rows(self) -> int | None:
        """Rows of the embedding in the stored weights; None without stored weights."""
        return None

    def build(self, *, processor: Any) -> nn.Module:
        """The module with its edits (LoRA, frozen parts, resized embedding): parameters on meta, buffers real."""
        raise NotImplementedError

    def weights(self, module: nn.Module) -> Weights | None:
        """Where stored values come from; None when the model starts from scratch."""
        return None

    def stored_in(self) -> Path | None:
        """The folder of safetensors files that stored values come from; None from scratch, or for another format."""
        return None

    def initialise(self, unit: nn.Module, *, root: nn.Module) -> None:
        """Gives the real parameters under one module of the tree below `root` fresh values; skips those on meta."""
        raise NotImplementedError

    def load_with(self, folder: str, *, adapter: bool) -> str | None:
        """The line of Python that reads what was exported; None for adapters on a base that only fullshard has, and
        where the family does not say what reads it."""
        loader = (self.adapter_loader if adapter else None) or self.loader
        return f"{loader}({folder!r})" if loader else None

    def stop_tokens(self, module: nn.Module) -> set[int]:
        """Tokens that end a text, beside the tokenizer's own."""
        return set()

    @property
    def keeps_cache(self) -> bool:
        """Whether `continued` keeps keys and values from one token to the next."""
        return type(self).continued is not Family.continued

    def continued(
        self,
        module: nn.Module,
        rows: Sequence[Sequence[int]],
        way: Continuation,
        *,
        device: torch.device,
        in_step: bool,
    ) -> list[list[int]] | None:
        """The tokens after each row, with keys and values kept from one to the next; None where the family has no such
        way, and the objective is asked for every token. `in_step`: other ranks call this, too."""
        return None

    def longest(self, module: nn.Module) -> int | None:
        """The longest sequence that the model has positions for; None: any."""
        return None

    def blocks(self, module: nn.Module) -> list[str] | None:
        """Names of the modules that are sharded, recomputed and compiled one by one; None: found by structure."""
        return None

    def rehearse(self, module: nn.Module) -> None:
        """Runs one forward pass of a module on the meta device, to see which of its parts call which; may raise. Where
        a family runs none, parts that are called from outside their block are not seen."""

    def storage_dtype(self, name: str, parameter: nn.Parameter) -> torch.dtype:
        """The dtype a parameter is kept in: fp32 for everything that is trained."""
        import torch

        return torch.float32

    def choose_kernels(self, module: nn.Module, *, device: str, compute: torch.dtype, packed: bool) -> str:
        """Last choices that depend on the device, such as the attention kernel; says in words what was chosen."""
        return "the module's own"

    def flops_per_token(self, module: nn.Module, *, length: int) -> float:
        """Floating-point operations per token of one training step: 6·N + 6·L·d·s unless the family knows better."""
        return 6.0 * sum(p.numel() for p in module.parameters())

    def adapters(self, module: nn.Module) -> set[str]:
        """Names of the parameters that belong to adapters; empty where the model itself is trained."""
        return set()

    def exports(self, module: nn.Module, name: str) -> bool:
        """Whether `export` needs this parameter: the frozen base under adapters it does not."""
        return True

    def export(
        self, module: nn.Module, tensors: Iterator[tuple[str, torch.Tensor]], folder: Path, *, processor: Any
    ) -> None:
        """Writes whole tensors, one at a time, as a folder that the ecosystem's own loader reads.

        A family may take more keywords, which `fullshard export` passes when they are asked for: `dtype` (None: the one
        that the weights were stored in), `shard_bytes` (the most bytes a file holds) and `merged` (adapters are added
        to the weights; they come first)."""
        raise NotImplementedError
