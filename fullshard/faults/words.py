"""The evidence about all ranks, merged into a few sentences: who is where, who waits for whom, and what to do.

Pure functions from evidence to text. Must not read files or processes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fullshard.faults.evidence import Rank
from fullshard.faults.flight import Collective
from fullshard.faults.stacks import Frame
from fullshard.formatting.plural import join_words

HANG = "The run hangs"
"""How the first line of every report of a hang begins."""
_PACKAGE = f"{Path(__file__).parent.parent}/"
_LIBRARY = re.compile(r"(?:site|dist)-packages/(.*)$")
_STANDARD = re.compile(r"/lib(?:64)?/python3[^/]*/(?!site-packages|dist-packages)(.*)$")
_PLUMBING = ("dist/", "faults/")
_ENTRY = ("loop.py", "run.py", "cli.py", "__main__.py")
_BACKWARD = ("pre_backward", "post_backward", "_engine_run_backward", "_root_post_backward_final_callback")
"""Calls of FSDP and of torch's engine that only a backward pass makes."""
_MOMENT_S = 2.0
"""A rank that has moved within this time is moving."""
_DOING = {
    "setup": "in the setup before the first step",
    "data": "in the data loader",
    "compute": "computing step {step}",
    "log": "logging step {step}",
    "evaluate": "in the evaluation after step {step}",
    "save": "saving after step {step}",
}


@dataclass(frozen=True)
class Standing:
    """Where a rank is, as the end of a sentence that begins with its number."""

    one: str
    """After "Rank 3 "."""
    many: str
    """After "Ranks 0 to 2 "."""
    age: float
    waits: bool = False
    """Whether it only waits for other ranks."""
    ended: bool = False


def report(ranks: Sequence[Rank], *, world: int | None = None) -> list[str]:
    """The sentences about a run that stands still, the ranks that keep the others waiting first."""
    standing = {each.rank: _standing(each) for each in ranks}
    suspects = [rank for rank, where in standing.items() if not where.waits and not where.ended]
    groups: dict[tuple[bool, str], list[int]] = {}
    for rank in [*suspects, *(rank for rank in standing if rank not in suspects)]:
        groups.setdefault((standing[rank].waits, standing[rank].one), []).append(rank)
    lines = [_sentence(members, standing) for members in groups.values()]
    absent = sorted(set(range(world or 0)) - set(standing))
    if absent:
        lines.append(f"{_ranks(absent)} left no heartbeat in this folder.")
    return [*lines, *_verdict(ranks, standing, suspects)]


def moving(ranks: Sequence[Rank]) -> list[str]:
    """`All ranks are moving, at step 4.`; nothing if one of them has not moved for a moment."""
    if any(rank.age > _MOMENT_S or rank.state != "running" for rank in ranks):
        return []
    return [f"{'All ranks are' if len(ranks) > 1 else 'The rank is'} moving,{_at(ranks)}."]


def title(ranks: Sequence[Rank]) -> str:
    """`The run hangs at step 4: no rank has moved for 70 s.`"""
    still = min((rank.age for rank in ranks if rank.state not in ("finished", "failed")), default=0.0)
    return f"{HANG}{_at(ranks)}: no rank has moved for {seconds(still)}."


def _at(ranks: Iterable[Rank]) -> str:
    steps = [rank.step + 1 for rank in ranks if rank.step >= 0]
    return f" at step {max(steps)}" if steps else " before the first step"


def seconds(age: float) -> str:
    """`70 s`, `12 min`, `3.5 h`."""
    if age < 120:
        return f"{age:.0f} s"
    return f"{age / 60:.0f} min" if age < 7200 else f"{age / 3600:.1f} h"


def _ranks(members: Sequence[int]) -> str:
    """`Rank 3`, `Ranks 0 to 2`, `Ranks 0, 1 and 4`."""
    if len(members) == 1:
        return f"Rank {members[0]}"
    runs: list[list[int]] = []
    for rank in sorted(members):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"Ranks {join_words(', '.join(parts).split(', '))}"


def _sentence(members: Sequence[int], standing: dict[int, Standing]) -> str:
    where = max((standing[rank] for rank in members), key=lambda each: each.age)
    words = where.one if len(members) == 1 else where.many
    return f"{_ranks(members)} {words.replace('{age}', seconds(where.age))}"


def _standing(rank: Rank) -> Standing:
    if rank.state in ("finished", "failed"):
        end = "finished" if rank.state == "finished" else "ended with an error"
        return Standing(f"has {end}.", f"have {end}.", rank.age, ended=True)
    if rank.state == "gone":
        return _same(f"gone: its process {rank.process} has ended. It was last {doing(rank)}.", rank)
    if rank.state == "stopped":
        return _same(f"stopped (process {rank.process}, by SIGSTOP or a debugger) while {doing(rank)}.", rank)
    if not rank.stack and not rank.collectives:
        return _same(f"{doing(rank)}, on host {rank.host}, and has not answered (no beat for {{age}}).", rank)
    if rank.collectives is None and rank.stack:
        call = f"in native code that holds the GIL, called at {place(rank.stack)}, while {doing(rank)}"
        return _same(f"{call}. It has not moved for {{age}}.", rank)
    if in_loader(rank):
        return _same(f"in the data loader ({_read(rank)}). It has not moved for {{age}}.", rank)
    if waits := rank.waits_in:
        end = f"waited in {collective(waits)} for {{age}}."
        return Standing(f"has {end}", f"have {end}", waits.age, waits=True)
    at = f" ({place(rank.stack)})" if rank.stack else ""
    return _same(f"{doing(rank)}{at}. It has not moved for {{age}}.", rank)


def _same(words: str, rank: Rank) -> Standing:
    many = words.replace("It has not", "They have not").replace("and has not", "and have not")
    return Standing(f"is {words}", f"are {many}", rank.age)


def doing(rank: Rank) -> str:
    """What a rank does by its heartbeat: `computing step 4, in unit model.layers.12`."""
    words = _DOING.get(rank.phase, "between two phases").format(step=rank.step + 1)
    return f"{words}, last at the {rank.act} of unit {rank.unit}" if rank.unit and rank.phase == "compute" else words


def in_loader(rank: Rank) -> bool:
    """Whether a rank waits for data, also within an evaluation."""
    return rank.phase == "data" or any(frame.file.endswith("fullshard/data/loader.py") for frame in rank.stack)


def _read(rank: Rank) -> str:
    """Where the data is read: in this process, or in a worker that is at work."""
    busy = [stack for stack in rank.workers if any(frame.file.endswith("data/loader.py") for frame in stack)]
    for stack in busy:
        return f"{place(stack)}, in a worker process"
    return place(rank.stack)


def collective(each: Collective) -> str:
    """`the all-gather of unit model.layers.12 in the backward pass`, `the all-reduce called at my_loss.py:12 loss`."""
    if each.unit:
        back = any(frame.name in _BACKWARD for frame in each.frames)
        return f"the {each.op} of unit {each.unit} in the {'backward' if back else 'forward'} pass"
    return f"the {each.op}{f' called at {place(each.frames)}' if each.frames else ''}"


def place(stack: Sequence[Frame]) -> str:
    """The line that tells most: the innermost one of the user's own code, else of fullshard, else of a library."""
    kinds = [_kind(frame) for frame in stack]
    # What called the run, such as a script with fullshard.train, says nothing about where it is.
    kinds = kinds[: kinds.index("entry") + 1 if "entry" in kinds else None]
    for wanted in ("user", "fullshard", "entry", "plumbing", "library", "standard"):
        if wanted in kinds:
            frame = stack[kinds.index(wanted)]
            return f"{_short(frame.file)}:{frame.line} {frame.name}"
    return "an unknown place"


def _kind(frame: Frame) -> str:
    inside = frame.file.partition(_PACKAGE)[2] or frame.file.partition("site-packages/fullshard/")[2]
    if inside in _ENTRY:
        return "entry"
    if inside:
        return "plumbing" if inside.startswith(_PLUMBING) else "fullshard"
    if _LIBRARY.search(frame.file):
        return "library"
    return "standard" if frame.file.startswith("<") or _STANDARD.search(frame.file) else "user"


def _short(file: str) -> str:
    if file.startswith(_PACKAGE):
        return f"fullshard/{file.removeprefix(_PACKAGE)}"
    found = _LIBRARY.search(file) or _STANDARD.search(file)
    return found[1] if found else file.rpartition("/")[2]


def _verdict(ranks: Sequence[Rank], standing: dict[int, Standing], suspects: Sequence[int]) -> list[str]:
    waiting = [each for each in ranks if standing[each.rank].waits]
    if suspects and waiting:
        return [f"{_ranks(suspects)} {'keeps' if len(suspects) == 1 else 'keep'} the others waiting."]
    calls = {rank.rank: call for rank in waiting if (call := rank.waits_in)}
    if len(calls) < 2 or suspects:
        return []
    if len({(call.op, call.unit, call.group, call.seq) for call in calls.values()}) > 1:
        if left := _left_behind(ranks, calls):
            behind, ahead = left
            return [
                f"{_ranks(ahead)} {'has' if len(ahead) == 1 else 'have'} completed the {calls[behind].op} that rank "
                f"{behind} still waits in: what was sent has not arrived. Look at the network between them."
            ]
        return [
            "The ranks are in different collectives, and each waits for the others to join its own. All ranks must "
            f"make the same calls in the same order: {_called(calls)}."
        ]
    if len({call.sizes for call in calls.values()}) > 1:
        shapes = [f"{call.sizes} on rank {rank}" for rank, call in calls.items()]
        return [f"The ranks bring tensors of different shapes to it: {', '.join(shapes)}."]
    return [
        "All ranks are in the same collective and none has failed: look at the network between them, and at the GPUs "
        "(nvidia-smi, dmesg)."
    ]


def waited_for_in(text: str) -> int:
    """The rank that keeps the others waiting, in the words about a hang; -1 if they name none, or several."""
    found = re.search(r"^ *Rank (\d+) keeps the others waiting\.", text, re.MULTILINE)
    return int(found[1]) if found else -1


def _left_behind(ranks: Sequence[Rank], calls: dict[int, Collective]) -> tuple[int, list[int]] | None:
    """A rank that waits in a collective which others have completed, and those others."""
    done = {rank.rank: {_key(each) for each in rank.collectives or () if not each.pending} for rank in ranks}
    for behind, call in calls.items():
        if ahead := [rank for rank in calls if _key(call) in done[rank]]:
            return behind, ahead
    return None


def _key(call: Collective) -> tuple[str, str, int, str | None]:
    """What ranks in the same collective have in common. An all-reduce of another size is another one: gloo may complete
    it on one of the ranks."""
    return call.op, call.group, call.seq, call.sizes if call.op == "all-reduce" else None


def _called(calls: dict[int, Collective]) -> str:
    """Each collective with the line that called it."""
    groups: dict[str, list[int]] = {}
    for rank, call in calls.items():
        at = f" at {place(call.frames)}" if call.frames else ""
        of = f" of unit {call.unit}" if call.unit else ""
        groups.setdefault(f"{call.op}{of}{at}", []).append(rank)
    return "; ".join(f"{_ranks(members).lower()}: {words}" for words, members in groups.items())
