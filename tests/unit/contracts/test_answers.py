"""What optimizers, schedules and sinks answer when the engine and the tools ask about them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fullshard.commands.options import as_words
from fullshard.config.part import decode, plain
from fullshard.contracts.optimizer import Optimizer
from fullshard.contracts.schedule import Schedule
from fullshard.contracts.sink import Sink


def test_what_optimizers_say_about_quantised_state() -> None:
    quantised = decode(Optimizer, {"kind": "adamw_8bit", "lr": 2e-5, "betas": [0.8, 0.9]})
    assert (quantised.saves_full, quantised.compiles, quantised.state_bytes(4)) == (False, True, 2)
    assert quantised.packages == {"torchao": "fullshard[optim]"}
    whole = quantised.unquantised()
    assert plain(whole) == {**plain(quantised), "kind": "adamw"}
    assert (whole.saves_full, whole.compiles, whole.state_bytes(4), whole.packages) == (True, False, 8, {})
    assert whole.unquantised() is whole


@pytest.mark.parametrize(
    ("settings", "total", "mistake"),
    [
        ({"kind": "cosine", "floor": 1}, None, "schedule.floor = 1"),
        ({"kind": "linear", "floor": 1}, 100, "schedule.floor = 1"),
        ({"kind": "cosine", "floor": 0.5}, 100, None),
        ({"kind": "step", "step_size": 100}, 100, "schedule.step_size = 100, and the run has 100 steps"),
        ({"kind": "step", "step_size": 99}, 100, None),
        ({"kind": "step", "step_size": 100}, None, None),
        ({"kind": "constant"}, 100, None),
    ],
)
def test_schedules_know_if_their_rate_never_falls(
    settings: dict[str, Any], total: int | None, mistake: str | None
) -> None:
    found = decode(Schedule, settings).never_falls(total)
    assert (found is None) if mistake is None else (found is not None and mistake in found[0])


def test_packages_and_viewers_of_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_DISABLED", raising=False)
    board, online = decode(Sink, {"kind": "tensorboard"}), decode(Sink, {"kind": "wandb"})
    assert (board.packages(), online.packages()) == ({"tensorboard": "tensorboard"}, {"wandb": "fullshard[wandb]"})
    assert decode(Sink, {"kind": "wandb", "mode": "disabled"}).packages() == {}
    assert board.viewer(Path("my runs/a")) == "tensorboard --logdir 'my runs/a/logs'"
    assert online.viewer(Path("a")) is None


def test_options_as_words() -> None:
    given = {"--data": None, "--seed": 0, "--raw": True, "--json": False, "--prompt": ["a b", "c"]}
    assert as_words(given) == ["--seed", "0", "--raw", "--prompt", "a b", "--prompt", "c"]
