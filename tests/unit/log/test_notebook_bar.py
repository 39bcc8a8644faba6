"""The console in a notebook: one line that is redrawn, erased for other text, and no line for every step."""

from __future__ import annotations

import io

import pytest

from fullshard.log.console import NOTEBOOK, Console, is_terminal


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_is_redrawn_and_other_text_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NOTEBOOK, "1")
    out, now = io.StringIO(), [0.0]
    console = Console(stream=out, clock=lambda: now[0])
    console.run_begin(3)
    with console.training_bar(3) as bar:
        for step in range(1, 4):
            now[0] += 1
            bar.advance(0.5)
            bar.log({"step": step, "loss": 0.5, "lr": 1e-3})
            if step == 2:
                console.say("Saved.")
    first, second, *rest = out.getvalue().split("\r")[1:]
    assert first.startswith("Training:  33%")
    assert second.startswith("Training:  66%")
    assert rest[0] == " " * len(second)
    assert rest[1].startswith("Saved.\nTraining: 100%")
    assert "step 1" not in out.getvalue()


def test_a_fast_bar_is_not_redrawn_for_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NOTEBOOK, "1")
    out = io.StringIO()
    console = Console(stream=out, clock=lambda: 0.0)
    with console.training_bar(1000) as bar:
        for _ in range(999):
            bar.advance(0.5)
    assert "\r" not in out.getvalue()


def test_a_command_after_an_exclamation_mark_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    assert is_terminal(Terminal())
    monkeypatch.setenv("JPY_PARENT_PID", "12")
    assert not is_terminal(Terminal())
