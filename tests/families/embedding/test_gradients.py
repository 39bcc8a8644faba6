"""Gradients of one step, sharded, cached, over ranks, against one plain process: equal, whatever the way.

The whole product of losses, dimensions, caches, ranks, adapters and dropout is gone through by
benchmarks/embedding_gradients.py; here every loss meets every cache and every number of ranks, and adapters, dropout
and packed rows in turn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.families.embedding import cases
from tests.slow import one_in

TOLERANCE = 1e-5
LOSSES: list[dict[str, Any]] = [
    {"kind": "infonce", "learn_temperature": True, "bidirectional": True},
    {"kind": "triplet"},
    {"kind": "cosent"},
    {"kind": "sigmoid"},
    {"kind": "in_batch_hard", "top_k": 3},
    {"kind": "late_interaction"},
]
PLAIN, OTHERWISE = (False, False, True), (True, True, False)
"""Adapters, dropout, packed rows."""
CASES: list[tuple[int, tuple[bool, bool, bool], list[int | None]]] = [
    (1, PLAIN, [None, 3]),
    (1, OTHERWISE, [1]),
    (2, PLAIN, [None, 3, 64]),
    (2, OTHERWISE, [3]),
    (4, PLAIN, [None]),
    (4, OTHERWISE, [3]),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    folder = tmp_path_factory.mktemp("encoders")
    return {drop: cases.encoder_folder(folder / str(drop), dropout=0.3 if drop else 0.0) for drop in (False, True)}


@pytest.mark.parametrize(("world", "way", "caches"), one_in(4, CASES))
def test_gradients_equal_those_of_one_plain_process(
    ranks: Any, folders: dict[bool, Path], world: int, way: tuple[bool, bool, bool], caches: list[int | None]
) -> None:
    lora, dropout, packed = way
    settings = {"lora": lora, "packed": packed}
    for found in ranks.run(cases.apart, folders[dropout], LOSSES, caches, **settings, world=world):
        assert {case: distance for case, distance in found.items() if distance > TOLERANCE} == {}
