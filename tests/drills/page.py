"""Writes the table of docs/faults.md from the drills and the other tests of faults: python -m tests.drills.page"""

from __future__ import annotations

from pathlib import Path

from fullshard.drills.kinds import DRILLS, Drill

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "faults.md"
HEAD = """\
# Faults

A long run will meet a fault: a rank is killed, a disk is full, a data source hangs. A run of fullshard explains it in
words, ends without leaving processes behind, and goes on from its last checkpoint: by itself with
`topology.restarts: N` ([restarts](restarts.md)), or when you run the same command again. What a hang looks like is on
a [page of its own](hangs.md).

Try it with your own recipe, on the machine where it will train:

```bash
fullshard prove quickstart --faults --cases killed-forward,exception-data
```

Without `--cases` it runs the whole list, which takes 10 to 20 minutes for a small model. Each fault happens in a
run of six steps, in the step after the third. The run must explain the fault, lose no more than the steps since its
last checkpoint, leave no process behind, and end with the losses and weights of a run without faults, bit by bit.

## The list

Every row is a test on CPU ranks over gloo, which `make test-slow` runs. `make test-faults` draws faults of the list at
random, several in a run, until runs have recovered a hundred times ([the latest table](../benchmarks/faults.md)). This
page is generated from the tests by `python -m tests.drills.page`.

| fault | drill or test | how the run goes on |
|---|---|---|
"""
TAIL = """
NCCL between several GPUs was not tried: the tests run over gloo, on the CPU.
"""
ELSEWHERE = {
    "the network between two nodes is cut, or a node is gone": (
        "tests/dist/test_two_nodes.py::test_a_lost_node_is_named_and_the_run_continues_on_one",
        "each node that is left ends and names the other one; run again, also on fewer nodes",
    ),
    "the network between two nodes is cut for a while, and comes back": (
        "tests/dist/test_two_nodes.py::test_a_network_that_comes_back_in_time_costs_nothing",
        "goes on as if nothing had happened",
    ),
    "somebody sets the clock, by a day and more": (
        "tests/drills/test_clock.py::test_a_clock_that_is_set_changes_nothing",
        "goes on; a hang is still found, and its seconds are right",
    ),
    "a rank of one of two nodes is killed": (
        "tests/dist/test_two_nodes.py::test_two_nodes_restart_together",
        "restarted on both nodes",
    ),
    "the same step fails twice": (
        "tests/dist/test_restarts.py::test_the_same_step_twice_stops_the_run",
        "the run stops with that fact",
    ),
    "GPUs are missing after a fault": (
        "tests/dist/test_restarts.py::test_a_run_continues_on_the_gpus_that_are_left",
        "restarted on those left",
    ),
    "a loss spike": ("tests/dist/test_guard.py::test_a_loss_spike_is_left_out", "skips it or goes back"),
    "a store of checkpoints is gone for half a minute": (
        "tests/dist/test_remote.py::test_a_store_that_is_gone_for_a_while_delays_a_save_and_loses_nothing",
        "the save is tried again",
    ),
    "a store of checkpoints is gone for good": (
        "tests/dist/test_remote.py::test_a_store_that_fails_in_the_middle_stops_every_rank_with_the_reason",
        "the run stops; run again",
    ),
}
"""Faults that no drill makes: their tests, and how the run goes on."""
HOW = {
    "restart": "restarted by the launcher",
    "rerun": "run the command again",
    "skip": "goes on without that update ([guard](guard.md))",
    "retry": "the save is tried again",
}


def page() -> str:
    """The whole page."""
    rows = [_row(drill) for drill in DRILLS]
    rows += [f"| {title} | `{test.rpartition('::')[2]}` | {how} |" for title, (test, how) in ELSEWHERE.items()]
    return HEAD + "\n".join(rows) + "\n" + TAIL


def _row(drill: Drill) -> str:
    return f"| {drill.title} | `{drill.name}` | {HOW[drill.recovery]} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
