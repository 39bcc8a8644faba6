"""Stop signals: the first is a wish, its echo is nothing, the next one ends the process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from fullshard import signals


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
def test_a_signal_is_a_wish(number: signal.Signals) -> None:
    with signals.StopSignals() as stop:
        assert stop.heard is None
        os.kill(os.getpid(), number)
        assert stop.heard == number.name


def test_the_echo_of_a_signal_is_no_second_one() -> None:
    def act() -> None:
        with signals.StopSignals() as stop:
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGTERM)
            assert stop.heard == "SIGTERM"

    assert in_child(act) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_second_signal_ends_the_process_at_once(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    monkeypatch.setattr(signals, "ECHO_S", 0.0)

    def act() -> None:
        with signals.StopSignals():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), number)

    assert in_child(act) == -number


def test_a_second_ctrl_c_never_waits() -> None:
    def act() -> None:
        with signals.StopSignals():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    assert in_child(act) == -signal.SIGINT
