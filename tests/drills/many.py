"""At least 100 recoveries from faults drawn at random: `make test-faults`, outside the usual tests.

Every run breaks a tiny model on two CPU ranks up to five times, on random ranks and in random steps, and must equal the
run without faults bit by bit. Prints a line for each run, and writes the page benchmarks/faults.md if none has failed.
`--recoveries 5` is a trial, whose page is only printed.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from fullshard.drills.drill import Drills
from fullshard.drills.kinds import DRILLS, STEP, Drill, in_one_run, to_rank
from tests.drills.broken_runs import WORLD, prepared

RECOVERIES, IN_A_RUN, STEPS = 100, 5, 18
PAGE = Path(__file__).resolve().parents[2] / "benchmarks" / "faults.md"
HEAD = """\
# Recoveries from faults drawn at random

`python -m tests.drills.many`, the second half of `make test-faults`, writes this page: a tiny model on two CPU ranks
over gloo, up to five faults in a run of 18 steps, on random ranks and in random steps. A run has recovered if it
explained every fault, lost no more than the steps since its last checkpoint, left no process behind, and ended with the
losses and weights of a run without faults, bit by bit (but after NaN, where the guard leaves out an update).

"""


def shares_a_run(drill: Drill) -> bool:
    """Whether the launcher restarts the run after this fault, with the recipe as it is."""
    return drill.recovery == "restart" and len(drill.faults) == 1 and not drill.settings and not drill.to_launcher


def rounds(draw: random.Random) -> Iterator[Sequence[Drill]]:
    """Every drill of the list in a random order, then again: those that share a run, and each of the others alone."""
    while True:
        shared = draw.sample([each for each in DRILLS if shares_a_run(each)], k=sum(map(shares_a_run, DRILLS)))
        runs: list[Sequence[Drill]] = [shared[i : i + IN_A_RUN] for i in range(0, len(shared), IN_A_RUN)]
        runs += [[each] for each in DRILLS if not shares_a_run(each)]
        yield from draw.sample(runs, k=len(runs))


def drawn(number: int, drills: Sequence[Drill], draw: random.Random) -> Drill:
    """The drills as one run, on random ranks and in random steps, at least two apart."""
    if not shares_a_run(drills[0]):
        return replace(drills[0], name=f"run-{number}")
    steps = [STEP]
    for _ in drills[1:]:
        steps.append(steps[-1] + draw.choice((2, 2, 3)))
    return in_one_run(f"run-{number}", [to_rank(each, draw.randrange(WORLD)) for each in drills], after=steps)


def page(found: Mapping[str, int], *, runs: int, seconds: float) -> str:
    """The page about recoveries, by the title of their fault, in runs of which none has failed."""
    versions = f"torch {torch.__version__.partition('+')[0]}, Python {platform.python_version()}"
    machine = f"{os.cpu_count()} CPU cores ({os.getloadavg()[2]:.0f} processes ran or waited at the end)"
    rows = [f"| {drill.title} | {found.get(drill.title, 0)} |" for drill in DRILLS]
    return HEAD + "\n".join(
        [
            f"{time.strftime('%Y-%m-%d')}, {versions}, {machine}, {seconds / 60:.0f} minutes:",
            f"**{sum(found.values())} recoveries in {runs} runs; no run failed.**",
            "",
            "| fault | recoveries |",
            "|---|---|",
            *rows,
            "",
        ]
    )


def recovered(runs: Drills, number: int, drills: Sequence[Drill], draw: random.Random) -> bool:
    """One run; says how it went."""
    print(f"run {number}: {', '.join(each.name for each in drills)} ...", end=" ", flush=True)
    outcome = runs.run(drawn(number, drills, draw))
    print(f"{outcome.problem or 'recovered'} in {outcome.seconds:.0f} s", flush=True)
    if outcome.problem:
        print(runs.output(outcome.drill.name), file=sys.stderr)
    return outcome.problem is None


def main(recoveries: int, *, seed: int = 0) -> int:
    draw, found, failed, begun = random.Random(seed), Counter[str](), 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fullshard-faults-") as folder:
        runs = prepared(Path(folder), steps=STEPS)
        for number, drills in enumerate(rounds(draw), start=1):
            if recovered(runs, number, drills, draw):
                found.update(each.title for each in drills)
            else:
                failed += 1
            done, seconds = sum(found.values()), time.monotonic() - begun
            print(f"  {done} of {recoveries} recoveries after {seconds / 60:.0f} minutes", flush=True)
            if done >= recoveries:
                break
    if failed:
        print(f"{failed} of {number} runs failed: {PAGE} stays as it was.")
    elif recoveries < RECOVERIES:
        print(page(found, runs=number, seconds=seconds))
    else:
        PAGE.write_text(page(found, runs=number, seconds=seconds), encoding="utf-8")
        print(f"{PAGE} is written.")
    return failed > 0


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--recoveries", type=int, default=RECOVERIES, help="fewer, for a trial")
    sys.exit(main(arguments.parse_args().recoveries))
