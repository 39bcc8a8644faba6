"""Heartbeats, stacks and units of this very process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fullshard.faults import beat, evidence, flight, stacks, units, watchdog
from fullshard.faults.beat import Beat


def heartbeat(folder: Path, *, rank: int = 0, world: int = 1, timeout_s: float = 600.0) -> Beat:
    return Beat(folder, rank=rank, world=world, timeout_s=timeout_s)


def test_another_reader_sees_step_phase_and_unit(tmp_path: Path) -> None:
    pulse = heartbeat(tmp_path)
    pulse.describe(units=["(root)", "model.layers.0"])
    pulse.enter("data", 4)
    pulse.enter("compute")
    pulse.collective(1, 2)
    found = beat.read(tmp_path / "rank-0.beat")
    assert found is not None
    assert (found.step, found.phase, found.unit, found.act) == (4, "compute", "model.layers.0", "reduce-scatter")
    assert found.here
    assert found.facts["process"] == os.getpid()
    assert evidence.state_of(found) == "running"


def test_a_heartbeat_without_mapped_files_is_written_by_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = beat.mmap.mmap

    def refuses(number: int, size: int) -> Any:
        if number >= 0:
            raise OSError("no such device")
        return whole(number, size)

    monkeypatch.setattr(beat.mmap, "mmap", refuses)
    pulse = heartbeat(tmp_path)
    pulse.enter("save", 7)
    assert beat.read(tmp_path / "rank-0.beat") is None
    pulse.flush()
    found = beat.read(tmp_path / "rank-0.beat")
    assert found is not None
    assert (found.phase, found.step) == ("save", 7)


def test_ranks_of_an_earlier_larger_start_do_not_count(tmp_path: Path) -> None:
    heartbeat(tmp_path, rank=3, world=4)
    time.sleep(0.01)
    heartbeat(tmp_path, rank=0, world=2)
    assert list(beat.read_all(tmp_path)) == [0]


def test_a_process_that_ended_is_gone_even_if_its_number_is_used_again(tmp_path: Path) -> None:
    pulse = heartbeat(tmp_path)
    pulse.describe(born="1")
    found = beat.read(pulse.path)
    assert found is not None
    assert evidence.state_of(found) == "gone"


def test_broken_heartbeats_are_no_heartbeats(tmp_path: Path) -> None:
    (tmp_path / "rank-0.beat").write_bytes(b"\0" * 100)
    (tmp_path / "rank-1.beat").write_bytes(b"")
    assert beat.read_all(tmp_path) == {}


def test_a_question_is_over_when_the_process_that_asked_has_ended(tmp_path: Path) -> None:
    asked = tmp_path / evidence.ASKED
    evidence.ask(tmp_path, {})
    assert not evidence.first_to_make(asked, stale_s=600), "this process is still there"
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as gone:
        pass
    asked.write_text(json.dumps([beat.boot(), gone.pid]))
    assert evidence.first_to_make(asked, stale_s=600)
    assert not evidence.first_to_make(asked, stale_s=600)


def test_one_of_two_that_find_a_stale_file_makes_it_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, known = tmp_path / evidence.ASKED, evidence._is_over
    asked.touch()

    def other_is_faster(path: Path) -> bool:
        """Between a look at the file and what follows from it, another rank does all of it."""
        monkeypatch.setattr(evidence, "_is_over", lambda path: True)
        assert evidence.first_to_make(path, stale_s=600)
        monkeypatch.setattr(evidence, "_is_over", known)
        return True

    monkeypatch.setattr(evidence, "_is_over", other_is_faster)
    assert not evidence.first_to_make(asked, stale_s=600)
    assert list(tmp_path.iterdir()) == [asked]


def test_a_file_from_before_the_clock_was_set_back_is_stale(tmp_path: Path) -> None:
    file = tmp_path / "hang"
    assert evidence.first_to_make(file, stale_s=600)
    assert not evidence.first_to_make(file, stale_s=600)
    ahead = time.time() + 3600
    os.utime(file, (ahead, ahead))
    assert evidence.first_to_make(file, stale_s=600)


def test_sigquit_writes_the_stack_of_a_process_whose_gil_is_held(tmp_path: Path) -> None:
    code = (
        "import ctypes, os, sys; from pathlib import Path; from fullshard.faults.stacks import Stacks\n"
        "kept = Stacks(Path(sys.argv[1]), 0)\n"
        "def hold_the_gil(): ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)\n"
        "print('ready', flush=True)\n"
        "hold_the_gil()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        file = tmp_path / "rank-0.stacks.txt"

        def innermost() -> str:
            process.send_signal(signal.SIGQUIT)
            time.sleep(0.1)
            found = stacks.of_main(file.read_text())
            return found[0].name if found else ""

        try:
            assert evidence.wait_for(lambda: innermost() == "hold_the_gil", seconds=200)
        finally:
            process.kill()


def test_the_latest_stack_of_each_thread_counts() -> None:
    text = (
        'Thread 0x00007f01 (most recent call first):\n  File "a.py", line 1 in old\n\n'
        'Current thread 0x00007f02 [main] (most recent call first):\n  File "b c.py", line 2 in main\n'
        'Thread 0x00007f01 (most recent call first):\n  File "a.py", line 3 in <lambda>\n'
    )
    found = stacks.parse(text)
    assert [frame.name for frame in found["0x7f01"]] == ["<lambda>"]
    assert found["0x7f02"] == [stacks.Frame("b c.py", 2, "main")]


def test_the_timer_is_set_with_the_second_step_without_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Native code may take the GIL before the watchdog's thread has looked once."""
    called: list[int] = []
    pulse = heartbeat(tmp_path)
    pulse.on_second_step = lambda: called.append(pulse.step)
    for step in (5, 5, 6, 7):
        pulse.enter("data", step)
    assert called == [6]


