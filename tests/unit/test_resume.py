"""Which checkpoint a run goes on from, by what is wrong with each."""

from __future__ import annotations

from pathlib import Path

import pytest

from fullshard.checkpoint.integrity import UNREAD
from fullshard.checkpoint.paths import place
from fullshard.config.part import flat
from fullshard.control.resume import choose
from fullshard.errors import CheckpointError

LOCAL = [Path("runs/a/checkpoint-9"), Path("runs/a/checkpoint-6")]
REMOTE = [place(f"memory://resume/a/checkpoint-{step}") for step in (9, 6)]


@pytest.mark.parametrize("among", [LOCAL, REMOTE], ids=["local", "remote"])
def test_the_newest_whole_one_is_taken_and_damage_is_told(among: list[Path]) -> None:
    told: list[str] = []
    wrong = {among[0]: [f"{among[0]}/model is missing"]}
    assert choose(among, "auto", problems=lambda path: wrong.get(path, []), warn=told.append) == among[1]
    assert told == [f"{among[0]} is damaged: {among[0]}/model is missing."]


def test_a_store_that_cannot_be_read_now_is_not_a_damaged_one() -> None:
    wrong = {path: [f"{path}/model {UNREAD} (TimeoutError: no answer)"] for path in (REMOTE[0], LOCAL[0])}
    with pytest.raises(CheckpointError, match=r"no answer\)\. Try again when the store can be reached"):
        choose(REMOTE, "auto", problems=lambda path: wrong.get(path, []), warn=print)
    # A disk that cannot read a file has lost it.
    assert choose(LOCAL, "auto", problems=lambda path: wrong.get(path, []), warn=lambda line: None) == LOCAL[1]


def test_a_named_one_must_be_whole_and_no_candidate_is_a_fresh_start() -> None:
    with pytest.raises(CheckpointError, match=r"--resume it: .* is damaged: cut\."):
        choose(LOCAL[:1], "it", problems=lambda path: ["cut"], warn=print)
    with pytest.raises(CheckpointError, match="No checkpoint in runs/a is whole"):
        choose(LOCAL, "auto", problems=lambda path: ["cut"], warn=lambda line: None)
    assert choose([], "auto", problems=lambda path: ["cut"], warn=print) is None


def test_settings_are_compared_by_their_dotted_keys() -> None:
    assert flat({"a": {"b": 1, "c": {}}, "d": [1]}) == {"a.b": 1, "a.c": {}, "d": [1]}
