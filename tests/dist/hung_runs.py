"""Runs that hang, one for each kind, all at once: `python -m tests.dist.hung_runs FOLDER`.

Ranks are forked from this process, which has imported everything and started no thread. While a run hangs, `fullshard
autopsy` looks at it from outside. What happened is written to FOLDER/ends.json; test_hangs.py judges it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

KINDS = ("data", "gil", "stop", "kill", "mismatch", "slow", "healthy")
ENDS = ("data", "gil", "stop", "kill", "mismatch")
"""The kinds that end by themselves."""
TIMEOUT_S, NEVER_S, PATIENCE_S = 40, 600, 150


@dataclass
class End:
    """What one run left."""

    said: str = ""
    """By `fullshard autopsy` while it hung, or after it was killed."""
    code: int = -1
    after: str = ""
    """By `fullshard autopsy` when it had ended."""
    codes: list[int | None] = field(default_factory=list)
    """The exit codes of the ranks; None: a rank did not end."""
    log: str = ""
    crash: list[str] = field(default_factory=list)


def settings(folder: Path, kind: str) -> dict[str, Any]:
    from tests.small import recipe

    return recipe(
        folder,
        name=kind,
        objective={"kind": "tests.dist.hanging_parts.Stuck"},
        data={"encode": {"kind": "tests.dist.hanging_parts.Reading"}, "workers": 0},
        batch={"per_device": 4, "global": 8},
        duration={"steps": 400 if kind == "healthy" else 6},
        topology={"timeout_s": TIMEOUT_S if kind in ENDS else NEVER_S},
        sharding={"strategy": "full"},
        checkpoint={"every_steps": 2},
    )


def _rank(rank: int, folder: Path, kind: str) -> None:
    from fullshard.recipes.read import read
    from fullshard.run import execute
    from tests.ranks import _enter

    output = os.open(folder / f"{kind}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.update(HANG=f"{kind}:1", HANG_LOG=str(folder / "runs" / kind / "metrics.jsonl"))
    _enter({"rank": rank, "world": 2, "nodes": 1, "store": str(folder / f"{kind}.store")})
    execute(read(settings(folder, kind)), resume="auto")


def hangs(run: Path, kind: str) -> bool:
    """Whether the run has come to the place where it hangs; a healthy one, whether it trains."""
    from fullshard.faults import beat

    found = beat.read_all(run / "watch")
    moved = len(found) == 2 and all(reading.step >= 2 for reading in found.values())
    return moved and (kind == "healthy" or all(reading.age() > 3 for reading in found.values()))


def autopsy(run: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fullshard", "autopsy", str(run)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def look(folder: Path, runs: dict[str, list[ForkProcess]], ends: dict[str, End]) -> None:
    """Looks at each run from outside as soon as it hangs."""
    asked: dict[str, subprocess.Popen[str]] = {}
    deadline = time.monotonic() + PATIENCE_S
    while len(asked) < len(runs) and time.monotonic() < deadline:
        for kind, ranks in runs.items():
            lost = kind == "kill" and all(rank.exitcode is not None for rank in ranks)
            if kind not in asked and (lost or hangs(folder / "runs" / kind, kind)):
                asked[kind] = autopsy(folder / "runs" / kind)
        time.sleep(0.2)
    for kind, process in asked.items():
        ends[kind].said, ends[kind].code = process.communicate(timeout=60)[0], process.returncode


def main(folder: Path) -> None:
    from tests.dist.killed_runs import end, prepare

    prepare(folder)
    import tests.dist.hanging_parts  # noqa: F401  before ranks are forked

    fork = get_context("fork")
    runs = {kind: [fork.Process(target=_rank, args=(rank, folder, kind)) for rank in range(2)] for kind in KINDS}
    for ranks in runs.values():
        for rank in ranks:
            rank.start()
    ends = {kind: End() for kind in KINDS}
    look(folder, runs, ends)
    (folder / "runs" / "slow" / "go").touch()
    for rank in runs["healthy"]:
        os.kill(rank.pid or 0, signal.SIGTERM)
    for kind, ranks in runs.items():
        stuck = end(ranks, patience_s=PATIENCE_S)
        ends[kind].codes = [None if rank in stuck else ranks[rank].exitcode for rank in range(2)]
        ends[kind].log = (folder / f"{kind}.txt").read_text()
        ends[kind].crash = sorted(path.name for path in (folder / "runs" / kind).glob("crash-1/*"))
    for kind, process in [(kind, autopsy(folder / "runs" / kind)) for kind in KINDS]:
        ends[kind].after = process.communicate(timeout=60)[0]
    (folder / "ends.json").write_text(json.dumps({kind: asdict(each) for kind, each in ends.items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
