"""The ranks of a run: the recipe's topology, and the contract of a launcher, which starts ranks and waits for them.

Must not know models, data or losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from fullshard.config.part import Part, Section, decode

STARTED_BY = "FULLSHARD_STARTED_BY"
"""The variable with the launcher's process id; a rank that has it ends when that process does."""


@dataclass(frozen=True)
class Restarts:
    """How often failed ranks are started again, and what decides whether fewer of them can continue."""

    most: int
    per_device: int | Literal["auto"]
    rows: int | None
    """Rows of a step over all ranks; None: as many as the ranks make."""


@dataclass(frozen=True)
class Ranks:
    """What to start: processes on this node, and where the nodes meet."""

    per_node: int
    nodes: int = 1
    node_rank: int = 0
    master: str | None = None
    """HOST:PORT; needed for more than one node."""
    device_ids: tuple[int, ...] | None = None
    """GPU ids, if not the first ones."""
    timeout_s: float = 600.0
    """How long the nodes wait for each other."""
    own_gpus: bool = False
    """Every rank needs a GPU of its own."""
    restarts: Restarts | None = None


class Launcher(Part):
    """Starts ranks."""

    folder: ClassVar[str] = "fullshard.launch"
    default_kind: ClassVar[str | None] = "local"
    required: ClassVar[tuple[str, ...]] = ("start",)

    def start(self, command: Sequence[str], ranks: Ranks) -> int:
        """Runs `command` once per rank with the torchrun variables set; returns the exit code of the run."""
        raise NotImplementedError


def _from_text(devices: Any) -> Any:
    """`2` is a count, `0,2` are ids."""
    if not isinstance(devices, str) or devices == "auto":
        return devices
    parts = [part.strip() for part in devices.split(",") if part.strip()]
    if not parts or not all(part.isdigit() for part in parts):
        raise ValueError(f"topology.devices = {devices!r} is not a count, a list of ids (0,2) or auto")
    return [int(part) for part in parts] if "," in devices else int(parts[0])


def _usable(devices: int | str | list[int]) -> int | str | list[int]:
    if devices == [] or (isinstance(devices, int) and devices < 1):
        raise ValueError("topology.devices must be at least 1")
    if isinstance(devices, list) and len(set(devices)) != len(devices):
        raise ValueError(f"topology.devices names a GPU twice: {devices}")
    return devices


Devices = Annotated[int | Literal["auto"] | list[int], BeforeValidator(_from_text), AfterValidator(_usable)]
"""Ranks per node: a count, GPU ids, or auto."""


class Topology(Section):
    """Which devices, on how many nodes."""

    device: Annotated[Literal["auto", "cuda", "cpu"], BeforeValidator(lambda v: "cuda" if v == "gpu" else v)] = "auto"
    """auto: CUDA if there is a GPU."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """auto: nccl for GPUs, gloo for a CPU. Over gloo several ranks may share one GPU."""
    devices: Devices = "auto"
    """Ranks per node: a count, a list of GPU ids, or auto (all GPUs; one process on a CPU)."""
    nodes: int = Field(1, ge=1)
    """Machines in the run."""
    timeout_s: float = Field(600.0, gt=0)
    """How long a rank waits for the others before the run stops."""
    restarts: int | None = Field(None, ge=0)
    """How often failed ranks start again from the newest checkpoint; null: as often as the engine says, or never."""
    launcher: Launcher = Field(default_factory=lambda: decode(Launcher, {}, where="topology.launcher"))
    """What starts the ranks."""
