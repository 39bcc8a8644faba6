"""The error file of a rank is whole or not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fullshard.explain.error_file import hand_over, handed_over

FULL_DISK = """\
import resource, signal
from fullshard.explain.error_file import hand_over
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
print(hand_over("lost"))
"""


def test_the_launcher_reads_what_a_rank_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert hand_over("no space", traceback="line 1", crash="folder")
    words = handed_over(json.loads((tmp_path / "error.json").read_text()))
    assert (words.message, words.text, words.folder) == ("no space", "line 1", Path("folder"))
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]


def test_a_full_disk_leaves_no_half_file(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    environ = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(file)}
    ended = subprocess.run([sys.executable, "-c", FULL_DISK], capture_output=True, text=True, env=environ, check=True)
    assert ended.stdout.strip() == "False"
    assert not file.exists()
