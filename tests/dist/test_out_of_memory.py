"""`batch.on_oom: split` and `batch.per_device: auto` on real ranks, one of which runs out of memory on purpose.

What such a run must be equal to, bit for bit, is a run that had the smaller micro-batch from that step on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from fullshard.log.metrics import FILE, read
from tests.dist.test_fp16 import outcome, run_folder, states
from tests.families.vision import small as pictures
from tests.ranks import RankPool
from tests.small import curve, model_folder, recipe, token_file, train

TIGHT = "tests.dist.no_room.Tight"
PER_STEP, STEPS = 16, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("oom")
    model_folder(path / "model", tied=False)
    token_file(path / "train.jsonl", records=20 * PER_STEP)
    return path


def tight(folder: Path, name: str, *, samples: list[int], where: str = "forward", fits: int = 2, **more: Any) -> Any:
    """A run in which the rank that has one of these samples fails if it shares a micro-batch with too many others."""
    objective = {"kind": TIGHT, "samples": samples, "fits": fits, "where": where}
    batch = {"per_device": 4, "global": PER_STEP, "on_oom": "split"} | more.pop("batch", {})
    if "lora" in more:
        more["model"] = {"path": str(folder / "model"), "lora": more.pop("lora")}
    return recipe(folder, **{"name": name, "objective": objective, "batch": batch, "duration": {"steps": 2}} | more)


def roomy(settings: dict[str, Any], name: str, per_device: int) -> dict[str, Any]:
    """The same run, with this micro-batch from the start and nothing that fails."""
    batch = {"per_device": per_device, "global": settings["batch"]["global"]}
    return settings | {"name": name, "objective": {"kind": "causal_lm"}, "batch": batch}


def events(records: list[dict[str, Any]], name: str = "out_of_memory") -> list[dict[str, Any]]:
    return [record for record in records if record.get("event") == name]


def same(ranks: RankPool, one: dict[str, Any], other: dict[str, Any], step: int) -> None:
    """Weights, moments and everything else in both checkpoints are equal bit for bit."""
    folders = [run_folder(settings) for settings in (one, other)]
    mine, theirs = [ranks.run(states, path, [f"checkpoint-{step}"], world=1)[0][0] for path in folders]
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


FIRST, LAST = 5, 13
"""Samples of the first step: in the first and in the last micro-batch of a rank that has two of them."""
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "one-rank-forward": (1, 1, {"samples": [FIRST]}),
    "one-rank-backward": (1, 1, {"samples": [LAST], "where": "backward"}),
    "full-forward": (2, 1, {"samples": [FIRST], "where": "forward"}),
    "full-backward": (2, 1, {"samples": [LAST], "where": "backward"}),
    "before-anything": (2, 1, {"samples": [FIRST], "where": "start"}),
    "both-ranks": (2, 1, {"samples": [2, LAST], "where": "backward"}),
    "twice": (2, 1, {"samples": [FIRST], "where": "backward", "fits": 1}),
    "grad_op": (2, 1, {"samples": [LAST], "where": "backward", "sharding": {"strategy": "grad_op"}}),
    "none": (2, 1, {"samples": [LAST], "where": "backward", "sharding": {"strategy": "none"}}),
    "recompute": (
        2,
        1,
        {"samples": [LAST], "where": "recompute", "sharding": {"activation_checkpointing": "full"}},
    ),
    "prefetch": (2, 1, {"samples": [FIRST], "where": "forward", "sharding": {"forward_prefetch": True}}),
    "packed": (2, 1, {"samples": [FIRST], "where": "backward", "data": {"pack": True}}),
    "lora": (2, 1, {"samples": [LAST], "where": "backward", "lora": {"r": 3, "alpha": 9}}),
    "fp16": (2, 1, {"samples": [LAST], "where": "backward", "precision": "fp16"}),
    "hybrid": (
        4,
        2,
        {
            "samples": [LAST],
            "where": "backward",
            "fits": 1,
            "batch": {"per_device": 2},
            "sharding": {"strategy": "hybrid"},
        },
    ),
    "four-ranks": (4, 1, {"samples": [LAST], "where": "forward", "fits": 1, "batch": {"per_device": 2}}),
}


SLOW = {"both-ranks", "prefetch", "before-anything", "four-ranks", "one-rank-forward"}


@pytest.fixture(scope="module")
def plain(ranks: RankPool) -> Callable[[dict[str, Any], int, int], tuple[dict[str, Any], list[dict[str, Any]]]]:
    """The same run, with the smaller micro-batch from the start; runs that differ in nothing else are one."""
    done: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {}

    def run(settings: dict[str, Any], world: int, nodes: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        name = f"plain-{len(done)}"
        settings = roomy(settings, name, settings["objective"]["fits"])
        key = repr((settings | {"name": ""}, world, nodes))
        if key not in done:
            done[key] = settings, ranks.run(train, settings, world=world, nodes=nodes)[0]
        return done[key]

    return run


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in CASES])
def test_the_step_is_repeated_in_smaller_micro_batches(ranks: RankPool, folder: Path, case: str, plain: Any) -> None:
    world, nodes, changes = CASES[case]
    settings = tight(folder, case, **changes)
    found = ranks.run(train, settings, world=world, nodes=nodes)[0]
    reference, expected = plain(settings, world, nodes)
    assert curve(found, "loss", "grad_norm", "lr") == curve(expected, "loss", "grad_norm", "lr")
    same(ranks, settings, reference, 2)
    fits = settings["objective"]["fits"]
    assert [each["per_device"] for each in events(found)] == ([2, 1] if case == "twice" else [fits])
    assert (run_folder(settings) / "log.txt").read_text().count("ran out of memory at step 1") == len(events(found))


def train_as_before_torch_2_13(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """FSDP of torch 2.11 and 2.12 has no such function."""
    own = FSDPModule.reset_iter_state
    del FSDPModule.reset_iter_state
    try:
        return train(settings)
    finally:
        FSDPModule.reset_iter_state = own  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "case",
    ["one-rank-backward", "full-forward", "recompute"]
    + [pytest.param(case, marks=pytest.mark.slow) for case in ("full-backward", "grad_op", "prefetch", "hybrid")],
)
def test_torch_without_a_way_back_from_a_failed_pass(ranks: RankPool, folder: Path, case: str, plain: Any) -> None:
    world, nodes, changes = CASES[case]
    settings = tight(folder, f"older-{case}", **changes)
    found = ranks.run(train_as_before_torch_2_13, settings, world=world, nodes=nodes)[0]
    reference, expected = plain(settings, world, nodes)
    assert curve(found, "loss", "grad_norm", "lr") == curve(expected, "loss", "grad_norm", "lr")
    same(ranks, settings, reference, 2)
    assert len(events(found)) == 1


MIDDLE = 2 * PER_STEP + 5
"""A sample of the third step."""


def test_in_mid_run_and_resumed(ranks: RankPool, folder: Path) -> None:
    """The steps before stay as they are, the later ones are those of a run that changed its recipe there; and a run
    that resumes after the split goes on with the smaller micro-batch."""
    saves = {"checkpoint": {"every_steps": 1, "keep": None}, "duration": {"steps": 4}, "ema": 0.5}
    settings = tight(folder, "middle", samples=[MIDDLE], where="backward", **saves)
    found = ranks.run(train, settings, world=2)[0]
    whole, rest = roomy(settings, "whole", 4), roomy(settings, "rest", 2)
    before = ranks.run(train, whole, world=2)[0]
    after = ranks.run(train, rest, str(run_folder(whole) / "checkpoint-2"), world=2)[0]
    numbers = [curve(records, "loss", "grad_norm") for records in (found, before, after)]
    assert numbers[0] == numbers[1][:2] + numbers[2]
    same(ranks, settings, rest, 4)
    for step in (2, 3):
        again = settings | {"name": f"from-{step}"}
        later = ranks.run(train, again, str(run_folder(settings) / f"checkpoint-{step}"), world=2)[0]
        assert curve(later, "loss", "grad_norm") == curve(found, "loss", "grad_norm")[step:]
        assert len(events(later)) == (1 if step == 2 else 0)
        same(ranks, again, settings, 4)


def test_a_partial_window_and_validations(ranks: RankPool, folder: Path) -> None:
    """The last step of an epoch has fewer rows; a validation leaves parameters gathered."""
    token_file(folder / "few.jsonl", records=26)
    more: dict[str, Any] = {"data": {"train": str(folder / "few.jsonl"), "validation": str(folder / "few.jsonl")}}
    more |= {"evaluate": {"parts": [{"kind": "loss"}], "every_steps": 1, "per_device": 2, "at_start": True}}
    settings = tight(folder, "partial", samples=[0, 21], where="backward", duration={"steps": 4}, **more)
    plain = roomy(settings, "partial-plain", 2)
    found, expected = [ranks.run(train, each, world=2)[0] for each in (settings, plain)]
    assert curve(found, "loss", "grad_norm") == curve(expected, "loss", "grad_norm")
    same(ranks, settings, plain, 4)
    assert len(events(found)) == 1


@pytest.mark.parametrize("calls", [[0], [1], [0, 1]], ids=["state", "update", "again"])
def test_in_the_update(ranks: RankPool, folder: Path, calls: list[int]) -> None:
    """Creating the optimizer's state is repeated, once; an update is not, since a part of it may be done."""
    update = {"kind": "tests.dist.no_room.TightUpdate", "calls": calls, "lr": 1e-2, "weight_decay": 0.1}
    settings = tight(folder, f"update-{len(calls)}-{calls[0]}", samples=[], optimizer=update)
    settings["objective"] = {"kind": "causal_lm"}
    plain = roomy(settings, f"{settings['name']}-plain", 4) | {"optimizer": {"lr": 1e-2, "weight_decay": 0.1}}
    if calls == [0]:
        found, expected = [ranks.run(train, each, world=1)[0] for each in (settings, plain)]
        assert curve(found, "loss", "grad_norm") == curve(expected, "loss", "grad_norm")
        same(ranks, settings, plain, 2)
        assert not events(found)
    else:
        assert ranks.run(outcome, settings, world=1)[0][0] == "OutOfMemoryError"
        said = " ".join(path.read_text() for path in run_folder(settings).glob("crash-1/*.txt"))
        assert "This was in the optimizer's update" in said


