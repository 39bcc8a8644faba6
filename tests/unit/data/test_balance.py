"""Balanced batches: every row once per epoch whatever the number of ranks, little padding, media spread evenly."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fullshard.contracts.data import Collator, Quantity
from fullshard.data.loader import Loader
from fullshard.families.language.encoders.text import Text
from fullshard.multimodal.balance import Balance, chosen, described

LENGTHS = np.random.default_rng(0).integers(2, 40, 101)
IMAGES = np.random.default_rng(1).integers(0, 3, 101) * (np.arange(101) < 50)
"""The first half of the data has images."""
GLOBAL = 16


def balance(world: int, *, per_device: int = 2, fixed: int | None = None) -> Balance:
    return Balance(LENGTHS, {"images": IMAGES}, IMAGES > 0, fixed, per_device, world)


def loader(world: int, rank: int = 0, *, choice: str, per_device: int = 2, shuffle: bool = True) -> Loader:
    samples = [
        {"input_ids": np.arange(n, dtype=np.int32), "labels": np.arange(n, dtype=np.int32)} for n in LENGTHS.tolist()
    ]
    found = balance(world, per_device=per_device)
    settings: dict[str, Any] = {"numbers": found.numbers, **({"even": found.even} if choice != "none" else {})}
    if choice == "steps":
        settings["spread"] = found.spread
    sizes = {"per_device": per_device, "global_size": GLOBAL, "rank": rank, "world": world}
    return Loader(samples, Collator(Text()), seed=3, shuffle=shuffle, **sizes, **settings)


@pytest.mark.parametrize("choice", ["none", "batches", "steps"])
def test_a_step_has_the_same_rows_on_any_number_of_ranks(choice: str) -> None:
    steps = [sorted(loader(1, choice=choice).rows(step)[1].tolist()) for step in range(14)]
    assert sorted(sum(steps[:7], [])) == sorted(sum(steps[7:], [])) == list(range(101))
    assert steps[:7] != steps[7:]
    for world in (2, 4):
        assert steps == [sorted(loader(world, choice=choice).rows(step)[1].tolist()) for step in range(14)]
    plain = [sorted(loader(1, choice="none").rows(step)[1].tolist()) for step in range(14)]
    assert (steps == plain) == (choice != "steps")


@pytest.mark.parametrize("shuffle", [True, False])
def test_all_steps_have_the_same_share_of_rows_with_images(shuffle: bool) -> None:
    share = (IMAGES > 0).mean()
    spread, plain = (loader(2, choice=choice, shuffle=shuffle) for choice in ("steps", "none"))
    counts = [int((IMAGES[spread.rows(step)[1]] > 0).sum()) for step in range(6)]
    assert all(abs(count - share * GLOBAL) < 1.5 for count in counts)
    if not shuffle:
        assert any(abs((IMAGES[plain.rows(step)[1]] > 0).sum() - share * GLOBAL) > 4 for step in range(6))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_logged_padding_is_that_of_the_batches_of_all_ranks(world: int) -> None:
    padding = {}
    for choice in ("none", "batches"):
        windows = [loader(world, rank, choice=choice).windows() for rank in range(world)]
        shares = []
        for _ in range(7):
            step = [next(window) for window in windows]
            places = sum(batch["input_ids"].numel() for window in step for batch in window.batches)
            rows = [i for window in step for i in window.sample_ids()]
            assert step[0].numbers["padding"] == pytest.approx(1 - LENGTHS[rows].sum() / places)
            micro_batches = sum(len(window.batches) for window in step)
            assert step[0].numbers["images_per_micro_batch"] == pytest.approx(IMAGES[rows].sum() / micro_batches)
            shares.append(step[0].numbers["padding"])
        padding[choice] = np.mean(shares)
    assert padding["batches"] < 0.7 * padding["none"]


def test_ranks_get_about_as_many_images() -> None:
    images = np.arange(16)
    rows = Balance(np.ones(16), {"images": images}, images > 0, None, 4, 4).even(np.arange(16))
    assert images[rows].reshape(4, 4).sum(0).tolist() == [30] * 4


def test_packed_rows_are_as_long_as_they_are() -> None:
    assert balance(1, fixed=64).numbers(np.arange(4))["padding"] == pytest.approx(1 - LENGTHS[:4].sum() / 256)


@pytest.mark.parametrize("media", [True, False])
@pytest.mark.parametrize("choice", [None, "none", "batches", "steps"])
def test_the_header_says_how_rows_are_balanced(choice: str | None, media: bool) -> None:
    tokens = Quantity("tokens", "tok", LENGTHS)
    quantities = (
        [tokens, Quantity("images", "img", IMAGES), Quantity("image_tokens", "", IMAGES)] if media else [tokens]
    )
    collator = SimpleNamespace(media_feature="images" if media else None)
    data: Any = SimpleNamespace(quantities=quantities, collator=collator, train=SimpleNamespace(fixed_length=None))
    said = dict(described(choice, data)).get("balance", "none")
    in_force = choice or ("batches" if media else "none")
    assert chosen(choice, data) == in_force
    assert said.partition(":")[0] == in_force
    assert said.count("images") == {"none": 0, "batches": 1, "steps": 2}[in_force] * media
