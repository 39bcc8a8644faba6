"""Keyed random numbers: they are as good as random, and they follow from the key alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from scipy import stats
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard.families.diffusion import keyed_noise
from fullshard.families.diffusion.keyed_noise import FLIP, LABEL_DROP, NOISE, TIME, normal, uniform

LATENTS = (4, 32, 32)
LIKELY = 1e-3
"""Numbers are fixed, so a test that passes once passes always; a p-value below this would be bad luck or a fault."""


def test_the_hash_is_splitmix64() -> None:
    """Its published first outputs from the seed 1234567."""
    found = keyed_noise._mixed(torch.tensor(1234567) + torch.arange(1, 4) * keyed_noise.GOLDEN)
    assert [value % 2**64 for value in found.tolist()] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@pytest.mark.parametrize(
    "draws",
    [
        torch.arange(200_000),
        torch.arange(-100_000, 100_000),
        torch.arange(200_000) << 40,
        torch.arange(200_000) * keyed_noise.GOLDEN,
        torch.randint(-(2**63), 2**63 - 1, (200_000,), generator=torch.Generator().manual_seed(0)),
    ],
    ids=["counted", "around zero", "high bits only", "steps of the generator", "random"],
)
def test_uniform_is_uniform_whatever_the_draws_are(draws: torch.Tensor) -> None:
    for stream in (TIME, NOISE, LABEL_DROP, FLIP):
        found = uniform(draws, stream)
        assert found.dtype == torch.float32
        assert found.shape == draws.shape
        assert 0 < found.min() < 1e-4
        assert 1 - 1e-4 < found.max() < 1
        assert stats.kstest(found.double().numpy(), "uniform").pvalue > LIKELY


def test_normal_is_normal() -> None:
    found = normal(torch.arange(256), LATENTS, NOISE)
    assert found.dtype == torch.float32
    assert found.shape == (256, *LATENTS)
    flat = found.flatten().double()
    size = len(flat)
    assert abs(flat.mean()) < 4 / size**0.5
    assert abs(flat.var() - 1) < 4 * (2 / size) ** 0.5
    assert abs(flat.pow(3).mean()) < 4 * (15 / size) ** 0.5
    assert abs(flat.pow(4).mean() - 3) < 4 * (96 / size) ** 0.5
    assert stats.kstest(flat.numpy(), "norm").pvalue > LIKELY
    beyond = int((flat.abs() > 4).sum())
    assert stats.binomtest(beyond, size, 2 * stats.norm.sf(4)).pvalue > LIKELY


def test_each_element_is_normal_over_the_draws() -> None:
    """Not only all of them together: each place, in both halves that a hash gives."""
    found = normal(torch.arange(20_000), (7,), TIME)
    for element in range(7):
        assert stats.kstest(found[:, element].double().numpy(), "norm").pvalue > LIKELY


def test_draws_streams_and_elements_are_independent() -> None:
    draws = torch.arange(4096)
    noise = normal(draws, (64,), NOISE)
    pairs = {
        "neighbouring draws": (noise[1:], noise[:-1]),
        "neighbouring elements": (noise[:, 1:], noise[:, :-1]),
        "halves of a hash": (noise[:, :32], noise[:, 32:]),
        "a draw and an element": (noise[1:, :-1], noise[:-1, 1:]),
        "time and noise": (noise, normal(draws, (64,), TIME)),
        "time and label drop": (uniform(draws, TIME) - 0.5, uniform(draws, LABEL_DROP) - 0.5),
        "uniform and normal of a stream": (uniform(draws, NOISE)[:, None] - 0.5, noise),
    }
    for name, (one, other) in pairs.items():
        for power in (1, 2):  # of squares too: numbers of one size would show
            left, right = torch.broadcast_tensors(one.double() ** power, other.double() ** power)
            apart = (left - left.mean()) * (right - right.mean())
            found = float(apart.mean() / (left.std() * right.std()))
            assert abs(found) < 4.5 / min(one.numel(), other.numel()) ** 0.5, (name, power, found)


def test_no_two_keys_draw_the_same() -> None:
    draws = torch.cat([torch.arange(50_000), torch.arange(50_000) * keyed_noise.GOLDEN, -torch.arange(1, 50_000)])
    keys = torch.cat([keyed_noise._keys(draws.unique(), stream) for stream in range(4)])
    assert len(keys.unique()) == len(keys)


@pytest.mark.parametrize("size", [1, 3, 16, 31])
def test_a_split_batch_draws_what_the_whole_one_does(size: int) -> None:
    draws = torch.arange(37) * 7919
    shape = (3, 5, 5)
    whole, times = normal(draws, shape, NOISE), uniform(draws, TIME)
    assert torch.equal(torch.cat([normal(part, shape, NOISE) for part in draws.split(size)]), whole)
    assert torch.equal(torch.cat([uniform(part, TIME) for part in draws.split(size)]), times)
    shuffled = torch.randperm(37, generator=torch.Generator().manual_seed(size))
    assert torch.equal(normal(draws[shuffled], shape, NOISE), whole[shuffled])


def test_neither_torchs_generator_nor_the_draws_are_touched() -> None:
    draws, before = torch.arange(8), torch.get_rng_state()
    first = normal(draws, LATENTS, NOISE)
    torch.manual_seed(1)
    assert torch.equal(normal(draws, LATENTS, NOISE), first)
    uniform(draws, TIME)
    assert torch.equal(draws, torch.arange(8))
    torch.set_rng_state(before)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3, 5), (0,)])
def test_any_shape(shape: tuple[int, ...]) -> None:
    assert normal(torch.arange(5), shape, TIME).shape == (5, *shape)
    assert normal(torch.arange(0), shape, TIME).shape == (0, *shape)


def test_extreme_bits_stay_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """All bits zero or all one: no logarithm of nothing, and no uniform number that is rounded to 1."""
    bits = torch.tensor([0, -1])
    monkeypatch.setattr(keyed_noise, "_keys", lambda draws, stream: draws)
    assert 0 < uniform(bits, TIME)[0] < 1e-6
    assert 1 - 1e-6 < uniform(bits, TIME)[1] < 1
    monkeypatch.setattr(keyed_noise, "_mixed", lambda state: state)
    found = normal(bits - keyed_noise.GOLDEN, (2,), NOISE)
    assert found.isfinite().all()
    assert 7 < found.abs().max() < 8


def test_the_cost_is_a_few_operations_for_the_whole_batch() -> None:
    class Counted(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += 1
            return func(*args, **(kwargs or {}))

    found = []
    for samples, shape in itertools.product((1, 256), ((2,), LATENTS)):
        with Counted() as counted:
            normal(torch.arange(samples), shape, NOISE)
        found.append(counted.calls)
    assert len(set(found)) == 1
    assert found[0] < 80
