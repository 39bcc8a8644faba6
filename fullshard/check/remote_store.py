"""Whether the remote store of a run works: its library is installed, and a small file can be written, read and deleted.

Must not know checkpoints or ranks beyond their number.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from fullshard.check.findings import Finding, error, of, ok
from fullshard.checkpoint import paths
from fullshard.errors import FullshardError, one_line
from fullshard.recipe import Recipe

PATIENCE_S = 60.0
"""A store that needs longer for a few bytes is not reachable; libraries retry for minutes."""


def look(recipe: Recipe, *, num_ranks: int, patience_s: float = PATIENCE_S) -> Iterator[Finding]:
    """No findings if checkpoints go to the run folder."""
    address = recipe.checkpoint.store
    if address is None:
        return
    if address.startswith("memory://") and num_ranks > 1:
        text = f"checkpoint.store = {address} is the memory of one process, but {num_ranks} ranks must share it."
        yield error("store", text, "Use a store that all ranks can reach: file:///shared/folder, s3://bucket/runs.")
        return
    begun = time.monotonic()
    try:
        _try(paths.place(address), patience_s=patience_s)
    except FullshardError as mistake:
        yield of("store", mistake)
    except Exception as problem:  # whatever the store's library raises
        text = f"checkpoint.store = {address}: writing and reading back a small file failed ({one_line(problem)})."
        yield error("store", text, paths.REACH)
    else:
        yield ok("store", f"{address}: a small file written, read and removed in {time.monotonic() - begun:.1f} s")


def _try(folder: Path, *, patience_s: float) -> None:
    """Raises what goes wrong; in a thread, since a library may wait for minutes."""
    raised: list[BaseException] = []

    def attempt() -> None:
        try:
            _round_trip(folder)
        except BaseException as problem:
            raised.append(problem)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(patience_s)
    if thread.is_alive():
        raise TimeoutError(f"no answer within {patience_s:g} s")
    if raised:
        raise raised[0]


def _round_trip(folder: Path) -> None:
    made = [] if paths.is_flat(folder) else [path for path in (folder, *folder.parents) if not paths.exists(path)]
    token = secrets.token_hex(8)
    probe = folder / f".fullshard-check-{token}"
    try:
        paths.make(folder)
        probe.write_text(token)
        if (found := probe.read_text()) != token:
            raise OSError(f"{token} was written, {found[:32]} was read")
        probe.unlink()
        if paths.exists(probe):
            raise OSError(f"{probe} was removed, but still exists")
    finally:
        for path in made:
            with contextlib.suppress(Exception):  # another rank's file may be in it by now
                path.rmdir()
