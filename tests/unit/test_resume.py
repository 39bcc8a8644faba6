"""Which checkpoint a run resumes from, given what is wrong with each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fullshard.checkpoint import folder as files
from fullshard.checkpoint.integrity import UNREAD
from fullshard.checkpoint.paths import place
from fullshard.config.part import flat
from fullshard.control.resume import choose, resume_point
from fullshard.errors import CheckpointError

LOCAL = [Path("runs/a/checkpoint-9"), Path("runs/a/checkpoint-6")]
REMOTE = [place(f"memory://resume/a/checkpoint-{step}") for step in (9, 6)]


@pytest.mark.parametrize("among", [LOCAL, REMOTE], ids=["local", "remote"])
def test_the_newest_complete_checkpoint_is_taken_and_damage_is_reported(among: list[Path]) -> None:
    warned: list[str] = []
    wrong = {among[0]: [f"{among[0]}/model is missing"]}
    assert choose(among, "auto", problems=lambda path: wrong.get(path, []), warn=warned.append) == among[1]
    assert warned == [f"{among[0]} is damaged: {among[0]}/model is missing."]


def test_an_unreachable_store_is_not_reported_as_damaged() -> None:
    wrong = {path: [f"{path}/model {UNREAD} (TimeoutError: no answer)"] for path in (REMOTE[0], LOCAL[0])}
    with pytest.raises(CheckpointError, match=r"no answer\)\. Try again when the store can be reached"):
        choose(REMOTE, "auto", problems=lambda path: wrong.get(path, []), warn=print)
    # A disk that cannot read a file has lost it.
    assert choose(LOCAL, "auto", problems=lambda path: wrong.get(path, []), warn=lambda line: None) == LOCAL[1]


def test_a_named_checkpoint_must_be_complete_and_without_any_the_run_starts_fresh() -> None:
    with pytest.raises(CheckpointError, match=r"--resume it: .* is damaged: cut\."):
        choose(LOCAL[:1], "it", problems=lambda path: ["cut"], warn=print)
    with pytest.raises(CheckpointError, match="No checkpoint in runs/a is whole"):
        choose(LOCAL, "auto", problems=lambda path: ["cut"], warn=lambda line: None)
    assert choose([], "auto", problems=lambda path: ["cut"], warn=print) is None


def test_settings_are_compared_by_their_dotted_keys() -> None:
    assert flat({"a": {"b": 1, "c": {}}, "d": [1]}) == {"a.b": 1, "a.c": {}, "d": [1]}


def data(encode: str | None, balance: str | None) -> dict[str, Any]:
    return {"data": {"encode": {"kind": encode} if encode else None, "balance": balance}}


@pytest.mark.parametrize("identity", [flat(data("text", "none")), {}], ids=["now", "an older checkpoint"])
@pytest.mark.parametrize("then", [data(None, None), data("text", "none")], ids=["chosen", "written"])
@pytest.mark.parametrize("now", [data(None, None), data("text", "none")], ids=["chosen", "written"])
def test_a_choice_by_the_data_is_the_same_run_as_the_resolved_recipe_that_writes_it(
    identity: dict[str, Any], then: dict[str, Any], now: dict[str, Any], tmp_path: Path
) -> None:
    files.write_json(tmp_path / files.STATE, {"progress": {"step": 4}, "identity": identity, "recipe": then})
    files.write_json(tmp_path / files.MANIFEST, {"step": 4, "files": {files.STATE: {"size_bytes": 1, "sha256": ""}}})
    found = resume_point(tmp_path, identity=flat(data("text", "none")), recipe=now)
    assert (found.progress.step, found.notes) == (4, [])
    if identity:
        with pytest.raises(CheckpointError, match=r"data\.encode\.kind: text then, chat now; data\.balance: none then"):
            resume_point(tmp_path, identity=flat(data("chat", "steps")), recipe=data("chat", "steps"))


_OPEN = {
    "data": {"workers": None},
    "precision": "auto",
    "sharding": {"strategy": "auto", "compile": None},
    "topology": {"device": "auto", "backend": "auto", "devices": "auto"},
    "checkpoint": {"asynchronous": None, "every_steps": None},
}
_CHOSEN = {
    "data": {"workers": 0},
    "precision": "fp32",
    "sharding": {"strategy": "full", "compile": False},
    "topology": {"device": "cpu", "backend": "gloo", "devices": [0, 1]},
    "checkpoint": {"asynchronous": False, "every_steps": None},
}


def test_what_fullshard_chose_itself_is_no_change(tmp_path: Path) -> None:
    files.write_json(tmp_path / files.STATE, {"progress": {"step": 4}, "recipe": _OPEN})
    files.write_json(tmp_path / files.MANIFEST, {"step": 4, "files": {files.STATE: {"size_bytes": 1, "sha256": ""}}})
    assert resume_point(tmp_path, identity={}, recipe=_CHOSEN).notes == []
    other = {**_CHOSEN, "checkpoint": {"asynchronous": None, "every_steps": 5}}
    assert resume_point(tmp_path, identity={}, recipe=other).notes == [
        "Changed since the checkpoint: checkpoint.every_steps: not set then, 5 now."
    ]
    files.write_json(tmp_path / files.STATE, {"progress": {"step": 4}, "recipe": _CHOSEN})
    other = {**_CHOSEN, "sharding": {"strategy": "grad_op", "compile": False}}
    assert resume_point(tmp_path, identity={}, recipe=other).notes == [
        "Changed since the checkpoint: sharding.strategy: full then, grad_op now."
    ]
