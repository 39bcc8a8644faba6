"""Runs that hang, one for each kind: `python -m tests.dist.hung_runs FOLDER`.

Ranks are forked from this process, which has imported everything and started no thread. `fullshard autopsy` looks from
outside at runs that would hang for ever, so that it may take its time. Others end by themselves. What happened is
written to FOLDER/ends.json; test_hangs.py judges it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

KINDS = ("data", "gil", "stop", "kill", "mismatch", "slow", "healthy")
ENDS = ("data", "gil", "stop", "mismatch")
"""The kinds that also have a run which ends by itself, `KIND-ends`."""
TIMEOUT_S, NEVER_S, PATIENCE_S = 30, 10_000, 400


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


def settings(folder: Path, name: str) -> dict[str, Any]:
    from tests.small import recipe

    return recipe(
        folder,
        name=name,
        objective={"kind": "tests.dist.hanging_parts.Stuck"},
        data={"encode": {"kind": "tests.dist.hanging_parts.Reading"}, "workers": 0},
        batch={"per_device": 4, "global": 8},
        duration={"steps": 100_000 if name == "healthy" else 6},
        topology={"timeout_s": TIMEOUT_S if name.endswith("-ends") else NEVER_S},
        sharding={"strategy": "full"},
        checkpoint={"every_steps": 2},
    )


def _rank(rank: int, folder: Path, name: str) -> None:
    from fullshard.recipes.read import read
    from fullshard.run import execute
    from tests.ranks import _enter

    output = os.open(folder / f"{name}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    kind = name.removesuffix("-ends")
    os.environ.update(HANG=f"{kind}:1", HANG_LOG=str(folder / "runs" / name / "metrics.jsonl"))
    _enter({"rank": rank, "world": 2, "nodes": 1, "store": str(folder / f"{name}.store")})
    execute(read(settings(folder, name)), resume="auto")


def start(folder: Path, names: Sequence[str]) -> dict[str, list[ForkProcess]]:
    fork = get_context("fork")
    runs = {name: [fork.Process(target=_rank, args=(rank, folder, name)) for rank in range(2)] for name in names}
    for ranks in runs.values():
        for rank in ranks:
            rank.start()
    return runs


def hangs(run: Path, kind: str) -> bool:
    """Whether the run has come to the place where it hangs; a healthy one, whether it trains."""
    from fullshard.faults import beat

    found = beat.read_all(run / "watch")
    moved = len(found) == 2 and all(reading.step >= 2 for reading in found.values())
    # A rank that has not moved may also be slow: the one that hangs says so, and the other one soon waits for it.
    still = (run / "hangs").exists() and all(reading.age() > 3 for reading in found.values())
    return moved and (kind == "healthy" or still)


def autopsy(run: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fullshard", "autopsy", str(run), "--wait", "20"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def look(folder: Path, runs: dict[str, list[ForkProcess]]) -> dict[str, subprocess.Popen[str]]:
    """Starts to look at each run from outside as soon as it hangs."""
    asked: dict[str, subprocess.Popen[str]] = {}
    deadline = time.monotonic() + PATIENCE_S
    while len(asked) < len(runs) and time.monotonic() < deadline:
        for kind, ranks in runs.items():
            lost = kind == "kill" and all(rank.exitcode is not None for rank in ranks)
            if kind not in asked and (lost or hangs(folder / "runs" / kind, kind)):
                asked[kind] = autopsy(folder / "runs" / kind)
        time.sleep(0.2)
    return asked


def hear(folder: Path, asked: dict[str, subprocess.Popen[str]], ends: dict[str, End]) -> None:
    """What `fullshard autopsy` says. A step of the run that trains may take longer than it looks: it is asked again."""
    deadline = time.monotonic() + PATIENCE_S
    for kind, process in asked.items():
        ends[kind].said, ends[kind].code = process.communicate()[0], process.returncode
        while kind == "healthy" and ends[kind].code == 1 and time.monotonic() < deadline:
            process = autopsy(folder / "runs" / kind)
            ends[kind].said, ends[kind].code = process.communicate()[0], process.returncode


def main(folder: Path) -> None:
    from tests.dist.killed_runs import end, prepare

    prepare(folder)
    import tests.dist.hanging_parts  # noqa: F401  before ranks are forked

    watched = start(folder, KINDS)
    asked = look(folder, watched)
    alone = start(folder, [f"{kind}-ends" for kind in ENDS])  # the others stand still, so that these have the machine
    ends = {name: End() for name in (*watched, *alone)}
    hear(folder, asked, ends)
    (folder / "runs" / "slow" / "go").touch()
    for rank in watched["healthy"]:
        os.kill(rank.pid or 0, signal.SIGTERM)
    for name, ranks in (watched | alone).items():
        stuck = end(ranks, patience_s=0 if name in ENDS else PATIENCE_S)
        ends[name].codes = [None if rank in stuck else ranks[rank].exitcode for rank in range(2)]
        ends[name].log = (folder / f"{name}.txt").read_text()
        ends[name].crash = sorted(path.name for path in (folder / "runs" / name).glob("crash-1/*"))
    for name, process in [(name, autopsy(folder / "runs" / name)) for name in ("slow", "healthy", *alone)]:
        ends[name].after = process.communicate()[0]
    (folder / "ends.json").write_text(json.dumps({name: asdict(each) for name, each in ends.items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
