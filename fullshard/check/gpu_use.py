"""How busy the GPUs of this node are: the share of time in which they ran kernels, as NVIDIA's own counters say.

Needs the package nvidia-ml-py. Without it, on a CPU, or where a GPU does not count, nothing is measured.
Must not know where the numbers go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fullshard.contracts.world import World


class GpuUse:
    """The counters of some GPUs, by UUID; each reading covers the time since the last one."""

    def __init__(self, library: Any, uuids: Sequence[str]) -> None:
        library.nvmlInit()
        self._library = library
        self._gpus = [library.nvmlDeviceGetHandleByUUID(uuid.encode()) for uuid in uuids]
        self._read_until = [0] * len(uuids)
        self.read()  # what ran before does not count

    def read(self) -> dict[str, float]:
        """The mean over the GPUs, and the least busy of several; empty if nothing was counted."""
        shares = [share for index in range(len(self._gpus)) if (share := self._share(index)) is not None]
        lowest = {"gpu_utilisation_min": min(shares)} if len(shares) > 1 else {}
        return {"gpu_utilisation": round(sum(shares) / len(shares), 4), **lowest} if shares else {}

    def _share(self, index: int) -> float | None:
        library, gpu = self._library, self._gpus[index]
        try:
            _, samples = library.nvmlDeviceGetSamples(
                gpu, library.NVML_GPU_UTILIZATION_SAMPLES, self._read_until[index]
            )
        except library.NVMLError:  # nothing new, or a part of a GPU, which has no counter
            return None
        values = [sample.sampleValue.uiVal for sample in samples if sample.timeStamp > self._read_until[index]]
        self._read_until[index] = max([self._read_until[index], *(sample.timeStamp for sample in samples)])
        return sum(values) / len(values) / 100 if values else None


def gpu_use(world: World) -> Callable[[], dict[str, float]]:
    """Reads the GPUs of the node that rank 0 is on; elsewhere, and where they cannot be read, a reading is empty."""
    if not world.is_main or world.device.type != "cuda":
        return dict
    visible = range(min(world.local_size, torch.cuda.device_count()))
    try:
        import pynvml

        return GpuUse(pynvml, [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in visible]).read
    except Exception:  # no package, no driver, no permission: no run depends on it
        return dict