def test_one_row_is_the_end(ranks: RankPool, folder: Path) -> None:
    settings = tight(folder, "end", samples=[FIRST], fits=0)
    assert ranks.run(outcome, settings, world=1)[0][0] == "OutOfMemoryError"
    assert [each["per_device"] for each in events(read(run_folder(settings) / FILE))] == [2, 1]


@pytest.mark.slow
def test_a_frozen_model_gathers_too(ranks: RankPool, folder: Path) -> None:
    settings = tight(folder, "taught", samples=[LAST, MIDDLE], where="backward", duration={"steps": 3})
    settings["objective"] |= {"kind": "tests.dist.no_room.Taught", "teacher": str(folder / "model")}
    plain = settings | {"name": "taught-plain", "batch": {"per_device": 2, "global": PER_STEP}}
    found, expected = [ranks.run(train, each, world=2)[0] for each in (settings, plain)]
    assert curve(found, "loss", "grad_norm") == curve(expected, "loss", "grad_norm")
    same(ranks, settings, plain, 3)
    assert len(events(found)) == 1


@pytest.mark.slow
def test_pictures_on_some_ranks_only(ranks: RankPool, tmp_path: Path) -> None:
    """The first row of the micro-batch that fails has no picture, so the rank that answers with it alone adds one."""
    pictures.model_folder(tmp_path / "model", "qwen2_5_vl")
    pictures.write_records(tmp_path, [0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0])
    kind = {"kind": "tests.dist.no_room.TightVision", "samples": [7, 12], "fits": 1, "where": "backward"}
    batch = {"per_device": 2, "global": 8, "on_oom": "split"}
    more: dict[str, Any] = {"duration": {"steps": 2}, "data": {"balance": "none"}}
    settings = pictures.settings(tmp_path, "tight", objective=kind, batch=batch, **more)
    plain = pictures.settings(tmp_path, "plain", batch={"per_device": 1}, **more)
    found, expected = [ranks.run(train, each, world=2)[0] for each in (settings, plain)]
    assert curve(found, "loss", "grad_norm") == curve(expected, "loss", "grad_norm")
    same(ranks, settings, plain, 2)
    assert len(events(found)) == 1


