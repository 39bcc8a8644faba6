"""Attempts at a run: starts the ranks, and starts them again after a fault, together with those of the other nodes.

Every attempt has a name, a folder and a store prefix of its own, so that nothing of one reaches the next. Must not know
how nodes meet or how ranks are started: both are handed in.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fullshard.contracts.launcher import Ranks
from fullshard.errors import SetupError
from fullshard.faults import leftovers
from fullshard.faults.nodes import Ended, Nodes, Store
from fullshard.faults.restarts import History
from fullshard.faults.steps import FOLDER

Meet = Callable[[Ranks, int, dict[str, Any]], tuple[Store, list[dict[str, Any]]]]
"""Waits for the other nodes; returns a connection to the store, and what every node says about itself. Takes the ranks,
the number of the attempt, and what this node says."""
Start = Callable[[Ranks, Path, str, Callable[[], bool]], Ended]
"""Runs the ranks of this node once. Takes a folder, the name of the attempt, and whether the ranks were killed because
those of another node had failed."""


def run(
    ranks: Ranks,
    start: Start,
    *,
    meet: Meet,
    ranks_left: Callable[[Ranks], Ranks],
    folder: Path,
    say: Callable[[str], None],
) -> int:
    """Runs the ranks of this node until they end well or may not be started again; returns the exit code of the run."""
    history, neighbours = History(ranks.restarts), _Neighbours(meet)
    try:
        while True:
            place = folder / str(history.attempt)
            place.mkdir()
            os.environ.update({**history.variables(), FOLDER: str(place)})
            try:
                name = neighbours.meet(ranks, history.attempt)
            except SetupError as error:
                if not history.attempt:
                    raise
                say(f"The nodes did not meet again for restart {history.attempt}. {error}")
                return 1
            ended = start(ranks, place, name, neighbours.stopped_here)
            if ended.code and not ended.is_final:
                leftovers.end_all(name)
            left = ranks_left(ranks) if ended.code else ranks
            ends = neighbours.exchange(replace(ended, devices=left.per_node))
            verdict = history.judge(ends, replace(ranks, device_ids=left.device_ids))
            for line in verdict.lines:
                say(line)
            if verdict.ranks is None:
                return verdict.code
            ranks = verdict.ranks
    finally:
        neighbours.close()


class _Neighbours:
    """This node among the others; a single node has none."""

    def __init__(self, meet: Meet) -> None:
        self._meet, self._name = meet, ""
        self._nodes: Nodes | None = None

    def meet(self, ranks: Ranks, attempt: int) -> str:
        """Waits for the other nodes; returns the name of the attempt: the one that node 0 has drawn."""
        self._name = uuid.uuid4().hex
        if ranks.nodes > 1:
            store, members = self._meet(ranks, attempt, {"name": self._name})
            self._name = str(members[0]["name"])
            if self._nodes is None:
                self._nodes = Nodes(store, ranks.node_rank, members, timeout_s=ranks.timeout_s, stop=self._stop)
            self._nodes.begin(attempt)
        return self._name

    def _stop(self) -> None:
        leftovers.kill(self._name)

    def stopped_here(self) -> bool:
        return self._nodes is not None and self._nodes.stopped_here

    def exchange(self, mine: Ended) -> list[Ended]:
        return [mine] if self._nodes is None else self._nodes.exchange(mine)

    def close(self) -> None:
        if self._nodes is not None:
            self._nodes.close()
