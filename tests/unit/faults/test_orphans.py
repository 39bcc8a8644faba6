"""A rank whose launcher was killed says so, also if it has saved and ended before it looks."""

from __future__ import annotations

import subprocess
import sys

RANK = """
import os
from fullshard.faults import orphans
orphans.EVERY_S = 600.0
starter = os.getppid()
orphans.end_soon_after(starter)
print("watches", flush=True)
while os.getppid() == starter:
    pass
"""
LAUNCHER = f"import subprocess, sys; subprocess.call([sys.executable, '-c', {RANK!r}])"


def test_a_rank_that_ends_first_says_that_its_launcher_is_gone() -> None:
    command = [sys.executable, "-c", LAUNCHER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "watches\n"
        launcher.kill()
        _, said = launcher.communicate(timeout=300)
    assert said == f"The launcher (process {launcher.pid}) is gone. The ranks save, if they can, and end.\n"