class Comm:
    def __call__(self, value: int) -> int:
        return value + 1


class Group:
    def __init__(self) -> None:
        self._all_gather_comm, self._reduce_scatter_comm = Comm(), Comm()


class Unit:
    def __init__(self) -> None:
        self._fsdp_param_groups = [Group()]

    def _get_fsdp_state(self) -> Unit:
        return self

    def named_modules(self) -> list[tuple[str, Any]]:
        return [("", self), ("plain", object())]


def test_a_collective_of_a_unit_is_noted_once_and_still_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pulse, unit = heartbeat(tmp_path), Unit()
    monkeypatch.setattr(beat, "current", pulse)
    units.note(unit)
    units.note(unit)  # a second run in the same process
    group = unit._fsdp_param_groups[0]
    assert isinstance(group._all_gather_comm, Comm)
    assert (group._all_gather_comm(1), group._reduce_scatter_comm(2)) == (2, 3)
    assert list(pulse.collectives) == [(0, 1), (0, 2)]
    monkeypatch.setattr(beat, "current", None)
    assert group._all_gather_comm(1) == 2


def watched(folder: Path, monkeypatch: pytest.MonkeyPatch, *entries: dict[str, Any]) -> watchdog.Watchdog:
    monkeypatch.setattr(flight, "entries", lambda stacks=True: list(entries))
    found = watchdog.Watchdog(folder, heartbeat(folder, timeout_s=100), ends=False)
    found._look(1.0)
    return found


@pytest.mark.parametrize(
    ("phase", "steps", "still", "hangs"),
    [
        ("setup", 0, 1e6, False),
        ("data", 0, 101, True),
        ("data", 0, 99, False),
        ("compute", 0, 1e6, False),  # the first step compiles
        ("compute", 1, 101, True),
        ("evaluate", 1, 1e6, False),
        ("save", 1, 1e6, False),
    ],
)
def test_a_rank_that_must_move_and_does_not_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str, steps: int, still: float, hangs: bool
) -> None:
    watch = watched(tmp_path, monkeypatch)
    for step in range(steps + 1):
        watch.beat.enter("data", step)
    watch.beat.enter(phase)
    watch._still = still
    found = watch.hangs()
    watch.stop("finished")
    assert found is hangs


@pytest.mark.parametrize(
    ("age", "limit", "retired", "hangs"),
    [
        (110, 120, False, True),
        (60, 120, False, False),
        (110, 1800, False, False),  # a save may wait for a slow disk
        (1790, 1800, False, True),
        (110, 120, True, False),
    ],
)
def test_a_collective_that_takes_too_long_hangs_in_every_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age: float, limit: float, retired: bool, hangs: bool
) -> None:
    created = int((time.time() - age) * 1e9)
    entry = {"time_created_ns": created, "timeout_ms": limit * 1000, "retired": retired}
    watch = watched(tmp_path, monkeypatch, entry)
    watch._still = 60
    found = watch.hangs()
    watch.stop("finished")
    assert found is hangs


def test_a_rank_of_another_machine_that_gives_no_sign_of_life_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a save ranks wait half an hour for each other, but not for a process that is stopped."""
    watch, other = watched(tmp_path, monkeypatch), heartbeat(tmp_path, rank=1, world=2, timeout_s=100)
    other.describe(boot="another machine")
    watch.beat.enter("save", 3)
    watch._said = True  # only `stands` asks whether it hangs

    def stands(seconds: float, *, signs: bool) -> bool:
        """Whether it hangs at some time in these seconds."""
        found = False
        for _ in range(int(seconds)):
            if signs:
                other.live()
            watch._look(1.0)
            found |= watch.hangs()
        return found

    assert not stands(1000, signs=True), "a save may take as long as it needs"
    assert not stands(90, signs=False)
    assert stands(20, signs=False)
    watch.beat.enter("compute")  # it moves, and what it has seen of others no longer counts
    assert not stands(30, signs=False)
    watch.beat.enter("save")
    assert not stands(140, signs=False)
    assert stands(20, signs=False)
    other.close("finished")
    watch.beat.enter("log")
    assert not stands(300, signs=False), "it has ended, and is not stopped"
    watch.stop("finished")


def test_a_watchdog_gives_signs_of_life_while_its_rank_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = watched(tmp_path, monkeypatch)
    before = beat.read(watch.beat.path)
    watch._look(1.0)
    after = beat.read(watch.beat.path)
    watch.stop("finished")
    assert before is not None
    assert after is not None
    assert after.alive > before.alive
    assert after.count == before.count


def test_a_beat_starts_the_count_again_and_lost_time_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = watched(tmp_path, monkeypatch)
    watch._look(50.0)
    assert watch._still == 50.0
    watch.beat.enter("data", 1)
    watch._look(1.0)
    assert watch._still == 0.0
    watch.stop("finished")
    assert not list(tmp_path.glob("rank-*")), "a run that finished leaves nothing"


def test_torch_waits_longer_than_the_watchdog() -> None:
    assert watchdog.GRACE_S > evidence.ANSWER_S * 2
