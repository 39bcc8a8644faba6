"""benchmarks/rows.py: each row runs on a CPU with tiny models, so that time on a GPU is not spent on mistakes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.docs.pages import ROOT

SCRIPT = ROOT / "benchmarks" / "rows.py"
QUICK = [pytest.param(["float8", "--only", "fullshard, float8"], id="float8")]
SLOW = {
    "peers": ["full8b"],
    "adapters": ["lora8b", "--only", "fullshard, float8"],
    "quality": ["float8", "--quality", "--steps", "2"],
    "start": ["start", "--only", "warm"],
    "trainer": ["small", "--only", "HF"],
}


@pytest.mark.parametrize("words", QUICK + [pytest.param(w, id=i, marks=pytest.mark.slow) for i, w in SLOW.items()])
def test_a_row_runs(words: list[str]) -> None:
    done = subprocess.run([sys.executable, SCRIPT, *words, "--tiny"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    table = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(table) >= 3, done.stdout[-2000:]
    assert "not available" not in done.stdout, done.stdout[-3000:]
    assert "torch " in done.stdout
