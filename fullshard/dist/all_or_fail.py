"""Ranks that do something that may fail, and all hear of it. Must not know what they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from fullshard.dist import reduce
from fullshard.errors import CheckpointError

SPACE = "Check disk space and permissions; the checkpoints before it are whole."


def together(act: Callable[[], Any], problem: str, *, advice: str = SPACE, group: Any = None) -> None:
    """Runs `act` and makes every rank fail, for the same reason, when one does."""
    reason = None
    try:
        act()
    except (Exception, CheckpointException) as error:  # whatever it is, the other ranks must hear of it
        reason = _reason(error)
    reasons = [found for found in dict.fromkeys(reduce.gather_objects(reason, group=group)) if found]
    if reasons:
        raise CheckpointError(f"{problem} ({'; '.join(reasons)}). {advice}")


def _reason(error: BaseException) -> str:
    """What went wrong and on which rank; DCP packs the errors of all ranks into one."""
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
