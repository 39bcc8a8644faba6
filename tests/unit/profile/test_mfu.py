"""MFU: the formula that the header of a run states gives the number that the run logs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fullshard.profile import mfu
from fullshard.profile.mfu import Mfu
from tests import small


def evaluated(formula: str, record: dict[str, Any]) -> float:
    """A stated formula with the numbers of a record of metrics.jsonl."""
    return float(eval(formula.replace(" x ", " * "), {}, record))


def test_the_formula_in_the_header_gives_the_logged_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(mfu._PEAKS, 2e9, "CPU")
    small.model_folder(tmp_path / "model")
    small.token_file(tmp_path / "train.jsonl", records=64)
    records = small.train(small.recipe(tmp_path, topology={"device": "cpu", "devices": 1}))
    log = (tmp_path / "runs" / "run" / "log.txt").read_text()
    found = re.search(r"MFU +(.*)", log)
    assert found
    logged = [record for record in records if "mfu" in record]
    assert len(logged) >= 4
    for record in logged:
        assert evaluated(found[1], record) == pytest.approx(record["mfu"], abs=1e-4)
        assert record["mfu"] > 0.001
    assert len({record["mfu"] for record in logged}) > 1


def test_the_formula_adds_what_towers_cost() -> None:
    formula = Mfu.of("tokens", (2e9, {"image_tokens": 3e9}), device="NVIDIA H100", ranks=4)
    rates = {"tokens_per_second": 5000.0, "image_tokens_per_second": 700.0}
    amounts = {"tokens": 10_000.0, "image_tokens": 1400.0}
    assert formula.describe() == "(tokens_per_second x 2e+09 + image_tokens_per_second x 3e+09) / (9.89e+14 x 4)"
    assert evaluated(formula.describe(), rates) == pytest.approx(formula.share(amounts, 2.0), rel=1e-6)


def test_without_a_known_peak_nothing_is_claimed() -> None:
    unknown = Mfu.of("tokens", (2e9, {}), device="CPU", ranks=1)
    assert unknown.share({"tokens": 1.0}, 1.0) is None
    assert unknown.describe() == "not logged: the peak of CPU is not known"
