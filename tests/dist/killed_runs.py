"""A run that is killed in its saves again and again, started by `python -m tests.dist.killed_runs FOLDER KILLS STEPS`.

Ranks are forked from this process, which has imported everything and started no thread: a life of the run costs a
second. What happened is written to FOLDER/lives.json; test_kill.py judges it.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

WORLD = 2
LOOK_S = 0.004
PATIENCE_S = 60
"""How long a rank that has lost the other may take to end by itself."""
RUN_S = 300
"""How long a whole run may take."""
ALL = 1000
"""The count of a save that is already published: more files than a checkpoint has."""
TINY: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}
_SEEN = "seen"
"""Marks what an earlier life has left, so that a new save of the same step is known from it."""


@dataclass
class Life:
    """One start of the run and what it left."""

    number: int
    victims: list[int]
    asynchronous: bool
    format: str
    killed: bool = False
    inside: bool = False
    """The kill left an unfinished checkpoint behind."""
    stuck: list[int] = field(default_factory=list)
    """Ranks that did not end by themselves after they had lost another."""
    published: list[str] = field(default_factory=list)
    last: str | None = None
    problems: list[str] = field(default_factory=list)


def settings(folder: Path, name: str, steps: int, **checkpoint: Any) -> dict[str, Any]:
    from tests.small import recipe

    return recipe(
        folder,
        name=name,
        model={"overrides": {"attention_dropout": 0.2}},
        data={"shuffle": True},
        batch={"per_device": 4, "global": 8},
        duration={"steps": steps},
        checkpoint={"every_steps": 1, "keep": 3, **checkpoint},
    )


def prepare(folder: Path) -> None:
    """Imports and caches whatever a rank needs, so that it need not, and leaves no thread behind."""
    import torch
    import tqdm  # type: ignore[import-untyped]

    tqdm.tqdm.monitor_interval = 0
    torch.set_num_threads(1)
    import fullshard.build
    import fullshard.check.preflight
    import fullshard.hf.architecture.attention
    import fullshard.hf.weights.start_weights
    import fullshard.log.all_sinks
    import fullshard.log.libraries
    import fullshard.run  # noqa: F401
    from fullshard.kernels.amx import avoid_broken_amx
    from fullshard.log.console import Console
    from fullshard.recipes.read import read
    from fullshard.setup.run_inputs import prepare_inputs
    from tests.small import model_folder, token_file

    avoid_broken_amx()
    model_folder(folder / "model", **TINY)
    token_file(folder / "train.jsonl", records=90)
    prepare_inputs(read(settings(folder, "straight", 1)).recipe, world_size=WORLD, console=Console(silent=True))
    assert len(os.listdir("/proc/self/task")) == 1, "forked ranks must not inherit a thread's locks"


def start(chosen: dict[str, Any], log: Path) -> list[ForkProcess]:
    """The ranks of one life."""
    store = log.with_suffix(".store")
    processes = [get_context("fork").Process(target=_rank, args=(rank, chosen, log, store)) for rank in range(WORLD)]
    for process in processes:
        process.start()
    return processes


def _rank(rank: int, chosen: dict[str, Any], log: Path, store: Path) -> None:
    from fullshard.recipes.read import read
    from fullshard.run import execute
    from tests.ranks import _enter

    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    _enter({"rank": rank, "world": WORLD, "nodes": 1, "store": str(store)})
    execute(read(chosen), resume="auto")


def saving(run: Path) -> set[str]:
    """The saves under way."""
    found = {path.name for path in run.glob(".unfinished-checkpoint-*")}
    return {name for name in found if not (run / name / _SEEN).exists()}


def files_in(hidden: Path) -> int:
    """How many files a save has begun to write, or more than any save has once it is published."""
    try:
        return len(os.listdir(hidden))
    except FileNotFoundError:
        return ALL


def kill_in_save(processes: list[ForkProcess], run: Path, life: Life, *, save: int, files: int) -> None:
    """Kills the victims when this life's save of that number has that many files."""
    sentinels = [process.sentinel for process in processes]
    seen: set[str] = set()
    new: set[str] = set()
    while len(seen) < save:
        if wait(sentinels, timeout=LOOK_S):
            return
        new = saving(run) - seen
        seen |= new
    hidden = next(iter(new))
    while files_in(run / hidden) < files and not wait(sentinels, timeout=LOOK_S):
        pass
    for rank in life.victims:
        os.kill(processes[rank].pid or 0, signal.SIGKILL)
    life.killed = True


def end(processes: list[ForkProcess], *, patience_s: float) -> list[int]:
    """Waits for all ranks, and ends as the launcher would those that do not end by themselves, which it gives."""
    deadline = time.monotonic() + patience_s
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))
    stuck = [rank for rank, process in enumerate(processes) if process.exitcode is None]
    for process in processes:
        process.kill()
        process.join()
    return stuck


def look(run: Path, life: Life) -> None:
    """What a life has left in the run folder."""
    from fullshard.checkpoint import folder as files
    from fullshard.commands.verify import problems

    life.inside = bool(saving(run))
    for name in saving(run):
        (run / name / _SEEN).touch()
    found = files.published(run)
    last = files.pointed(run, "last")
    life.published, life.last = [path.name for path in found], last.name if last else None
    life.problems = [line for path in found for line in problems(path)]


def straight(folder: Path, steps: int) -> None:
    """The run that nobody kills."""
    chosen = settings(folder, "straight", steps, keep=None)
    processes = start(chosen, folder / "straight.txt")
    end(processes, patience_s=RUN_S)
    assert [process.exitcode for process in processes] == [0] * WORLD, (folder / "straight.txt").read_text()


def lives(folder: Path, kills: int, steps: int) -> list[Life]:
    """Life after life of one run, each killed in a save, the last one left alone."""
    draw, run = random.Random(4), folder / "runs" / "killed"
    kinds = list(itertools.islice(itertools.cycle(itertools.product(([0], [1], [0, 1]), (False, True))), kills))
    draw.shuffle(kinds)
    found: list[Life] = []
    for number, (victims, asynchronous) in enumerate(kinds):
        life = Life(number, victims, asynchronous, draw.choice(["sharded", "full"]))
        done = int(found[-1].last.rpartition("-")[2]) if found and found[-1].last else 0
        chosen = settings(folder, "killed", steps, asynchronous=asynchronous, format=life.format)
        processes = start(chosen, folder / f"life-{number}.txt")
        save = 2 if done < (steps - 8) * number / kills else 1
        kill_in_save(processes, run, life, save=save, files=draw.choice((0, 1, 2, 3, ALL)))
        life.stuck = end(processes, patience_s=PATIENCE_S)
        look(run, life)
        found.append(life)
    life = Life(kills, [], True, "sharded")
    life.stuck = end(start(settings(folder, "killed", steps), folder / "end.txt"), patience_s=RUN_S)
    look(run, life)
    return [*found, life]


def main(folder: Path, kills: int, steps: int) -> None:
    prepare(folder)
    straight(folder, steps)
    found = lives(folder, kills, steps)
    (folder / "lives.json").write_text(json.dumps({"lives": [asdict(life) for life in found]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
