"""The built-in recipes train as they did when `losses.json` was written.

On the machine and with the versions named there the numbers are the same bit by bit. Another processor adds in another
order: three steps of fp32 move a loss by up to 1e-5 of itself, and a gradient norm by somewhat more. bf16 would move
them by more than a mistake does, so every recipe runs in fp32 here; the values as shipped are for the same machine.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.golden.make import CASES, losses
from tests.shrunk_recipes import local_inputs

GOLDEN = json.loads((Path(__file__).parent / "losses.json").read_text())


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return local_inputs(tmp_path_factory.mktemp("local") / "inputs")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case.endswith("-2") else ()) for case in CASES]
)
def test_losses_are_those_of_the_stored_runs(case: str, local: Path, tmp_path: Path) -> None:
    found, expected = losses(case, local, tmp_path, "precision=fp32"), GOLDEN[case]
    assert len(found["train"]) == len(expected["train"]) == 3
    for (loss, norm), (golden_loss, golden_norm) in zip(found["train"], expected["train"], strict=True):
        assert loss == pytest.approx(golden_loss, rel=1e-5)
        assert norm == pytest.approx(golden_norm, rel=1e-4)
    for one, golden in zip(found["validation"], expected["validation"], strict=True):
        assert one == pytest.approx(golden, rel=1e-5)
