"""The objective, source and sink of CONTRIBUTING.md train together, as the page says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contributing import commands, write_examples


def test_an_objective_a_source_and_a_sink(tmp_path: Path) -> None:
    names = write_examples(tmp_path)
    assert {"my_objective.py", "my_source.py", "my_sink.py", "example.yaml"} <= set(names)
    (command,) = commands("Add a sink")
    words = [sys.executable, "-m", *command.split()]
    ran = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env=os.environ, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = [line.split(",") for line in (tmp_path / "losses.csv").read_text().splitlines()]
    assert [int(step) for step, _ in rows] == [1, 2, 3]
    # A fresh model knows nothing: each of 300 tokens is about as likely, smoothed or not.
    assert float(rows[0][1]) == pytest.approx(5.7, abs=0.7)
    assert "kind: my_source.Counting" in (tmp_path / "runs" / "example" / "recipe.resolved.yaml").read_text()
