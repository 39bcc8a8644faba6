"""The words about a hang, from evidence: who is where, who waits, and for whom."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fullshard
from fullshard.faults import flight, words
from fullshard.faults.evidence import Rank
from fullshard.faults.flight import Collective
from fullshard.faults.stacks import Frame

PACKAGE = str(Path(fullshard.__file__).parent)
LIBRARY = "/opt/venv/lib/python3.11/site-packages"
FSDP = Frame(f"{LIBRARY}/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", 364, "foreach_all_gather")
STEP = Frame(f"{PACKAGE}/step.py", 76, "train_step")
MINE = Frame("/home/me/my_loss.py", 12, "loss")
WAIT = Frame(f"{LIBRARY}/torch/distributed/distributed_c10d.py", 4387, "all_gather_single")
LOOP = Frame(f"{PACKAGE}/loop.py", 134, "_step")
LOADER = Frame(f"{PACKAGE}/data/loader.py", 210, "take")
RUNNING = Rank(0, "a", 70, True, "running", 3, "compute", "model.layers.12", "all-gather", 70.0, (WAIT, STEP), (), ())


def call(op: str = "all-gather", *, unit: str | None = "model.layers.12", **changes: Any) -> Collective:
    frames = (WAIT, FSDP, STEP) if unit else (WAIT, MINE, STEP)
    return replace(Collective(9, op, "0", 40, True, 70.0, 600.0, "8", frames, unit), **changes)


def waiting(*ranks: int, **changes: Any) -> list[Rank]:
    return [replace(RUNNING, rank=rank, collectives=(call(**changes),)) for rank in ranks]


def test_a_rank_in_the_data_loader_keeps_the_others_waiting() -> None:
    read = Frame("/home/me/my_data.py", 41, "read")
    slow = replace(RUNNING, rank=3, phase="data", stack=(read, LOADER, STEP))
    assert words.report([*waiting(0, 1, 2), slow], world=4) == [
        "Rank 3 is in the data loader (my_data.py:41 read). It has not moved for 70 s.",
        "Ranks 0 to 2 have waited in the all-gather of unit model.layers.12 in the forward pass for 70 s.",
        "Rank 3 keeps the others waiting.",
    ]


def test_a_worker_process_that_reads_is_named_and_idle_ones_are_not() -> None:
    queue = Frame("/usr/lib/python3.11/multiprocessing/queues.py", 113, "get")
    idle = (queue, Frame(f"{LIBRARY}/torch/utils/data/_utils/worker.py", 275, "_worker_loop"))
    busy = (Frame("/home/me/my_data.py", 41, "read"), Frame(f"{PACKAGE}/data/loader.py", 213, "__getitem__"))
    rank = replace(RUNNING, phase="data", stack=(queue, LOADER), workers=(idle, busy))
    assert "is in the data loader (my_data.py:41 read, in a worker process)." in words.report([rank])[0]


def test_native_code_with_the_gil_is_named_with_the_line_that_called_it() -> None:
    held = replace(RUNNING, rank=1, stack=(MINE, STEP), collectives=None)
    first, *_, last = words.report([*waiting(0), held])
    assert first.startswith(
        "Rank 1 is in native code that holds the GIL, called at my_loss.py:12 loss, while computing"
    )
    assert "step 4, last at the all-gather of unit model.layers.12" in first
    assert last == "Rank 1 keeps the others waiting."


def test_a_stopped_and_a_lost_rank_are_the_cause() -> None:
    stopped = replace(RUNNING, rank=1, state="stopped", process=71, stack=(), collectives=None)
    gone = replace(RUNNING, rank=2, state="gone", process=72, stack=(), collectives=None)
    lines = words.report([*waiting(0), stopped, gone], world=3)
    assert lines[0].startswith("Rank 1 is stopped (process 71, by SIGSTOP or a debugger) while computing step 4")
    assert lines[1].startswith("Rank 2 is gone: its process 72 has ended. It was last computing step 4")
    assert lines[-1] == "Ranks 1 and 2 keep the others waiting."


def test_different_collectives_are_named_with_their_lines() -> None:
    other = waiting(1, op="all-reduce", unit=None, group="1", seq=3)
    lines = words.report([*waiting(0, 2), *other])
    assert (
        lines[0] == "Ranks 0 and 2 have waited in the all-gather of unit model.layers.12 in the forward pass for 70 s."
    )
    assert lines[1] == "Rank 1 has waited in the all-reduce called at my_loss.py:12 loss for 70 s."
    assert "in different collectives" in lines[2]
    assert "ranks 0 and 2: all-gather of unit model.layers.12 at fullshard/step.py:76 train_step" in lines[2]
    assert "rank 1: all-reduce at my_loss.py:12 loss" in lines[2]


def test_one_collective_less_is_a_difference_too() -> None:
    assert "in different collectives" in words.report([*waiting(0), *waiting(1, seq=39)])[-1]


def test_a_collective_that_others_have_completed_points_to_the_network() -> None:
    """After a cut, a rank may have received what it needs and be one collective further."""
    done, ahead = call(seq=40, pending=False), call(seq=41)
    ranks = [*waiting(0, seq=40), *(replace(RUNNING, rank=rank, collectives=(done, ahead)) for rank in (1, 2))]
    assert words.report(ranks)[-1] == (
        "Ranks 1 and 2 have completed the all-gather that rank 0 still waits in: what was sent has not arrived. Look "
        "at the network between them."
    )


def test_an_all_reduce_of_another_size_that_one_rank_has_completed_is_another_collective() -> None:
    """gloo may complete it on the rank that brings less."""
    more = waiting(0, op="all-reduce", unit=None, seq=40, sizes="3")
    done = call("all-reduce", unit=None, seq=40, sizes="1", pending=False)
    next_one = call("all-reduce", unit=None, seq=41, sizes="1")
    last = words.report([*more, replace(RUNNING, rank=1, collectives=(done, next_one))])[-1]
    assert "in different collectives" in last
    assert "network" not in last


def test_ranks_that_move_are_not_accused() -> None:
    ranks = [replace(RUNNING, rank=rank, age=0.3) for rank in (0, 1)]
    assert words.moving(ranks) == ["All ranks are moving, at step 4."]
    assert words.moving(ranks[:1]) == ["The rank is moving, at step 4."]
    assert words.moving([ranks[0], replace(ranks[1], age=9.0)]) == []
    assert words.moving([ranks[0], replace(ranks[1], state="stopped")]) == []


def test_different_shapes_are_named() -> None:
    assert words.report([*waiting(0), *waiting(1, sizes="9")])[-1].endswith("8 on rank 0, 9 on rank 1.")


def test_all_ranks_in_the_same_collective_point_to_the_network() -> None:
    assert "look at the network" in words.report(waiting(0, 1))[-1]


def test_different_collectives_are_no_fault_if_a_rank_is_missing_from_them() -> None:
    """Under hybrid sharding some ranks wait for a rank that waits for the one that hangs."""
    busy = replace(RUNNING, rank=2, stack=(MINE,))
    assert not any("different" in line for line in words.report([*waiting(0), *waiting(1, group="2"), busy]))


def test_a_save_in_the_background_is_not_what_a_rank_waits_in() -> None:
    background = Frame(f"{PACKAGE}/checkpoint/background.py", 99, "_write")
    rank = replace(RUNNING, collectives=(call(record=1, frames=(WAIT, background)), call(record=2)))
    assert rank.waits_in == call(record=2)


def test_ranks_without_a_heartbeat_are_listed() -> None:
    assert "Ranks 1 to 3 left no heartbeat in this folder." in words.report(waiting(0), world=4)


@pytest.mark.parametrize(
    ("stack", "shown"),
    [
        ((WAIT, MINE, STEP), "my_loss.py:12 loss"),
        ((WAIT, STEP), "fullshard/step.py:76 train_step"),
        ((WAIT, STEP, LOOP, Frame("/home/me/train.py", 3, "main")), "fullshard/step.py:76 train_step"),
        ((WAIT,), "torch/distributed/distributed_c10d.py:4387 all_gather_single"),
        ((Frame("/usr/lib/python3.11/queue.py", 1, "get"),), "queue.py:1 get"),
        ((), "an unknown place"),
    ],
)
def test_the_line_that_tells_most_is_shown(stack: tuple[Frame, ...], shown: str) -> None:
    assert words.place(stack) == shown


@pytest.mark.parametrize(("age", "shown"), [(7.4, "7 s"), (119, "119 s"), (600, "10 min"), (9000, "2.5 h")])
def test_ages_are_readable(age: float, shown: str) -> None:
    assert words.seconds(age) == shown


def stored(name: str) -> Any:
    return json.loads((Path(__file__).parent / name).read_text())


def test_collectives_of_a_gloo_dump_have_their_units() -> None:
    """The dump of a real run. Gloo records a reduce-scatter as an all-reduce."""
    found = flight.parse(stored("gloo.json"))
    assert [(each.op, each.unit) for each in found if each.by_fsdp][-3:] == [
        ("reduce-scatter", "model.layers.0"),
        ("reduce-scatter", "(root)"),
        ("all-gather", "(root)"),
    ]
    assert [each.pending for each in found] == [False] * (len(found) - 1) + [True]
    rank = replace(RUNNING, collectives=tuple(found))
    assert words.report([rank])[0].startswith("Rank 0 has waited in the all-gather of unit (root) in the forward pass")


def test_a_mismatch_in_two_nccl_dumps_names_both_collectives_and_lines() -> None:
    """As NCCL's recorder has it: states, several groups, and calls queued behind the one that hangs."""
    one, other = (tuple(flight.parse(dump)) for dump in stored("nccl.json"))
    assert [each.pending for each in one] == [False, False, False, True, True]
    assert [each.unit for each in one] == [
        "(root)",
        "model.layers.0",
        "model.layers.0",
        "model.layers.0",
        "model.layers.1",
    ]
    lines = words.report([replace(RUNNING, collectives=one), replace(RUNNING, rank=1, collectives=other)])
    assert lines[0] == "Rank 0 has waited in the all-gather of unit model.layers.0 in the forward pass for 70 s."
    assert lines[1] == "Rank 1 has waited in the all-reduce called at my_loss.py:12 loss for 70 s."
    assert "rank 0: all-gather of unit model.layers.0 at fullshard/step.py:79 train_step" in lines[2]
    assert "rank 1: all-reduce at my_loss.py:12 loss" in lines[2]
