"""Packing: every token once, labels a plain shift within a document, nothing across documents; tight and fast."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fullshard.contracts.data import IGNORE, Encoder, Features, Record
from fullshard.data.pack import Fitted, Plain, Wrapped, best_fit
from fullshard.data.records import Listed
from fullshard.data.store import Store, encoded
from fullshard.text.tokens import collate_tokens, sample, shifted
from tests.near import assert_near


class Numbers(Encoder):
    """Records that are token lists already; needs no tokenizer."""

    def encode(self, record: Record, processor: Any, *, length: int) -> list[Features]:
        ids = np.array(record["ids"], dtype=np.int32)
        return [sample(ids, shifted(ids))]


def documents(num: int, *, longest: int) -> list[list[int]]:
    """Token k of document d is the number d * 1000 + k, so that a token tells where it belongs."""
    rng = np.random.default_rng(num)
    return [[d * 1000 + k for k in range(int(rng.integers(2, longest + 1)))] for d in range(num)]


def store_of(docs: list[list[int]], folder: Path) -> Store:
    rows = [{"ids": doc} for doc in docs]
    records = Listed(rows, where=lambda i: f"record {i}", fingerprint=lambda: json.dumps(docs))
    return encoded(records, Numbers().open(None, length=10**9), cache=folder, say=lambda line: None)


def check_row(row: Features) -> None:
    """Positions count within a piece; a label is the next token of the same document, or none at its end."""
    ids, labels, positions = row["input_ids"], row["labels"], row["position_ids"]
    starts = np.flatnonzero(positions == 0)
    assert starts[0] == 0
    for begin, end in zip(starts, [*starts[1:], len(ids)], strict=True):
        piece = ids[begin:end]
        assert len(set((piece // 1000).tolist())) == 1
        assert (np.diff(piece) == 1).all()
        assert positions[begin:end].tolist() == list(range(end - begin))
    real = labels != IGNORE
    assert (labels[real] == ids[real] + 1).all()


@pytest.mark.parametrize("length", [2, 7, 16, 64, 5000])
def test_wrapped_rows_hold_every_token_once_and_predict_every_next_token_once(tmp_path: Path, length: int) -> None:
    docs = documents(40, longest=50)
    store = store_of(docs, tmp_path)
    chosen = np.arange(0, 40, 3)
    rows = Wrapped(store, chosen, length=length)
    total = sum(len(docs[d]) for d in chosen)
    assert rows.num_tokens == total
    assert len(rows) == -(-total // length)
    got = [rows[i] for i in range(len(rows))]
    assert all(len(row["input_ids"]) == length for row in got[:-1])
    assert rows.lengths.tolist() == [len(row["input_ids"]) for row in got]
    for row in got:
        check_row(row)
    ids = np.concatenate([row["input_ids"] for row in got])
    labels = np.concatenate([row["labels"] for row in got])
    assert ids.tolist() == [token for d in chosen for token in docs[d]]
    assert labels.tolist() == [label for d in chosen for label in (*docs[d][1:], IGNORE)]


def test_fitted_rows_hold_whole_samples_once(tmp_path: Path) -> None:
    docs = documents(200, longest=64)
    store = store_of(docs, tmp_path)
    chosen = np.arange(1, 200, 2)
    rows = Fitted(store, chosen, length=64)
    seen = []
    for index in range(len(rows)):
        row = rows[index]
        check_row(row)
        assert len(row["input_ids"]) <= 64
        for begin in np.flatnonzero(row["position_ids"] == 0):
            seen.append(int(row["input_ids"][begin]) // 1000)
        assert (row["labels"] == IGNORE).sum() == (row["position_ids"] == 0).sum()
    assert sorted(seen) == chosen.tolist()
    assert rows.num_tokens == sum(len(docs[d]) for d in chosen)
    assert rows.lengths.tolist() == [len(rows[index]["input_ids"]) for index in range(len(rows))]


def plain_best_fit(lengths: list[int], length: int) -> list[list[int]]:
    """Best-fit decreasing, one sample at a time."""
    rows: list[tuple[int, list[int]]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fitting = [r for r in range(len(rows)) if rows[r][0] >= lengths[index]]
        if fitting:
            best = min(fitting, key=lambda r: rows[r][0])
            rows[best] = (rows[best][0] - lengths[index], [*rows[best][1], index])
        else:
            rows.append((length - lengths[index], [index]))
    return [members for _, members in rows]


@pytest.mark.parametrize("seed", range(8))
def test_best_fit_is_as_tight_as_placing_one_sample_at_a_time(seed: int) -> None:
    rng = np.random.default_rng(seed)
    length = int(rng.integers(5, 200))
    lengths = rng.integers(1, length + 1, int(rng.integers(1, 400)))
    rows = best_fit(lengths, length=length)
    loads = np.bincount(rows, weights=lengths)
    assert loads.max() <= length
    assert (loads > 0).all()
    expected = sorted(sum(lengths[m] for m in members) for members in plain_best_fit(lengths.tolist(), length))
    assert sorted(loads.astype(int).tolist()) == expected
    # Rows are numbered by their first sample.
    assert [int(np.flatnonzero(rows == r)[0]) for r in range(len(loads))] == sorted(
        int(np.flatnonzero(rows == r)[0]) for r in range(len(loads))
    )


def test_a_million_samples_are_placed_in_seconds() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(5.5, 1.0, 1_000_000).astype(np.int64), 2, 4096)
    begun = time.process_time()
    rows = best_fit(lengths, length=4096)
    assert time.process_time() - begun < 10
    assert lengths.sum() / ((rows.max() + 1) * 4096) > 0.99


def test_packed_rows_have_one_shape_and_a_model_sees_each_document_alone(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=7000, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config).eval()
    docs = documents(6, longest=9)
    rows = Fitted(store_of(docs, tmp_path), np.arange(6), length=16)
    batch = collate_tokens([rows[i] for i in range(len(rows))], length=16)
    assert batch["input_ids"].shape == (len(rows), 16)
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        for row in range(len(rows)):
            positions = rows[row]["position_ids"]
            starts = [*np.flatnonzero(positions == 0).tolist(), len(positions)]
            for begin, end in zip(starts, starts[1:], strict=False):
                alone = model(input_ids=batch["input_ids"][row : row + 1, begin:end], use_cache=False).logits[0]
                assert_near(logits[row, begin:end], alone)


def test_plain_rows_are_the_samples(tmp_path: Path) -> None:
    docs = documents(5, longest=9)
    rows = Plain(store_of(docs, tmp_path), np.array([4, 2]))
    assert [rows[i]["input_ids"].tolist() for i in range(len(rows))] == [docs[4], docs[2]]
    assert rows[0]["position_ids"].tolist() == list(range(len(docs[4])))
    assert rows.fixed_length is None
    assert rows.num_tokens == len(docs[4]) + len(docs[2])
