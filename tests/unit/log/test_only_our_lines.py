"""Commands print only our own lines, even with libraries that log when imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

OURS = {
    (
        "check",
        "diffusion",
        "--quick",
    ): r"|(Environment|Recipe|Model|Data)|  [✓!] .*| {20}.*|Setup is CORRECT.*|Model dtype: .*|Ready to train with:"
    r"|  fullshard train .*",
    ("train", "embedding", "--dry-run"): r"|[ -]*[\w.]+:.*|# .*| *- .*",
    (
        "check",
        "vision",
        "--sample",
        "1",
        "data.train.records=8",
    ): r"|Sample 1 of 8, .*|\d+ tokens, .*|\[image .*| {4}.*",
}
"""A command, and what each of its lines looks like."""


def test_commands_print_their_own_lines_alone(tmp_path: Path) -> None:
    environ = {**os.environ, "FULLSHARD_CACHE": str(tmp_path / "cache"), "PYTHONIOENCODING": "utf-8"}
    started = {
        words: subprocess.Popen(
            [sys.executable, "-m", "fullshard", *words],
            cwd=tmp_path,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        for words in OURS
    }
    for words, process in started.items():
        out, err = process.communicate(timeout=280)
        assert (process.returncode, err) == (0, ""), out
        foreign = [line for line in out.splitlines() if not re.fullmatch(OURS[words], line)]
        assert not foreign, words
