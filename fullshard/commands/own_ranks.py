"""Starts the ranks of a command that evaluates or generates: the same command, once on each of them.

Must not know what the command does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from fullshard.contracts.launcher import Topology
from fullshard.dist import env
from fullshard.setup.on_ranks import ranks_of


def start_own(words: Sequence[str], topology: Topology) -> int | None:
    """Starts ranks that run `fullshard WORDS` and returns their exit code; None if this process is a rank itself."""
    if env.detect(os.environ).launcher != "none":
        return None
    ranks = ranks_of(topology)
    if ranks.per_node > 1:
        return topology.launcher.start([sys.executable, "-m", "fullshard", *words], ranks)
    if ranks.device_ids:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(ranks.device_ids[0])
    return None
