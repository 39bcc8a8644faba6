"""What all ranks must have in common: facts, which are compared, and whether work that may fail has succeeded.

Every rank calls with its own facts, and all get the same answer: each difference with its key, ranks and values.
Must not know what the facts are about, nor what the work does.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from fullshard.dist import reduce
from fullshard.errors import CheckpointError, one_line

Facts = Mapping[str, str | None]
"""Values by key; None: this rank has nothing to compare."""

SPACE = "Check disk space and permissions; earlier checkpoints are complete."
_SHOWN = 3


def differences(facts: Facts) -> list[str]:
    """What the ranks disagree on: `optimizer.lr is 0.01 on rank 0 (a), 0.001 on rank 1 (b)`."""
    # Compare a hash first: facts are sent in full only if they differ.
    digest = hashlib.blake2b(json.dumps(sorted(facts.items())).encode(), digest_size=16).hexdigest()
    if len(set(reduce.gather_objects(digest))) == 1:
        return []
    every: list[Facts] = reduce.gather_objects(dict(facts))
    names = hosts()
    found = []
    for key in sorted(set().union(*every)):
        values = [held.get(key, "not set") for held in every]
        if len({value for value in values if value is not None}) > 1:
            found.append(f"{key} is {spread(values, names)}")
    return found


def some(found: Sequence[str]) -> str:
    """The first differences, and the number of others."""
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return "; ".join(found[:_SHOWN]) + more


def hosts() -> list[str]:
    return reduce.gather_objects(socket.gethostname())


def spread(values: Sequence[str | None], names: Sequence[str]) -> str:
    """`2.11 on rank 0 (a), 2.12 on ranks 1, 2 (b)`."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        if value is not None:
            ranks.setdefault(value, []).append(rank)
    return ", ".join(f"{value} on {on_ranks(group, names)}" for value, group in ranks.items())


def on_ranks(ranks: Iterable[int], names: Sequence[str]) -> str:
    """`ranks 1, 2 (b)`."""
    ranks = list(ranks)
    numbers = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    places = list(dict.fromkeys(names[rank] for rank in ranks))
    shown = ", ".join(places[:8]) + (", ..." if len(places) > 8 else "")
    return f"rank{'' if len(ranks) == 1 else 's'} {numbers} ({shown})"


@contextlib.contextmanager
def all_or_fail(problem: str, *, advice: str = SPACE, group: Any = None) -> Iterator[None]:
    """If the body fails on one rank, raises the same CheckpointError on every rank. All ranks meet at its end."""
    reason = None
    try:
        yield
    except CheckpointException as error:  # DCP wraps the errors of all ranks in one
        reason = "; ".join(f"rank {rank}: {one_line(failed)}" for rank, (failed, _) in sorted(error.failures.items()))
    except CheckpointError as error:
        reason = str(error)
    except Exception as error:  # whatever it is, the other ranks must know
        reason = f"rank {reduce.place()[1]}: {one_line(error)}"
    reasons = [found for found in dict.fromkeys(reduce.gather_objects(reason, group=group)) if found]
    if reasons:
        raise CheckpointError(f"{problem} ({'; '.join(reasons)}). {advice}") from None
