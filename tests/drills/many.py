"""At least 100 recoveries from faults drawn at random: `make test-faults`, outside the usual tests.

Every run breaks a tiny model on two CPU ranks up to five times, on random ranks and in random steps, and must equal the
run without faults bit by bit. Prints a line for each run and a table at the end, as it is kept in benchmarks/faults.md.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from fullshard.drills.drill import Outcome
from fullshard.drills.kinds import DRILLS, STEP, Drill, in_one_run, to_rank
from tests.drills.broken_runs import WORLD, prepared

RECOVERIES, IN_A_RUN, STEPS = 100, 5, 18


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


def main(seed: int = 0) -> int:
    draw, found, failed = random.Random(seed), Counter[str](), list[Outcome]()
    with tempfile.TemporaryDirectory(prefix="fullshard-faults-") as folder:
        runs = prepared(Path(folder), steps=STEPS)
        for number, drills in enumerate(rounds(draw), start=1):
            outcome = runs.run(drawn(number, drills, draw))
            failed += [outcome] if outcome.problem else []
            found.update(each.title for each in drills if outcome.problem is None)
            names, word = ", ".join(each.name for each in drills), outcome.problem or "recovered"
            print(f"{sum(found.values()):4}  {outcome.seconds:6.1f} s  {word}: {names}", flush=True)
            if outcome.problem:
                print(runs.output(outcome.drill.name), file=sys.stderr)
            if sum(found.values()) >= RECOVERIES:
                break
    print("\n| fault | recoveries |\n|---|---|")
    for drill in DRILLS:
        print(f"| {drill.title} | {found[drill.title]} |")
    print(f"\n{sum(found.values())} recoveries in {number} runs; {len(failed)} runs failed")
    return len(failed) > 0


if __name__ == "__main__":
    sys.exit(main())
