"""Which GPUs still answer. None is here: a program in the place of Python answers as CUDA does where there are some."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fullshard.contracts.launcher import Ranks
from fullshard.faults.gpus import ranks_left
from fullshard.launch.local import variables

FOUR = Ranks(4, own_gpus=True)


def test_no_rank_is_left_where_cuda_cannot_be_asked() -> None:
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    assert ranks_left(Ranks(2, own_gpus=True, device_ids=(0, 1)), hidden).per_node == 0


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A machine on which GPUs have failed. One that is shown together with others answers no question here."""

    def make(lost: str, *, seen: int = 4) -> None:
        program = tmp_path / "python"
        names = f"case $CUDA_VISIBLE_DEVICES in {lost}|*,*) exit 1;; *) echo 1.0;; esac"
        program.write_text(f"#!/bin/sh\ncase $2 in *device_count*) echo {seen};; *) {names};; esac\n")
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))

    return make


def left(ranks: Ranks, visible: str = "") -> Ranks:
    environ = {"PATH": os.environ["PATH"], **({"CUDA_VISIBLE_DEVICES": visible} if visible else {})}
    return ranks_left(ranks, {**environ, **variables(ranks, environ)})


def test_ranks_keep_the_gpus_that_answer(machine: Callable[..., None]) -> None:
    machine("none")
    assert left(FOUR) == FOUR
    machine("0")
    assert left(FOUR) == replace(FOUR, per_node=3, device_ids=(1, 2, 3))
    chosen = replace(FOUR, device_ids=(0, 1, 2, 3))
    assert left(chosen) == replace(chosen, per_node=3, device_ids=(1, 2, 3)), "not the first three"


def test_ids_count_among_the_visible_gpus(machine: Callable[..., None]) -> None:
    machine("5")
    assert left(FOUR, "4,5,6,7") == replace(FOUR, per_node=3, device_ids=(0, 2, 3))
    two = Ranks(2, own_gpus=True, device_ids=(1, 3))
    assert left(two, "4,5,6,7") == replace(two, per_node=1, device_ids=(3,))
    assert variables(left(two, "4,5,6,7"), {"CUDA_VISIBLE_DEVICES": "4,5,6,7"})["CUDA_VISIBLE_DEVICES"] == "7"


def test_a_gpu_that_was_not_used_takes_the_place_of_a_lost_one(machine: Callable[..., None]) -> None:
    machine("0", seen=8)
    assert left(FOUR) == replace(FOUR, device_ids=(1, 2, 3, 4))
    machine("none", seen=3)
    assert left(FOUR).per_node == 3, "CUDA counts no more"
