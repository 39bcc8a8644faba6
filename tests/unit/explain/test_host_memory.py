"""A rank that the kernel killed is reported as such: by its counters, or by the memory in use a moment before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fullshard.explain import host_memory
from fullshard.explain.ended import why_killed
from fullshard.explain.host_memory import MemoryWatch, watch_parent

GIB = 2**20
"""In kB, as /proc/meminfo counts."""


def machine(root: Path, *, free: int, kills: int | None = 0, total: int = 125) -> Path:
    """A host with `free` of `total` GiB available, whose kernel counts its kills or does not."""
    (root / "proc").mkdir(parents=True, exist_ok=True)
    (root / "proc/meminfo").write_text(f"MemTotal: {total * GIB} kB\nMemAvailable: {free * GIB} kB\n")
    (root / "proc/vmstat").write_text("pgfault 9\n" + (f"oom_kill {kills}\n" if kills is not None else ""))
    return root


def test_a_kill_that_the_kernel_counted_is_certain(tmp_path: Path) -> None:
    watch = MemoryWatch(machine(tmp_path, free=60, kills=4))
    machine(tmp_path, free=7, kills=4)
    watch.look()
    machine(tmp_path, free=110, kills=5)  # it is free again
    watch.look()
    said = why_killed(watch.before_the_end())
    assert said.startswith(
        "killed by the kernel, out of host memory: 118.0 GiB of 125.0 GiB were in use a moment before. "
    )
    assert "data.workers" in said
    assert "checkpoint.asynchronous: false" in said


@pytest.mark.parametrize(("free", "kills", "said"), [
    (20, None, "killed by the kernel, most likely out of host memory: 105.0 GiB of 125.0 GiB"),
    (90, None, "killed by the system, often for lack of memory (35.0 GiB of 125.0 GiB"),
    (20, 3, "killed from outside, by a person or a scheduler, and not for lack of memory (105.0 GiB of 125.0 GiB"),
    (2, 3, "killed by the kernel, most likely out of host memory: 123.0 GiB of 125.0 GiB"),
])  # fmt: skip
def test_without_a_kill_count_recent_memory_use_decides(
    tmp_path: Path, free: int, kills: int | None, said: str
) -> None:
    watch = MemoryWatch(machine(tmp_path, free=free, kills=kills))
    assert why_killed(watch.before_the_end()).startswith(said)


@pytest.mark.parametrize("version", [1, 2])
def test_a_control_group_counts_and_limits_too(tmp_path: Path, version: int) -> None:
    machine(tmp_path, free=100, kills=None)
    top = tmp_path / "sys/fs/cgroup" / ("memory" if version == 1 else "") / "job"
    top.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/self/cgroup").write_text("3:memory:/job\n" if version == 1 else "0::/job\n")
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
    for name, number in zip(names, (64, 60), strict=True):
        (top / name).write_text(f"{number * 2**30}\n")
    (top / "memory.stat").write_text("inactive_file 0\ntotal_inactive_file 0\n")
    counter = top / ("memory.oom_control" if version == 1 else "memory.events")
    counter.write_text("low 0\noom_kill 0\n")
    assert host_memory.memory_total(tmp_path) == 64 * 2**30
    watch = MemoryWatch(tmp_path)
    counter.write_text("low 0\noom_kill 1\n")
    assert why_killed(watch.before_the_end()).startswith(
        "killed by the kernel, out of host memory: 60.0 GiB of 64.0 GiB"
    )


FORKED = """
import os
from fullshard.explain import host_memory

held, more = bytearray(os.urandom(64 * 2**20)), 48 * 2**20
before = host_memory.peak_of_family() or 0
assert before >= len(held)
ready, said = os.pipe()
child = os.fork()
if child == 0:
    own = bytearray(os.urandom(more))
    os.write(said, b".")
    os.read(os.pipe()[0], 1)
os.read(ready, 1)
after = host_memory.peak_of_family() or 0
os.kill(child, 9)
assert more <= after - before < more + len(held) // 2, (before, after)
"""


def test_a_forked_child_counts_only_its_private_memory() -> None:
    """Its pages that it shares with its parent count once, those it wrote itself are added. In a process without other
    children: the ranks of other tests would count too."""
    done = subprocess.run([sys.executable, "-c", FORKED], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


WITNESSED = """
import os, signal, sys
from fullshard.explain.host_memory import reported_if_killed
with reported_if_killed(0):
    print("ready", flush=True)
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["killed", "done"])
def test_the_watcher_ends_with_the_run_and_is_silent_if_memory_was_not_the_reason(end: str) -> None:
    """It holds standard error until it has decided: waiting for that to close is waiting for the witness."""
    command = [sys.executable, "-W", "error", "-c", WITNESSED, end]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == (-signal.SIGKILL if end == "killed" else 0)
    assert "Traceback" not in done.stderr, done.stderr


def test_the_watcher_reports_a_process_that_the_kernel_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    root = machine(tmp_path, free=5, kills=None)
    monkeypatch.setattr("fullshard.explain.host_memory.MemoryWatch.__init__.__defaults__", (root,))
    said = watch_parent(os.getppid() + 1_000_000, rank=0)  # which is not the parent any more
    assert said is not None
    assert "was ended by SIGKILL: killed by the kernel, most likely out of host memory: 120.0 GiB of 125.0 GiB" in said
