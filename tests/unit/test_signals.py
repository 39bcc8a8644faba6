"""Stop signals: the first is a request, its repetition is ignored, the next one ends the process.

Where the next line looks for what a signal did, it is raised in that thread: one that is sent to a process may go to
any of its threads, and Python hears of it later.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from fullshard.explain.error_file import REPORTED_BY_LAUNCHER
from fullshard.launch import signals


def in_child(act: Callable[[], None]) -> int:
    """How a process ends that does this: its exit code, negative for a signal."""
    child = os.fork()
    if child == 0:
        try:
            act()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("number", signals.STOP_SIGNALS)
def test_the_first_signal_is_a_request(number: signal.Signals) -> None:
    with signals.StopSignals() as stop:
        assert stop.heard is None
        signal.raise_signal(number)
        assert stop.heard == number.name


def test_a_signal_that_arrives_twice_counts_once() -> None:
    def act() -> None:
        with signals.StopSignals() as stop:
            for _ in range(3):
                signal.raise_signal(signal.SIGTERM)
            assert stop.heard == "SIGTERM"

    assert in_child(act) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_second_signal_ends_the_process_at_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    monkeypatch.setattr(signals, "ECHO_S", 0.0)

    def act() -> None:
        with signals.StopSignals():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(number)

    assert in_child(act) == 75
    assert capfd.readouterr().err.endswith(f"{signals.AT_ONCE}.\n")


def test_a_second_ctrl_c_counts_immediately() -> None:
    def act() -> None:
        signals.listen()
        with signals.StopSignals():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    assert in_child(act) == 75


def test_a_second_ctrl_c_does_not_end_a_users_program() -> None:
    """A notebook's kernel must survive it; a rank under a launcher ends, because others wait for it."""

    def act() -> None:
        with signals.StopSignals():
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt, match="steps after the last checkpoint are lost"):
                signal.raise_signal(signal.SIGINT)

    assert in_child(act) == 0

    def rank() -> None:
        os.environ["RANK"] = "1"
        with signals.StopSignals():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    assert in_child(rank) == 75


def test_earlier_handlers_are_restored() -> None:
    before = [signal.getsignal(number) for number in signals.STOP_SIGNALS]
    with signals.in_library(), signals.StopSignals():
        assert signal.getsignal(signal.SIGINT) not in before
    assert [signal.getsignal(number) for number in signals.STOP_SIGNALS] == before


def test_a_users_program_keeps_its_own_handlers_and_ctrl_c() -> None:
    def act() -> None:
        heard: list[int] = []
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start without it
        signal.signal(signal.SIGUSR2, lambda number, _: heard.append(number))
        with signals.in_library():
            signal.raise_signal(signal.SIGUSR2)
            assert heard == [signal.SIGUSR2]
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGUSR1)  # nobody's: the default would end the process without a word

    assert in_child(act) == 75


# `ready` is printed inside a native call that Python's own handlers would wait for, here forever.
NATIVE = """
import ctypes, sys
from fullshard.launch import signals
signals.listen()
{then}
sys.stdout.write("printed before\\n")  # into a pipe: not flushed yet
libc = ctypes.CDLL(None)
libc.write(1, b"ready\\n", 6)
while True:
    libc.sleep(1000)
"""


@pytest.mark.parametrize("number", signals.STOP_SIGNALS)
def test_before_the_first_step_a_signal_ends_the_process_even_in_native_code(
    number: signal.Signals,
) -> None:
    process = started(NATIVE.format(then=""))
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 75
    assert out == "printed before\n"
    assert (
        err
        == f"Stopped by {signals.name_of(number)} before the first step: nothing to save. Run the same command again.\n"
    )


def test_a_signal_also_ends_children_and_removes_temporary_folders(tmp_path: Path) -> None:
    then = (
        "import subprocess; child = subprocess.Popen(['sleep', '1000'])\n"
        "folder = signals.temporary_folder(); folder.__enter__()"
    )
    process = started(NATIVE.format(then=then), TMPDIR=str(tmp_path))
    [child] = psutil.Process(process.pid).children()
    assert len(list(tmp_path.iterdir())) == 1
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=300)
    assert list(tmp_path.iterdir()) == []
    child.wait(timeout=300)


def test_work_after_the_loop_may_finish() -> None:
    code = """
import os, signal
from fullshard.launch import signals
signals.listen()
stop = signals.StopSignals()
with stop:
    pass
os.kill(os.getpid(), signal.SIGUSR2)
print(stop.heard)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        "SIGUSR2\n",
        "SIGUSR2: saving after the step in progress. A second signal stops at once.\n",
    )


def test_a_forked_process_handles_its_own_signals() -> None:
    code = """
import os, signal
from fullshard.launch import signals
signals.listen()
child = os.fork()
if child == 0:
    signal.pause()
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{-signal.SIGTERM}\n", "")


@pytest.mark.parametrize(
    ("variables", "line"),
    [({"RANK": "1"}, "rank 1: Stopped by SIGUSR1"), ({"RANK": "0", "TORCHELASTIC_ERROR_FILE": "{}"}, "Stopped by")],
    ids=["alone", "torchrun"],
)
def test_ranks_print_the_message_once(variables: dict[str, str], line: str, tmp_path: Path) -> None:
    environ = {name: value.format(tmp_path / "error.json") for name, value in variables.items()}
    process = started(NATIVE.format(then=""), **environ)
    process.send_signal(signal.SIGUSR1)
    assert process.communicate(timeout=300)[1].startswith(line)


@pytest.mark.parametrize("variables", [{"RANK": "1"}, {"RANK": "0", "FULLSHARD_REPORTED_BY_LAUNCHER": "1"}])
def test_under_our_launcher_the_message_goes_to_it(variables: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    process = started(NATIVE.format(then=""), **variables, TORCHELASTIC_ERROR_FILE=str(file))
    process.send_signal(signal.SIGUSR1)
    assert process.communicate(timeout=300)[1] == ""
    assert "before the first step" in json.loads(file.read_text())["message"]["message"]


def test_sigquit_does_not_end_a_command_that_starts() -> None:
    code = (
        "import sys; from fullshard.launch import signals; signals.listen(); print('ready', flush=True); "
        "sys.stdin.readline()"
    )
    process = started(code, stdin=subprocess.PIPE)
    process.send_signal(signal.SIGQUIT)
    said = process.communicate("go on\n", timeout=300)[1]
    assert (process.returncode, "The run is still starting" in said) == (0, True), said


def started(code: str, *, stdin: int | None = None, **variables: str) -> subprocess.Popen[str]:
    """A process that has said `ready`."""
    left_out = ("RANK", "TORCHELASTIC_ERROR_FILE", "PYTHONUNBUFFERED", REPORTED_BY_LAUNCHER)
    kept = {k: v for k, v in os.environ.items() if k not in left_out}
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**kept, "PYTHONPATH": os.getcwd(), **variables},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process
