"""At least 100 recoveries from faults drawn at random: `make test-faults`, outside the usual tests.

Every run breaks a tiny model on two CPU ranks once or twice, in random steps, and must equal the run without faults bit
by bit. Prints a line for each and a table at the end, as it is kept in benchmarks/faults.md.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

from fullshard.drills.drill import Outcome
from fullshard.drills.kinds import DRILLS, STEPS, Drill, Happens
from tests.drills.broken_runs import prepared

RECOVERIES = 100


def drawn(number: int, draw: random.Random) -> Drill:
    """A drill of the list, with its faults in other steps."""
    drill = DRILLS[number % len(DRILLS)]
    moved = tuple(_moved(fault, draw) for fault in drill.faults) if len(drill.faults) == 1 else drill.faults
    return replace(drill, name=f"{drill.name}-{number}", faults=moved)


def _moved(fault: Happens, draw: random.Random) -> Happens:
    return replace(fault, after=draw.randint(2, STEPS - 2))


def main(seed: int = 0) -> int:
    draw, found = random.Random(seed), Counter[str]()
    failed: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="fullshard-faults-") as folder:
        runs = prepared(Path(folder))
        number = recoveries = 0
        while recoveries < RECOVERIES:
            outcome = runs.run(drawn(number, draw))
            recoveries += max(len(outcome.resumed_from), 1) if outcome.problem is None else 0
            found[outcome.drill.title] += outcome.problem is None
            failed += [outcome] if outcome.problem else []
            print(
                f"{recoveries:4}  {outcome.seconds:6.1f} s  {outcome.drill.name}  {outcome.problem or 'ok'}", flush=True
            )
            if outcome.problem:
                print(runs.output(outcome.drill.name), file=sys.stderr)
            number += 1
    print("\n| fault | runs that recovered |\n|---|---|")
    for title, count in found.items():
        print(f"| {title} | {count} |")
    print(f"\n{recoveries} recoveries in {number} runs, {len(failed)} failures")
    return len(failed) > 0


if __name__ == "__main__":
    sys.exit(main())
