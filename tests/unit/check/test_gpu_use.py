"""How busy GPUs are: read through an object with the functions of NVIDIA's library."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fullshard.check.gpu_use import GpuUse, gpu_use
from fullshard.contracts.world import World
from fullshard.log.bar import step_line


class Counters:
    """What nvidia-ml-py offers, for GPUs whose samples a test writes down: (time, percent)."""

    NVML_GPU_UTILIZATION_SAMPLES = 1

    class NVMLError(Exception):
        pass

    def __init__(self, **samples: list[tuple[int, int]]) -> None:
        self.samples = samples
        self.started = False

    def nvmlInit(self) -> None:
        self.started = True

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> str:
        if uuid.decode() not in self.samples:
            raise self.NVMLError("not found")
        return uuid.decode()

    def nvmlDeviceGetSamples(self, gpu: str, kind: int, after: int) -> tuple[int, list[Any]]:
        assert (self.started, kind) == (True, 1)
        new = [(time, share) for time, share in self.samples[gpu] if time > after]
        if not new:
            raise self.NVMLError("nothing new")
        return 1, [SimpleNamespace(timeStamp=time, sampleValue=SimpleNamespace(uiVal=share)) for time, share in new]


def test_a_reading_covers_the_time_since_the_last_one() -> None:
    library = Counters(a=[(1, 100)])
    use = GpuUse(library, ["a"])
    assert use.read() == {}, "what ran before the run does not count"
    library.samples["a"] += [(2, 50), (3, 100)]
    assert use.read() == {"gpu_utilisation": 0.75}
    assert use.read() == {}
    library.samples["a"] += [(4, 0)]
    assert use.read() == {"gpu_utilisation": 0.0}


def test_the_least_busy_of_several_is_named_too() -> None:
    library = Counters(a=[], b=[])
    use = GpuUse(library, ["a", "b"])
    library.samples.update(a=[(1, 90)], b=[(1, 10), (2, 20)])
    assert use.read() == {"gpu_utilisation": 0.525, "gpu_utilisation_min": 0.15}


def test_a_gpu_that_does_not_count_is_left_out() -> None:
    library = Counters(a=[], b=[])
    use = GpuUse(library, ["a", "b"])
    library.samples["a"] = [(1, 80)]
    assert use.read() == {"gpu_utilisation": 0.8}


def test_an_unknown_gpu_is_an_error_that_no_run_sees() -> None:
    with pytest.raises(Counters.NVMLError):
        GpuUse(Counters(), ["a"])


def test_a_cpu_has_no_reading() -> None:
    assert gpu_use(World(0, 1, 0, 1, torch.device("cpu"), "gloo"))() == {}


def test_the_log_line_shows_it_beside_memory_and_data_wait() -> None:
    record = {"step": 10, "loss": 2.0, "lr": 1e-4, "memory_gib": 3.5, "gpu_utilisation": 0.97, "data_wait": 0.01}
    assert "3.5 GiB   GPU 97%  data wait  1.0%" in step_line(record, None, {})
