"""Work that may fail on one rank, and then fails on all of them. Must not know what it does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from fullshard.dist import reduce
from fullshard.errors import CheckpointError

SPACE = "Check disk space and permissions; earlier checkpoints are complete."


@contextlib.contextmanager
def all_or_fail(problem: str, *, advice: str = SPACE, group: Any = None) -> Iterator[None]:
    """If the body fails on one rank, raises the same error on every rank. All ranks meet at its end."""
    reason = None
    try:
        yield
    except (Exception, CheckpointException) as error:  # the other ranks must know, whatever it is
        reason = _reason(error)
    reasons = [found for found in dict.fromkeys(reduce.gather_objects(reason, group=group)) if found]
    if reasons:
        raise CheckpointError(f"{problem} ({'; '.join(reasons)}). {advice}") from None


def _reason(error: BaseException) -> str:
    """What went wrong, and on which rank; DCP wraps the errors of all ranks in one."""
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {_words(failed)}" for rank, (failed, _) in sorted(error.failures.items()))
    if isinstance(error, CheckpointError):
        return str(error)
    return f"rank {torch.distributed.get_rank()}: {_words(error)}"


def _words(error: BaseException) -> str:
    said = str(error).strip().splitlines()
    if isinstance(error, (OSError, CheckpointError)) and said:
        return said[0]
    return f"{type(error).__name__}: {said[0] if said else 'no text'}"
