from __future__ import annotations

import json

import pytest

from fullshard.log.meters import Meters
from fullshard.profile.mfu import Mfu, peak_flops


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def run_steps(
    meters: Meters,
    clock: Clock,
    count: int,
    *,
    data: float = 0.25,
    compute: float = 0.75,
    quantities: dict[str, float] | None = None,
) -> None:
    for _ in range(count):
        with meters.phase("data"):
            clock.now += data
        with meters.phase("compute"):
            clock.now += compute
        meters.step(samples=8, tokens=1000, quantities=quantities or {"tokens": 1000})


def test_memory_is_the_peak_so_far_of_the_device_and_of_the_host() -> None:
    meters = Meters(clock=Clock())
    held = [(3, 20), (4, 52), (4, 22)]
    records = [
        meters.record(step=1, epoch=0, loss=1, lr=1, memory_bytes={"memory": gpu * 2**30, "host_memory": host * 2**30})
        for gpu, host in held
    ]
    assert [(r["memory_gib"], r["host_memory_gib"]) for r in records] == [(3.0, 20.0), (4.0, 52.0), (4.0, 52.0)]


def test_a_record_states_totals_of_the_run_and_rates_of_the_window() -> None:
    clock = Clock()
    meters = Meters(mfu=Mfu({"tokens": 6e9}, 1e13, 2, "H"), clock=clock)
    run_steps(meters, clock, 1)
    run_steps(meters, clock, 4)
    first = meters.record(
        step=5, epoch=0.5, loss=2.0, lr=1e-4, grad_norm=1.5, memory_bytes={"memory": 3 * 2**30}, accuracy=0.5
    )
    assert first == {
        "kind": "train",
        "step": 5,
        "epoch": 0.5,
        "loss": 2.0,
        "lr": 1e-4,
        "grad_norm": 1.5,
        "accuracy": 0.5,
        "samples": 40,
        "tokens": 5000,
        "seconds": 5.0,
        "tokens_per_second": 1000.0,
        # 1000 tokens/s x 6e9 flops/token over two devices of 1e13 flops/s
        "mfu": 0.3,
        "data_wait": 0.25,
        "memory_gib": 3.0,
        "time": {"data": 1.0, "compute": 3.0},
    }
    run_steps(meters, clock, 2, data=0.0, compute=0.5)
    second = meters.record(step=7, epoch=0.7, loss=1.0, lr=1e-4)
    assert second["tokens"] == 7000
    assert second["seconds"] == 6.0
    assert second["tokens_per_second"] == 2000.0
    assert second["data_wait"] == 0.0
    assert "grad_norm" not in second
    assert json.loads(json.dumps(second)) == second


def test_each_quantity_has_its_own_rate() -> None:
    clock = Clock()
    meters = Meters(mfu=Mfu({"images": 5e9}, 1e13, 1, "H"), warmup=0, clock=clock)
    run_steps(meters, clock, 4, quantities={"images": 1000, "seconds_of_audio": 2.5})
    record = meters.record(step=4, epoch=1, loss=1.0, lr=1e-4)
    assert record["images_per_second"] == 1000.0
    assert record["seconds_of_audio_per_second"] == 2.5
    assert record["mfu"] == 0.5, "by the first of them"
    assert "tokens_per_second" not in record
    run_steps(meters, clock, 1, quantities={"images": 10, "seconds_of_audio": 0.0})
    assert meters.record(step=5, epoch=1, loss=1.0, lr=1e-4)["seconds_of_audio_per_second"] == 0.0


def test_mfu_includes_the_flops_of_images() -> None:
    clock = Clock()
    mfu = Mfu({"tokens": 2e9, "image_tokens": 3e9}, 1e13, 2, "H")
    meters = Meters(mfu=mfu, warmup=0, clock=clock)
    run_steps(meters, clock, 4, quantities={"tokens": 1000, "image_tokens": 500})
    assert meters.record(step=4, epoch=1, loss=1.0, lr=1e-4)["mfu"] == (1000 * 2e9 + 500 * 3e9) / 2e13


def test_warm_up_never_enters_a_rate() -> None:
    clock = Clock()
    meters = Meters(warmup=2, clock=clock)
    run_steps(meters, clock, 1, compute=60.0)
    only_warm_up = meters.record(step=1, epoch=0.1, loss=1.0, lr=1e-4)
    assert not {"tokens_per_second", "data_wait", "mfu"} & set(only_warm_up)
    run_steps(meters, clock, 1, compute=30.0)
    run_steps(meters, clock, 2)
    assert meters.record(step=4, epoch=0.4, loss=1.0, lr=1e-4)["tokens_per_second"] == 1000.0


