"""An encoder that counts two quantities: each window holds the sum of both over all ranks, however rows are packed."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from fullshard.contracts.data import Encoder, Features, Quantity, Record, Store
from fullshard.data.loader import Loader
from fullshard.data.prepare import Prepared, prepare
from fullshard.data.records import Listed
from fullshard.text.tokens import collate_tokens, sample, shifted

SECONDS = [0.5 * (number % 5) for number in range(23)]
"""Of each record; some have none."""
TOKENS = [2 + number % 7 for number in range(23)]


class Speech(Encoder):
    """Tokens, and seconds of audio that are not stored as a feature."""

    def encode(self, record: Record, processor: Any, *, length: int) -> list[Features]:
        ids = np.arange(record["tokens"], dtype=np.int32)
        return [sample(ids, shifted(ids))]

    def quantities(self, store: Store) -> list[Quantity]:
        return [*super().quantities(store), Quantity("seconds_of_audio", "s audio", np.array(SECONDS))]

    def collate(self, samples: Any, *, length: int | None) -> dict[str, Any]:
        return collate_tokens(samples, length=length)


class RunningSpeech(Speech):
    divisible: ClassVar[bool] = True


def prepared(encoder: Encoder, folder: Path, *, pack: bool) -> Prepared:
    rows = [{"tokens": tokens} for tokens in TOKENS]
    records = Listed(rows, where=lambda i: f"record {i}", fingerprint=lambda: "23 records")
    return prepare(
        train=records,
        validation=None,
        encode=encoder,
        processor=None,
        length=9,
        pack=pack,
        holdout=0.0,
        seed=0,
        cache=folder,
        say=lambda line: None,
    )


@pytest.mark.parametrize("encoder", [Speech(), RunningSpeech()])
@pytest.mark.parametrize("pack", [False, True])
def test_windows_count_each_quantity_over_all_ranks(tmp_path: Path, encoder: Encoder, pack: bool) -> None:
    data = prepared(encoder, tmp_path, pack=pack)
    assert [(each.name, each.short) for each in data.quantities] == [("tokens", "tok"), ("seconds_of_audio", "s audio")]
    loaders = [
        Loader(data.train, data.collator, per_device=2, rank=rank, world=2, shuffle=True, quantities=data.quantities)
        for rank in range(2)
    ]
    epochs = [list(islice(loader.windows(), loader.steps_per_epoch)) for loader in loaders]
    for here, there in zip(*epochs, strict=True):
        assert here.quantities == there.quantities
        real = [batch["position_ids"][batch["sample_ids"] >= 0] for w in (here, there) for batch in w.batches]
        assert here.num_tokens == here.quantities["tokens"] <= sum(part.numel() for part in real)
    assert sum(window.quantities["tokens"] for window in epochs[0]) == sum(TOKENS)
    assert sum(window.quantities["seconds_of_audio"] for window in epochs[0]) == pytest.approx(sum(SECONDS))


@pytest.mark.parametrize("pack", [False, True])
def test_a_row_holds_what_its_samples_hold(tmp_path: Path, pack: bool) -> None:
    data = prepared(Speech(), tmp_path, pack=pack)
    tokens, seconds = data.quantities
    assert tokens.amounts.tolist() == data.train.lengths.tolist()
    for index in range(len(data.train)):
        starts = np.flatnonzero(data.train[index]["position_ids"] == 0)
        sizes = np.diff([*starts, len(data.train[index]["position_ids"])])
        assert tokens.amounts[index] == sizes.sum()
    if not pack:
        assert seconds.amounts.tolist() == SECONDS


def test_a_sample_that_is_cut_counts_in_each_row_by_its_share(tmp_path: Path) -> None:
    data = prepared(RunningSpeech(), tmp_path, pack=True)
    tokens, seconds = data.quantities
    assert tokens.amounts.tolist() == data.train.lengths.tolist()
    per_token = np.repeat(np.array(SECONDS) / TOKENS, TOKENS)
    expected = [per_token[begin : begin + 9].sum() for begin in range(0, sum(TOKENS), 9)]
    assert seconds.amounts == pytest.approx(expected)
