"""Launchers that end: each one first tells the others how its ranks ended."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from fullshard.faults import nodes
from fullshard.faults.nodes import Ended, Nodes


def test_a_launcher_that_ends_last_tells_node_0_before_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_ALONE_S", 0.0)
    monkeypatch.setattr(nodes, "_SILENT_S", 600.0)
    store, members = HashStore(), [{"host": "a"}, {"host": "b"}]
    first, second = (Nodes(store, node, members, timeout_s=60, stop=lambda: None) for node in (0, 1))
    ends = [Ended(0, "a", 1, rank=0, why="ended with exit code 1"), Ended(1, "b", 1, rank=1, why="was stopped")]
    with ThreadPoolExecutor() as pool:
        heard = pool.submit(first.exchange, ends[0])
        while not second._round.ends:
            time.sleep(0.01)
        assert second.exchange(ends[1]) == ends
        second.close()  # as the command does at once
        assert heard.result() == ends
    first.close()