def test_pauses_count_for_the_run_but_not_for_the_rate() -> None:
    clock = Clock()
    meters = Meters(warmup=0, clock=clock)
    run_steps(meters, clock, 4)
    for phase in ("evaluate", "save"):
        with meters.phase(phase):
            clock.now += 10.0
    record = meters.record(step=4, epoch=1, loss=1.0, lr=1e-4)
    assert record["tokens_per_second"] == 1000.0
    assert record["seconds"] == 24.0
    assert record["time"] == {"data": 1.0, "compute": 3.0, "evaluate": 10.0, "save": 10.0}
    assert meters.totals["save"] == 10.0


def test_time_outside_every_phase_still_lowers_the_rate() -> None:
    clock = Clock()
    meters = Meters(warmup=0, clock=clock)
    run_steps(meters, clock, 1)
    clock.now += 1.0
    assert meters.record(step=1, epoch=1, loss=1.0, lr=1e-4)["tokens_per_second"] == 500.0


def test_no_mfu_is_claimed_without_a_peak() -> None:
    clock = Clock()
    meters = Meters(mfu=Mfu({"tokens": 6e9}, None, 1, "CPU"), warmup=0, clock=clock)
    run_steps(meters, clock, 2)
    assert "mfu" not in meters.record(step=2, epoch=1, loss=1.0, lr=1e-4)


def test_a_resumed_run_continues_its_counts() -> None:
    clock = Clock()
    meters = Meters(samples=800, tokens=100_000, seconds=500.0, clock=clock)
    run_steps(meters, clock, 2)
    record = meters.record(step=102, epoch=1, loss=1.0, lr=1e-4)
    assert (record["samples"], record["tokens"], record["seconds"]) == (816, 102_000, 502.0)


def test_an_unknown_phase_is_a_bug() -> None:
    with pytest.raises(KeyError):
        Meters().add("sleep", 1.0)


def test_waiting_for_data_is_reported_from_time_to_time() -> None:
    clock = Clock()
    meters = Meters(warmup=0, clock=clock)
    said = []
    for window in range(6):
        run_steps(meters, clock, 10)
        meters.record(step=window, epoch=1, loss=1.0, lr=1e-4)
        said.append(meters.advice(workers=2, every=3))
    assert [bool(text) for text in said] == [True, False, False, True, False, False]
    assert said[0] is not None
    assert said[0].startswith("25% of the step time is spent waiting for data, more than 5%")
    assert "data.workers (now 2)" in said[0]


def test_advice_needs_enough_steps() -> None:
    clock = Clock()
    meters = Meters(warmup=1, clock=clock)
    said = []
    for step in range(24):
        run_steps(meters, clock, 1, data=1.0 if step < 13 else 0.0)
        meters.record(step=step, epoch=1, loss=1.0, lr=1e-4)
        said.append(meters.advice(every=1))
    # The warm-up step and nine more say nothing; the tenth speaks for all ten, and the next ten for themselves.
    assert [step for step, text in enumerate(said) if text] == [10, 20]
    assert str(said[10]).startswith("57.1% of the step time")
    # Two of its ten steps waited.
    assert str(said[20]).startswith(f"{100 * 2 / (2 * 1.75 + 8 * 0.75):.3g}% of")


@pytest.mark.parametrize(("wait", "said"), [(0.05, None), (0.0504, None), (0.0506, "5.1% "), (0.06, "6% ")])
def test_advice_starts_above_five_percent(wait: float, said: str | None) -> None:
    clock = Clock()
    clock.now = 0.0
    meters = Meters(warmup=0, clock=clock)
    meters.add("data", wait * 100)
    clock.now = 100.0
    for _ in range(10):
        meters.step(samples=1, tokens=1, quantities={"tokens": 1})
    meters.record(step=10, epoch=1, loss=1.0, lr=1e-4)
    advice = meters.advice()
    assert advice is None if said is None else str(advice).startswith(said)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("Tesla V100-SXM2-16GB", 125e12),
        ("Tesla T4", 65e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA GeForce GTX 1080", None),
        ("cpu", None),
        ("", None),
    ],
)
def test_peaks_by_device_name(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak
