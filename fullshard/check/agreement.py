"""What only all ranks together can check: one run, one clock, one file system.

Every rank runs the same collectives whatever it finds, and all return the same findings.
Must not know models or data.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch

from fullshard.check.findings import Finding, error, ok, warning
from fullshard.checkpoint import paths
from fullshard.contracts.world import World
from fullshard.dist import agreement, reduce
from fullshard.dist.agreement import on_ranks, spread
from fullshard.errors import one_line
from fullshard.formatting.plural import counted
from fullshard.proofs.same_run import Subject, compare
from fullshard.recipe import Recipe

SKEW_WARNING_S = 1.0
"""Above this, log lines of two nodes cannot be matched, and files seem to come from the future."""
SKEW_ERROR_S = 60.0
"""Above this, locks and caches that compare file times fail."""
_ROUNDS = 3


def among_ranks(
    recipe: Recipe,
    world: World,
    compared: Sequence[Subject],
    *,
    clock: Callable[[], float] = time.time,
    folder: Path | None = None,
    patience_s: float = 10.0,
) -> list[Finding]:
    """Call it on every rank once they are connected; `compared` must be equal on all of them. `folder` replaces
    `output`; a network file system gets `patience_s` to show a file."""
    hosts = agreement.hosts()
    shown = list(dict.fromkeys(hosts))
    where = f"{counted(world.size, 'rank')} on {counted(len(shown), 'host')}"
    found = [ok("hosts", f"{where}: {', '.join(shown[:8])}{', ...' if len(shown) > 8 else ''}")]
    found += _devices(hosts, world)
    found += _comparisons(compared)
    found += _clocks(clock, hosts)
    address = recipe.checkpoint.store
    folder = folder or (paths.place(address) if address else recipe.output)
    found += _files(folder, hosts, world, patience_s=patience_s)
    # Every rank returns the findings of rank 0: other nodes may spell paths differently.
    agreed: list[Finding] = reduce.from_main(found)
    return agreed


def _comparisons(compared: Iterable[Subject]) -> Iterator[Finding]:
    for subject in compared:
        text = compare(subject)
        yield ok(subject.name, subject.agreed) if text is None else error(subject.name, text, subject.remedy)


def _devices(hosts: list[str], world: World) -> Iterator[Finding]:
    name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"
    devices: list[str] = reduce.gather_objects(name)
    if len(set(devices)) > 1:
        remedy = "All ranks wait for the slowest one, and the smallest memory limits the batch. Use identical nodes."
        yield warning("devices", f"the ranks have different devices: {spread(devices, hosts)}.", remedy)


def _clocks(clock: Callable[[], float], hosts: list[str]) -> Iterator[Finding]:
    """Reads the clocks right after a collective; the smallest difference counts, since a busy rank is late."""
    rounds = []
    for _ in range(_ROUNDS):
        reduce.gather_objects(None)
        rounds.append(reduce.gather_objects(clock()))
    skews = [min((times[rank] - times[0] for times in rounds), key=abs) for rank in range(len(hosts))]
    worst = max(range(len(hosts)), key=lambda rank: abs(skews[rank]))
    if abs(skews[worst]) <= SKEW_WARNING_S:
        yield ok("clocks", f"less than {SKEW_WARNING_S:g} s apart" if len(hosts) > 1 else "one rank")
        return
    late = "ahead of" if skews[worst] > 0 else "behind"
    level = error if abs(skews[worst]) > SKEW_ERROR_S else warning
    apart = f"{abs(skews[worst]):,.1f} s {late} rank 0 ({hosts[0]}); at most {SKEW_WARNING_S:g} s is allowed."
    remedy = "Synchronise the clocks of all nodes with chronyd or systemd-timesyncd."
    yield level("clocks", f"the clock of rank {worst} ({hosts[worst]}) is {apart}", remedy)


def _files(folder: Path, hosts: list[str], world: World, *, patience_s: float) -> Iterator[Finding]:
    """Rank 0 writes a file that all must see, and all write one that rank 0 must see."""
    token = reduce.from_main(secrets.token_hex(8))
    made: list[Path] = []
    own = folder / f".fullshard-check-{token}-{world.rank}"
    try:
        problem: str | None = None
        if world.is_main:
            problem = _attempt(lambda: made.extend(_make(folder)))
        # The other ranks create no folder: if they cannot see the one that rank 0 made, it is not shared.
        absent = reduce.from_main(problem) or _attempt(lambda: _require_folder(folder, patience_s))
        written = absent or _attempt(lambda: own.write_text(token))
        problems: list[str | None] = reduce.gather_objects(written)
        peers = range(world.size) if world.is_main else [0]
        files = {rank: folder / f".fullshard-check-{token}-{rank}" for rank in peers if problems[rank] is None}
        unseen = [rank for rank, file in files.items() if not _seen(file, token, patience_s=patience_s)]
        every: list[list[int]] = reduce.gather_objects(unseen)
    finally:
        with contextlib.suppress(Exception):  # whatever class the store's library raises
            own.unlink(missing_ok=True)
    reduce.gather_objects(None)  # a folder made for the files is empty only when all of them are gone
    for path in reversed(made):
        with contextlib.suppress(OSError):
            path.rmdir()
    yield from _file_findings(folder, problems, every, hosts)


def _file_findings(
    folder: Path, problems: list[str | None], unseen: list[list[int]], hosts: list[str]
) -> Iterator[Finding]:
    failed = [rank for rank, problem in enumerate(problems) if problem]
    blind = {rank for rank, missing in enumerate(unseen) if 0 in missing} | {rank for rank in unseen[0] if rank}
    key = "checkpoint.store" if paths.is_remote(folder) else "output"
    share = f"Put output on a file system that all nodes share, at one path: output=/shared/runs (now {folder})."
    if paths.is_remote(folder):
        share = f"Use a store that all nodes reach under one address: checkpoint.store=s3://bucket/runs (now {folder})."
    if failed:
        reasons = "; ".join(dict.fromkeys(str(problems[rank]) for rank in failed))
        text = f"{key} = {folder}: {on_ranks(failed, hosts)} cannot write there ({reasons})."
        elsewhere = f"Choose a folder that you may write to: {key}=DIR, or --output DIR."
        some = len(failed) < len(hosts)
        yield error("shared files", text, f"{share} Check permissions and space." if some else elsewhere)
    elif blind:
        who = f"{on_ranks(sorted(blind), hosts)} and rank 0 ({hosts[0]})"
        yield error("shared files", f"{key} = {folder}: {who} do not see each other's files.", share)
    else:
        many = "rank 0 sees every rank's file, and every rank sees rank 0's"
        yield ok("shared files", f"{folder}: {many if len(hosts) > 1 else 'written and read'}")


def _make(folder: Path) -> list[Path]:
    """Makes the folder; returns those that did not exist, outermost first."""
    missing = [] if paths.is_flat(folder) else [path for path in (folder, *folder.parents) if not path.exists()]
    paths.make(folder)
    return missing[::-1]


def _require_folder(folder: Path, patience_s: float) -> None:
    if not paths.is_flat(folder) and not _wait(folder.is_dir, patience_s=patience_s):
        raise FileNotFoundError(2, "no such folder", str(folder))


def _attempt(act: Callable[[], object]) -> str | None:
    """The error message of the system or the store's library; None if it worked."""
    try:
        act()
    except OSError as problem:
        return problem.strerror or str(problem)
    except Exception as problem:
        return one_line(problem)
    return None


def _seen(path: Path, token: str, *, patience_s: float) -> bool:
    def there() -> bool:
        with contextlib.suppress(Exception):
            list(path.parent.iterdir())  # makes a network file system ask its server again
            return path.read_text() == token
        return False

    return _wait(there, patience_s=patience_s)


def _wait(there: Callable[[], bool], *, patience_s: float) -> bool:
    end = time.monotonic() + patience_s
    while not there():
        if time.monotonic() >= end:
            return False
        time.sleep(0.1)
    return True
