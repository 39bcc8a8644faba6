"""`fullshard autopsy`: where each rank of a run is, while it hangs or after it has ended.

Asks the ranks of this machine for their stacks, reads what the other nodes have written into the shared run folder, and
says it in words. Must not import torch, nor change the run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from fullshard.errors import SetupError
from fullshard.explain import crash
from fullshard.faults import beat, evidence, words
from fullshard.faults.beat import FOLDER, Reading
from fullshard.faults.evidence import Rank
from fullshard.faults.watchdog import AUTOPSY, GRACE_S

STANDS = 1
_LOOK_S = 2.0
_ENDED = ("finished", "failed", "gone")


def autopsy(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of the run, or its name in runs/.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for machines.")] = False,
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long the ranks may take to write their stacks.", min=0.5)
    ] = evidence.ANSWER_S,
) -> None:
    """Say where each rank of a run is: in which line, in which collective, of which unit.

    Run it on a node of the run while it hangs; the run itself is not disturbed. After a run has ended it says what the
    crash folder holds.

    Exit codes: 0 the run moves, or has finished; 1 it stands still, or has ended in a hang or a crash; 2 there is no
    such run, or it has left nothing.
    """
    folder = _folder(run)
    readings = beat.read_all(folder / FOLDER)
    states = {rank: evidence.state_of(reading) for rank, reading in readings.items()}
    if not readings or all(state in _ENDED for state in states.values()):
        code, lines, ranks = _ended(folder, readings)
    else:
        code, lines, ranks = _running(folder, wait_s=wait)
    if as_json:
        typer.echo(
            json.dumps({"run": str(folder), "lines": lines, "ranks": [_plain(rank) for rank in ranks]}, indent=1)
        )
    else:
        typer.echo("\n".join(lines))
    raise typer.Exit(code)


def _folder(run: str) -> Path:
    for folder in (Path(run), Path("runs") / run):
        if folder.is_dir():
            return folder
    raise SetupError(
        f"{run}: there is no such run folder, nor runs/{run} here. Give the folder that the run named in its header as "
        "`run folder`."
    )


def _running(folder: Path, *, wait_s: float) -> tuple[int, list[str], list[Rank]]:
    """Looks twice; asks for dumps only if a rank has not moved in between, and looks again: a step may take longer."""
    place = folder / FOLDER
    before = beat.read_all(place)
    time.sleep(_LOOK_S)
    readings, asked = beat.read_all(place), None
    if not _all_moved(before, readings):
        asked = evidence.ask(place, readings, wait_s=wait_s)
        readings = beat.read_all(place)
    if _all_moved(before, readings):
        return 0, [_healthy(folder, readings)], evidence.gather(place, {})
    ranks = evidence.gather(place, readings, asked=asked)
    lines = words.report(ranks, world=_world(readings))
    lines += [
        f"`kill -CONT {rank.process}` lets rank {rank.rank} continue." for rank in ranks if rank.state == "stopped"
    ]
    return STANDS, [_title(ranks), *(f"  {line}" for line in lines), f"  {_outlook(ranks, readings)}"], ranks


def _all_moved(before: Mapping[int, Reading], now: Mapping[int, Reading]) -> bool:
    moved = [rank for rank in now if rank not in before or now[rank].count > before[rank].count]
    return len(moved) == len(now) == _world(now)


def _world(readings: Mapping[int, Reading]) -> int:
    return max((int(reading.facts["world"]) for reading in readings.values()), default=0)


def _title(ranks: list[Rank]) -> str:
    still = min(rank.age for rank in ranks)
    if still < _LOOK_S:
        return "Some ranks do not move."
    return words.title(ranks).replace(words.HANG, "The run stands still")


def _outlook(ranks: list[Rank], readings: Mapping[int, Reading]) -> str:
    """When the run ends by itself, and where the stacks are."""
    place = f"All stacks: {Path(FOLDER) / 'rank-*.txt'} in the run folder."
    limit, why = _limit(ranks, readings)
    if limit is None:
        return f"It does not end by itself: {why}. {place}"
    left = limit - min(rank.age for rank in ranks)
    ends = f"It ends by itself after {words.seconds(limit)} without progress ({why})"
    return f"{ends}, in {words.seconds(left)}. {place}" if left > 0 else f"{ends}. {place}"


def _limit(ranks: list[Rank], readings: Mapping[int, Reading]) -> tuple[float | None, str]:
    """How long the run may stand still where it is, and why; None: for as long as it likes."""
    timeout_s = max(float(reading.facts["timeout_s"]) for reading in readings.values())
    if any(reading.must_move for reading in readings.values()) or any(rank.state == "stopped" for rank in ranks):
        return timeout_s, "topology.timeout_s"
    waits = [call.timeout_s - GRACE_S for rank in ranks if (call := rank.waits_in)]
    if waits:
        longer = max(waits) > timeout_s
        return max(timeout_s, *waits), "ranks wait that long for each other here" if longer else "topology.timeout_s"
    return None, "in this phase a rank may take as long as it needs"


def _healthy(folder: Path, readings: Mapping[int, Reading]) -> str:
    steps = [reading.step + 1 for reading in readings.values()]
    at = f"step {max(steps)}" if max(steps) > 0 else "the setup before the first step"
    ago = max(reading.age() for reading in readings.values())
    every = "its rank moves" if len(readings) == 1 else f"all {len(readings)} ranks move"
    return f"{folder} runs: it is at {at}, and {every}; the last sign of life was {ago:.1f} s ago."


def _ended(folder: Path, readings: Mapping[int, Reading]) -> tuple[int, list[str], list[Rank]]:
    """What a run that no longer runs has left."""
    made = crash.newest(folder)
    if not readings:
        if finished := _finished(folder):
            return 0, [f"{folder} is not running: {finished}."], []
        if made is None:
            raise SetupError(
                f"{folder} is not running and has left neither a heartbeat nor a crash folder. If it was just started, "
                "its ranks are still preparing data: try again when the header has been printed.",
            )
    ranks = evidence.gather(folder / FOLDER, readings)
    lines = [f"{folder} is not running."]
    told = made / AUTOPSY if made else None
    if told is not None and told.exists():
        lines += ["It ended in a hang:", *(f"  {line}" for line in _read(told))]
    else:
        lines += [f"  Rank {rank.rank} was last {words.doing(rank)}{_how(rank)}." for rank in ranks]
        lines += [f"  {line}" for line in _last_words(made)] if made else []
    return STANDS, [*lines, *([f"Crash folder: {made}"] if made else [])], ranks


def _how(rank: Rank) -> str:
    if rank.state == "gone" and rank.stack and rank.collectives is None:
        return f"; its watchdog ended it in native code that held the GIL, called at {words.place(rank.stack)}"
    if rank.state == "gone":
        return f"; its process {rank.process} ended without a word: it was killed"
    return "; it ended with an error" if rank.state == "failed" else ""


def _last_words(made: Path) -> list[str]:
    """The last line that each rank left in the crash folder."""
    found = []
    for rank, said in sorted(crash.left_behind(made).items()):
        lines = [line.strip() for line in said.text.splitlines() if line.strip()]
        if crash.is_victim(said.text):
            found.append(f"Rank {rank} lost another rank.")
        elif lines:  # the launcher writes for a rank that could not
            found.append(lines[-1] if lines[-1].startswith(f"Rank {rank} ") else f"Rank {rank} said: {lines[-1]}")
    return found


def _finished(folder: Path) -> str | None:
    """How a run has ended that did not fail."""
    try:
        for line in reversed(crash.tail(folder / "metrics.jsonl").splitlines()[-50:]):
            record = json.loads(line)
            if record.get("event") == "finished":
                stopped = "was stopped by a signal and saved" if record.get("stopped") == "signal" else "has finished"
                return f"it {stopped}, at step {record['step']}"
    except (OSError, ValueError, KeyError):
        return None
    return None


def _read(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines()


def _plain(rank: Rank) -> dict[str, Any]:
    waits = rank.waits_in
    found = {key: value for key, value in asdict(rank).items() if key != "collectives"}
    return found | {"waits_in": asdict(waits) if waits else None}
