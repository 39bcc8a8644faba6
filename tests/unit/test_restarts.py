"""What follows from a fault: another attempt or the end, the same on every node."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from fullshard.contracts.launcher import Ranks, Restarts
from fullshard.errors import SetupError
from fullshard.faults import leftovers, nodes, restarts, resume_again, steps
from fullshard.faults.nodes import Ended, Nodes
from fullshard.faults.restarts import History, allowed, records, unused

RANKS = Ranks(4, restarts=Restarts(3, per_device=2, rows=16))
KILLED = Ended(0, "a", 1, rank=1, why="was ended by SIGKILL", step=7, devices=4)
LOST = Ended(1, "b", 1, why="has not answered for 12 s", lost=True)
VICTIM = Ended(0, "a", 1, rank=0, why="lost the connection to another rank", victim=True, step=7, devices=4)


def judge(*ends: Ended, history: History | None = None, ranks: Ranks = RANKS) -> restarts.Verdict:
    return (history or History(ranks.restarts)).judge(ends, ranks)


def test_a_fault_starts_all_ranks_again_and_says_why() -> None:
    verdict = judge(KILLED)
    assert verdict.ranks == RANKS
    assert verdict.lines == (
        "Restart 1 of 3: rank 1 was ended by SIGKILL in step 7. All 4 ranks start again from the newest complete "
        "checkpoint; 2 restarts are left.",
    )


@pytest.mark.parametrize("code", [2, 3, 75])
def test_a_code_with_a_meaning_is_final(code: int) -> None:
    verdict = judge(replace(KILLED, code=code))
    assert (verdict.code, verdict.lines, verdict.ranks) == (code, (), None)


def test_a_stop_by_the_user_is_final() -> None:
    assert judge(replace(KILLED, stopped=True)).ranks is None
    on_another = judge(VICTIM, Ended(1, "b", 75, rank=2, why="ended with exit code 75", stopped=True, step=7))
    assert (on_another.code, on_another.ranks) == (75, None)


def test_without_restarts_nothing_is_said() -> None:
    assert judge(KILLED, ranks=Ranks(4)) == restarts.Verdict(1)
    assert judge(replace(KILLED, code=0)) == restarts.Verdict(0)


def test_the_same_step_twice_stops_the_run() -> None:
    history = History(RANKS.restarts)
    assert judge(KILLED, history=history).ranks
    assert judge(replace(KILLED, step=8), history=history).ranks
    verdict = judge(replace(KILLED, rank=2), history=history)
    assert (verdict.code, verdict.ranks) == (1, None)
    assert "This is the second failure in step 7 (the first one led to restart 1)" in verdict.lines[0]
    assert "although 1 restart would be left" in verdict.lines[0]


def test_starts_that_fail_stop_the_run_only_in_a_row() -> None:
    history, starting = History(replace(RANKS.restarts, most=9)), replace(KILLED, step=None)  # type: ignore[type-var]
    assert judge(starting, history=history).ranks
    assert judge(KILLED, history=history).ranks
    assert judge(starting, history=history).ranks
    assert "the second failure before the first step" in judge(starting, history=history).lines[0]


def test_the_restarts_are_counted() -> None:
    history = History(RANKS.restarts)
    for step in (1, 2, 3):
        assert judge(replace(KILLED, step=step), history=history).ranks
    assert judge(replace(KILLED, step=4), history=history).lines == (
        "No restart is left: topology.restarts = 3. Run the same command again to continue from the last checkpoint.",
    )


@pytest.mark.parametrize(
    ("left", "rows", "said"),
    [
        (2, 16, None),
        (2, None, "2 GPUs of 4 are left. The run cannot continue on those: batch.global is not set"),
        (
            3,
            16,
            "3 GPUs of 4 are left. The run cannot continue on those: batch.global = 16 is not a multiple of 3 ranks",
        ),
        (0, 16, "0 GPUs of 4 are left. The run cannot continue on those: no GPU is left."),
    ],
)
def test_fewer_gpus_continue_if_the_batch_can_be_split(left: int, rows: int | None, said: str | None) -> None:
    ranks = replace(RANKS, restarts=Restarts(3, per_device=2, rows=rows), device_ids=(0, 1, 4, 5))
    verdict = judge(replace(KILLED, devices=left), ranks=ranks)
    if said is None:
        assert verdict.ranks == replace(ranks, per_node=left, device_ids=(0, 1))
        assert "in step 7. 2 GPUs of 4 are left. All 2 ranks start again" in verdict.lines[0]
    else:
        assert verdict.ranks is None
        assert verdict.lines[0].startswith(said)


def test_nodes_decide_the_same_and_name_the_other_one() -> None:
    """The fault is on node 1; node 0 has only victims."""
    ends = (VICTIM, Ended(1, "b", 1, rank=5, why="was ended by SIGKILL", step=7, devices=2))
    for node in (0, 1):
        verdict = judge(*ends, ranks=replace(RANKS, nodes=2, node_rank=node))
        assert verdict.ranks == replace(RANKS, nodes=2, node_rank=node, per_node=2)
        assert "Restart 1 of 3: rank 5 on node 1 (host b) was ended by SIGKILL in step 7." in verdict.lines[-1]
        assert (verdict.lines[0] == "Rank 5 on node 1 (host b) was ended by SIGKILL in step 7.") == (node == 0)


def test_a_mistake_on_one_node_is_the_exit_code_of_all() -> None:
    verdict = judge(
        VICTIM, Ended(1, "b", 2, rank=5, why="ended with exit code 2", step=7), ranks=replace(RANKS, nodes=2)
    )
    assert (verdict.code, verdict.ranks) == (2, None)
    assert "Rank 5 on node 1 (host b) ended with exit code 2" in verdict.lines[0]


def test_a_lost_node_ends_the_run_by_name() -> None:
    for mine in (VICTIM, KILLED):  # ranks that noticed it by a hang blame themselves
        verdict = judge(mine, LOST, ranks=replace(RANKS, nodes=2))
        assert (verdict.code, verdict.ranks) == (1, None)
        assert verdict.lines[0] == "Node 1 (host b) has not answered for 12 s."
        assert "with --nodes on those that are left" in verdict.lines[1]
    assert judge(replace(VICTIM, code=0), LOST, ranks=replace(RANKS, nodes=2)).code == 0, "this node had finished"


def test_the_engine_says_how_many_unless_the_recipe_does() -> None:
    assert allowed(None, {}) == 0
    assert allowed(None, {"PET_MAX_RESTARTS": "4"}) == 4
    assert allowed(None, {"TORCHELASTIC_MAX_RESTARTS": "2"}) == 2
    assert allowed(0, {"PET_MAX_RESTARTS": "4"}) == 0
    with pytest.raises(SetupError, match="PET_MAX_RESTARTS=many is not a number of restarts"):
        allowed(None, {"PET_MAX_RESTARTS": "many"})


def test_ranks_of_another_launcher_are_told_who_restarts_them() -> None:
    assert (
        unused(2, {})
        == unused(None, {"RANK": "0"})
        == unused(2, {"RANK": "0", "FULLSHARD_REPORTED_BY_LAUNCHER": ""})
        == []
    )
    assert "torchrun --max-restarts 2" in unused(2, {"RANK": "0"})[0]


def test_metrics_have_every_restart_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = History(RANKS.restarts)
    judge(KILLED, history=history)
    judge(replace(KILLED, step=8), history=history)
    for name, value in history.variables().items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "metrics.jsonl"
    found = list(records(file))
    assert [(r["restart"], r["of"], r["failed_step"], r["rank"]) for r in found] == [(1, 3, 7, 1), (2, 3, 8, 1)]
    assert found[0]["why"] == "rank 1 was ended by SIGKILL in step 7"
    file.write_text(json.dumps(found[0]) + "\n")
    assert list(records(file)) == found[1:]
    monkeypatch.setenv(restarts.START, "another start of the run")
    assert len(list(records(file))) == 2


def test_resume_is_carried_out_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = tmp_path / "checkpoint-3"
    saved.mkdir()
    (saved / "manifest.json").write_text("of an earlier run")
    last: list[Path | None] = [saved]
    monkeypatch.setenv(restarts.START, "one")
    assert resume_again.resume("never", tmp_path, lambda: last[0]) == "never", "it ended before it could start over"
    resume_again.mark("never", tmp_path, lambda: last[0])
    assert resume_again.resume("never", tmp_path, lambda: last[0]) == "auto"
    assert resume_again.resume("RUN/checkpoint-1", tmp_path, lambda: last[0]) == "RUN/checkpoint-1", "nothing was saved"
    (saved / "manifest.json").write_text("the same step, saved again")
    assert resume_again.resume("RUN/checkpoint-1", tmp_path, lambda: last[0]) == "auto"
    monkeypatch.setenv(restarts.START, "two")
    assert resume_again.resume("never", tmp_path, lambda: last[0]) == "never", "a new start of the run"


def test_the_launcher_reads_the_step_of_a_dead_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(steps.FOLDER, str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    assert steps.step_of(tmp_path, 3) is None
    for done in (9, 1234, 5):  # a resume may go back
        steps.begin(done)
        assert steps.step_of(tmp_path, 3) == done + 1


def test_nothing_of_an_attempt_is_left(tmp_path: Path) -> None:
    """The parent is gone, and its child ignores SIGTERM, as data workers do."""
    child = "import signal, sys, time; signal.signal(15, signal.SIG_IGN); open(sys.argv[1], 'w'); time.sleep(600)"
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}, sys.argv[1]])"
    environ = {**os.environ, "TORCHELASTIC_RUN_ID": "attempt-1"}
    subprocess.run([sys.executable, "-c", parent, str(tmp_path / "ready")], env=environ, check=True)
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    assert len(leftovers.of_attempt("attempt-1")) == 1
    leftovers.end_all("attempt-1", grace_s=0.1)
    assert leftovers.of_attempt("attempt-1") == []


Two = Callable[..., tuple[Nodes, Nodes, list[int]]]
"""Makes two launchers that share a store; also gives the nodes whose ranks they have killed."""


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[Two]:
    monkeypatch.setattr(nodes, "_EVERY_S", 0.01)
    monkeypatch.setattr(nodes, "_ALONE_S", 0.2)
    made, killed = list[Nodes](), list[int]()

    def make(*, timeout_s: float = 600, silent_s: float = 600) -> tuple[Nodes, Nodes, list[int]]:
        # Short times are only for tests in which they must pass: threads may wait long for their turn.
        monkeypatch.setattr(nodes, "_SILENT_S", silent_s)
        store, members = HashStore(), [{"host": "a"}, {"host": "b"}]
        stops = [functools.partial(killed.append, node) for node in (0, 1)]
        first, second = (Nodes(store, node, members, timeout_s=timeout_s, stop=stops[node]) for node in (0, 1))
        # Not what was left of the time to meet.
        assert store.timeout == timedelta(seconds=timeout_s)  # type: ignore[attr-defined]
        made.extend((first, second))
        return first, second, killed

    yield make
    for each in made:
        each.close()


def in_threads(*acts: Callable[[], Any]) -> list[Any]:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor() as pool:
        return [future.result(60) for future in [pool.submit(act) for act in acts]]


def test_nodes_tell_each_other_how_their_ranks_ended(two: Two) -> None:
    first, second, _ = two()
    ended = Ended(1, "b", 1, rank=5, why="was ended by SIGKILL", step=7)
    found = in_threads(lambda: first.exchange(VICTIM), lambda: second.exchange(ended))
    assert found == [[VICTIM, ended]] * 2
    for node in (first, second):
        node.begin(1)
    again = in_threads(lambda: first.exchange(KILLED), lambda: second.exchange(LOST))
    assert again == [[KILLED, LOST]] * 2, "what the first attempt said is not heard again"


def test_a_silent_node_is_lost(two: Two) -> None:
    first, second, _ = two(silent_s=0.5)
    second.close()
    found = first.exchange(VICTIM)
    assert (found[1].lost, found[1].host) == (True, "b")
    assert "it has ended, or the network between the nodes is cut" in found[1].why


def test_a_node_whose_ranks_do_not_end_is_lost(two: Two) -> None:
    _, second, _ = two(timeout_s=1)
    assert second.exchange(replace(KILLED, node=1))[0].why == "has not ended its ranks in time"


def test_ranks_that_wait_for_a_lost_node_are_ended(two: Two) -> None:
    first, second, killed = two(timeout_s=1)
    second.close()
    while not killed:
        time.sleep(0.01)
    assert set(killed) == {0}
    assert first.stopped_here


@pytest.mark.parametrize("code", [1, 2, 3])
def test_ranks_that_wait_for_those_of_a_failed_node_are_ended(two: Two, code: int) -> None:
    first, second, killed = two()
    ended = Ended(1, "b", code, rank=5, why=f"ended with exit code {code}", step=7)

    def notice() -> list[Ended]:
        while not killed:
            time.sleep(0.01)
        return first.exchange(VICTIM)

    assert in_threads(lambda: second.exchange(ended), notice) == [[VICTIM, ended]] * 2
    assert set(killed) == {0}
    assert first.stopped_here
    assert not second.stopped_here


@pytest.mark.parametrize("end", [Ended(1, "b", 75), Ended(1, "b", 143, stopped=True), Ended(1, "b", 0)])
def test_ranks_that_may_still_save_are_left_alone(two: Two, end: Ended) -> None:
    first, second, killed = two()

    def save() -> list[Ended]:
        time.sleep(1)
        return first.exchange(end)

    in_threads(lambda: second.exchange(end), save)
    assert killed == []