# auto


@pytest.mark.parametrize(("world", "fits"), [(1, 16), (2, 2), (2, 8)])
def test_auto_chooses_what_fits(ranks: RankPool, folder: Path, world: int, fits: int) -> None:
    """By trial; the weights, the random numbers and so the losses are those of a run with that number."""
    every = list(range(20 * PER_STEP))
    batch = {"per_device": "auto", "global": PER_STEP, "on_oom": "stop"}
    settings = tight(folder, f"auto-{world}-{fits}", samples=every, fits=fits, where="backward", batch=batch)
    plain = roomy(settings, f"{settings['name']}-plain", min(fits, 8))
    found, expected = [ranks.run(train, each, world=world)[0] for each in (settings, plain)]
    assert curve(found, "loss", "grad_norm") == curve(expected, "loss", "grad_norm")
    same(ranks, settings, plain, 2)
    said = " ".join((run_folder(settings) / "log.txt").read_text().split())
    assert f"batch.per_device = auto is {min(fits, 8)} rows" in said
    assert f"per_device: {min(fits, 8)}\n" in (run_folder(settings) / "recipe.resolved.yaml").read_text()


def test_auto_is_decided_once(ranks: RankPool, folder: Path) -> None:
    """A resumed run takes what the checkpoint says, and does not try again; then it may be split further."""
    batch = {"per_device": "auto", "global": PER_STEP}
    saves = {"checkpoint": {"every_steps": 1, "keep": None}, "duration": {"steps": 4}}
    settings = tight(folder, "once", samples=[MIDDLE], fits=2, where="forward", batch=batch, **saves)
    found = ranks.run(train, settings, world=2)[0]
    assert [(each["before"], each["per_device"]) for each in events(found)] == [(8, 4), (4, 2)]
    again = settings | {"name": "once-more"}
    later = ranks.run(train, again, str(run_folder(settings) / "checkpoint-3"), world=2)[0]
    assert "trial" not in (run_folder(again) / "log.txt").read_text()
    assert curve(later, "loss", "grad_norm") == curve(found, "loss", "grad_norm")[3:]
    same(ranks, again, settings, 4)


def test_an_objective_with_collectives_is_refused(ranks: RankPool, folder: Path) -> None:
    """They cannot be repeated by one rank, so the run ends in its first step rather than hang in a later one."""
    settings = tight(folder, "own", samples=[])
    settings["objective"] = {"kind": "tests.dist.no_room.Gathering"}
    for name, text, _ in ranks.run(outcome, settings, world=2):
        assert name == "SetupError"
        assert "2 collectives of its own" in text


def test_what_passes_change_is_restored(ranks: RankPool, folder: Path) -> None:
    """Running statistics of a batch norm, which the failed try has changed, on both ranks."""
    settings = tight(folder, "norms", samples=[LAST], where="backward")
    settings["objective"]["kind"] = "tests.dist.no_room.Normed"
    plain = roomy(settings, "norms-plain", 2) | {"objective": settings["objective"]}
    found, expected = [ranks.run(train, each, world=2)[0] for each in (settings, plain)]
    assert curve(found, "loss", "mean") == curve(expected, "loss", "mean")
