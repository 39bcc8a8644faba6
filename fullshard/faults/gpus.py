"""Which GPUs still answer. Must not import torch here: this process remembers what it saw first."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from fullshard.contracts.launcher import Ranks

_COUNT = "import torch; print(torch.cuda.device_count())"
_USE = "import torch; print(torch.ones(1, device='cuda').item())"
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def ranks_left(ranks: Ranks, environ: Mapping[str, str] = os.environ) -> Ranks:
    """As many of these ranks as GPUs answer, on those GPUs; no rank if CUDA cannot be asked. `environ` is that of the
    ranks: where GPUs were chosen by their ids, it shows these and no others."""
    visible = [name.strip() for name in environ.get(_VISIBLE, "").split(",") if name.strip()]
    ids = ranks.device_ids or tuple(range(len(visible) or _count(environ)))
    names = visible or [str(each) for each in ids]
    # One at a time: CUDA hides every GPU that is listed after one it cannot find.
    with ThreadPoolExecutor() as pool:
        answers = pool.map(lambda name: _asked(_USE, {**environ, _VISIBLE: name}) is not None, names)
        left = tuple(each for each, answer in zip(ids, answers, strict=False) if answer)[: ranks.per_node]
    same = left == ids[: ranks.per_node] and len(left) == ranks.per_node
    return ranks if same else replace(ranks, per_node=len(left), device_ids=left)


def _count(environ: Mapping[str, str]) -> int:
    said = _asked(_COUNT, environ)
    return int(said) if said and said.isdigit() else 0


def _asked(code: str, environ: Mapping[str, str]) -> str | None:
    """The last word that a new Python prints; None if it fails."""
    try:
        asked = subprocess.run(
            [sys.executable, "-c", code], env=dict(environ), capture_output=True, text=True, timeout=300, check=True
        )
        return asked.stdout.split()[-1]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None
