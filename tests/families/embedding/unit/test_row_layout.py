"""Texts in rows: every token once, positions that restart, little padding; and the chunks of a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fullshard.families.embedding.batching.chunks import Chunk, Texts, by_text, crowded, cut, fill_up, inputs
from fullshard.families.embedding.batching.row_layout import PADDING, Layout, lay_out

CASES = {
    "uneven": [5, 1, 12, 3, 3, 7, 2, 9, 1, 12],
    "equal": [4, 4, 4],
    "one": [6],
    "single tokens": [1, 1, 1, 1],
    "one long": [2, 30, 2, 2],
    "random": np.random.default_rng(0).integers(1, 40, size=200).tolist(),
}


def check(layout: Layout, lengths: np.ndarray) -> None:
    """Each token once, each text whole and in one row, positions from 0 in every text and in padding."""
    longest, total = int(lengths.max()), int(lengths.sum())
    flat, positions = layout.source.reshape(-1), layout.positions.reshape(-1)
    assert layout.source.shape == layout.positions.shape
    assert layout.source.shape[1] == longest
    assert sorted(flat[flat != PADDING]) == list(range(total))
    assert flat[layout.places].tolist() == list(range(total))
    assert layout.padding == int((flat == PADDING).sum()) == flat.size - total
    assert layout.lengths.tolist() == lengths.tolist()
    start = 0
    for length in lengths:
        places = layout.places[start : start + length]
        assert (np.diff(places) == 1).all()
        assert places[0] // longest == places[-1] // longest, "a text is not broken over rows"
        assert positions[places].tolist() == list(range(length))
        start += length
    for row, at in zip(layout.source, layout.positions, strict=True):
        empty = np.flatnonzero(row == PADDING)
        assert empty.tolist() == list(range(longest - len(empty), longest)), "padding comes last"
        assert at[empty].tolist() == list(range(len(empty))), "padding counts as a text of its own"


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_every_token_occurs_once(case: str, packed: bool) -> None:
    lengths = np.array(CASES[case])
    check(lay_out(lengths, packed=packed), lengths)


def test_padded_rows_are_the_texts_in_order() -> None:
    lengths = np.array(CASES["uneven"])
    layout = lay_out(lengths, packed=False)
    assert (layout.source != PADDING).sum(1).tolist() == lengths.tolist()
    assert layout.padding == 10 * 12 - 55


def test_packed_rows_hold_little_padding() -> None:
    assert lay_out(np.array(CASES["uneven"]), packed=True).padding == 5 * 12 - 55
    assert lay_out(np.array(CASES["single tokens"]), packed=True).padding == 0
    many = lay_out(np.array(CASES["random"]), packed=True)
    assert many.padding / many.source.size < 0.07


def texts(lengths: list[int], per_sample: list[int], per_batch: list[int]) -> Texts:
    """Texts whose tokens are numbered, so that each is unique."""
    samples = len(per_sample)
    return Texts(
        tokens=torch.arange(100, 100 + sum(lengths)),
        lengths=np.array(lengths),
        per_sample=np.array(per_sample),
        per_batch=per_batch,
        keys=torch.arange(len(lengths)),
        labels=torch.zeros(samples),
        real=torch.ones(samples, dtype=torch.bool),
    )


STEP = texts([3, 1, 4, 2, 8, 2, 5, 1], [2, 3, 3], [2, 6])


def test_firsts_are_the_queries() -> None:
    assert STEP.firsts.tolist() == [0, 2, 5]


def batch(sample_ids: list[int], lengths: list[int], per_sample: list[int]) -> dict[str, Any]:
    return {
        "tokens": torch.tensor(lengths).repeat_interleave(torch.tensor(lengths)),
        "lengths": np.array(lengths),
        "texts": np.array(per_sample),
        "keys": torch.tensor(lengths) * 10,
        "label": torch.tensor(sample_ids).double(),
        "sample_ids": torch.tensor(sample_ids),
    }


def test_micro_batches_become_one_step() -> None:
    joined = Texts.of([batch([4, 7], [1, 2, 3, 1], [2, 2]), batch([9, -1], [2, 2, 1, 1, 1], [3, 2])])
    assert joined.tokens.tolist() == [1, 2, 2, 3, 3, 3, 1, 2, 2, 2, 2, 1, 1, 1]
    assert joined.lengths.tolist() == [1, 2, 3, 1, 2, 2, 1, 1, 1]
    assert joined.per_sample.tolist() == [2, 2, 3, 2]
    assert joined.per_batch == [4, 5]
    assert joined.keys.tolist() == [10, 20, 30, 10, 20, 20, 10, 10, 10]
    assert joined.labels.tolist() == [4, 7, 9, -1]
    assert joined.real.tolist() == [True, True, True, False]


def members(chunks: list[Chunk]) -> list[list[int]]:
    return [chunk.texts.tolist() for chunk in chunks]


def test_without_a_cache_chunks_are_the_micro_batches() -> None:
    assert members(cut(STEP, size=None, tokens=None)) == [[0, 1], [2, 3, 4, 5, 6, 7]]


def test_cut_by_texts_groups_similar_lengths() -> None:
    assert members(cut(STEP, size=3, tokens=None)) == [[4, 6, 2], [0, 3, 5], [1, 7]]
    assert members(cut(STEP, size=64, tokens=None)) == [[4, 6, 2, 0, 3, 5, 1, 7]]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (10, [[4], [6, 2], [0, 3, 5, 1, 7]]),
        (8, [[4], [6], [2, 0], [3, 5, 1, 7]]),
        (4, [[4], [6], [2], [0], [3, 5], [1, 7]]),  # a text longer than that is a chunk by itself
        (26, [[4, 6, 2, 0, 3, 5, 1, 7]]),
    ],
)
def test_cut_by_tokens(tokens: int, expected: list[list[int]]) -> None:
    found = cut(STEP, size=None, tokens=tokens)
    assert members(found) == expected
    assert all(len(chunk.texts) == 1 or STEP.lengths[chunk.texts].sum() <= tokens for chunk in found)
    assert sorted(text for chunk in found for text in chunk.texts) == list(range(8))


def test_a_rank_with_fewer_chunks_repeats_a_text() -> None:
    chunks = cut(STEP, size=4, tokens=None)
    filled = fill_up(chunks, 4)
    assert [chunk.filler for chunk in filled] == [False, False, True, True]
    assert members(filled)[2:] == [[7], [7]]
    assert fill_up(chunks, 2) == chunks


@pytest.mark.parametrize("packed", [True, False])
def test_inputs_hold_the_tokens_of_the_chunk(packed: bool) -> None:
    chunk = Chunk(np.array([6, 0, 3, 1]))
    given = inputs(STEP, chunk, packed=packed, pad=9)
    assert given["lengths"].tolist() == [5, 3, 2, 1]
    pieces = given["input_ids"].reshape(-1)[given["places"]].split([5, 3, 2, 1])
    starts = np.cumsum(STEP.lengths) - STEP.lengths
    for text, piece in zip(chunk.texts, pieces, strict=True):
        assert piece.tolist() == list(range(100 + starts[text], 100 + starts[text] + STEP.lengths[text]))
    assert (given["input_ids"][~given["real"]] == 9).all()
    assert int(given["real"].sum()) == 11
    # Where one text or padding ends, the next begins.
    flat = given["positions"].reshape(-1)
    bounds = given["bounds"].unique().tolist()
    assert bounds == [*torch.nonzero(flat == 0).reshape(-1).tolist(), len(flat)]


@pytest.mark.parametrize("lengths", [[5, 5], [7, 2, 3], [2, 1]])
def test_among_crowded_texts_some_share_a_row(lengths: list[int]) -> None:
    step = texts(lengths, [len(lengths)], [len(lengths)])
    found = crowded(step, most=64)
    assert found.lengths.tolist() == [*(max(n // 2, 1) for n in lengths), max(lengths)]
    starts = np.cumsum(lengths) - lengths
    pieces = found.tokens.split(found.lengths.tolist())
    assert [int(piece[0]) - 100 for piece in pieces] == [*starts, starts[int(np.argmax(lengths))]]
    assert all((piece.diff() == 1).all() for piece in pieces)
    assert len(lay_out(found.lengths, packed=True).source) < len(found.lengths)


def test_by_text_gives_each_text_its_own_row() -> None:
    vectors = torch.arange(12.0).reshape(6, 2).requires_grad_()
    found = by_text(vectors, torch.tensor([1, 3, 2]), 4)
    expected = torch.zeros(3, 4, 2)
    expected[0, :1], expected[1, :3], expected[2, :2] = vectors[:1], vectors[1:4], vectors[4:]
    assert torch.equal(found, expected)
    found.sum().backward()
    assert vectors.grad is not None
    assert torch.equal(vectors.grad, torch.ones(6, 2))
