"""Runs whose checkpoints go to a remote store, on real ranks: file://, an object store, memory://."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load_file
from typer.testing import CliRunner

from fullshard.checkpoint import folder as files
from fullshard.checkpoint import integrity
from fullshard.checkpoint.reader import open_tensors
from fullshard.log.metrics import FILE, read
from tests import bucket, small
from tests.near import assert_near
from tests.ranks import RankPool
from tests.small import curve, model_folder, recipe, token_file

STEPS = 9
"""90 records make epochs of 6 steps."""
NUMBERS = ("step", "loss", "grad_norm")

bucket.install()


def train(chosen: dict[str, Any], **settings: Any) -> list[dict[str, Any]]:
    """From here, so that a rank imports this file and knows the bucket."""
    return small.train(chosen, **settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("remote")
    model_folder(path / "model")
    token_file(path / "train.jsonl", records=90)
    return path


@pytest.fixture(scope="module")
def straight(ranks: RankPool, folder: Path) -> list[tuple[float, ...]]:
    """The same run with its checkpoints on the disk, never stopped."""
    chosen = settings(folder, "straight", checkpoint={"store": None, "at_end": False, "every_steps": None})
    return curve(ranks.run(train, chosen, world=2)[0], *NUMBERS)


@pytest.fixture(scope="module")
def half(ranks: RankPool, folder: Path, straight: list[tuple[float, ...]]) -> str:
    """A run that stopped after step 4, at a file:// store; the machine it ran on is lost."""
    chosen = settings(folder, "half", duration={"steps": 4}, checkpoint={"every_steps": 2, "keep": 1})
    ranks.run(train, chosen, world=2)
    return str(store(chosen))


def settings(folder: Path, name: str, *, output: str = "runs", **sections: Any) -> dict[str, Any]:
    """A recipe that saves every third step, at a store beside the local output."""
    saving = {"every_steps": 3, "keep": None, "store": f"file://{folder}/store"} | sections.pop("checkpoint", {})
    sections = {"duration": {"steps": STEPS}, "schedule": {"kind": "constant"}} | sections
    return recipe(folder, name=name, checkpoint=saving, **sections) | {"output": str(folder / output)}


def store(chosen: dict[str, Any]) -> Path:
    return files.place(f"{chosen['checkpoint']['store']}/{chosen['name']}")


def names(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir())


def samples(records: list[dict[str, Any]]) -> list[tuple[int, list[int]]]:
    return [(r["step"], sorted(r["sample_ids"])) for r in records if r.get("event") == "samples"]


def outcome(chosen: dict[str, Any], resume: str = "auto") -> tuple[str, str]:
    """How a rank's run ended."""
    from fullshard.recipes.read import read as read_recipe
    from fullshard.run import execute

    try:
        return "stopped", execute(read_recipe(chosen), resume=resume).stopped
    except Exception as error:
        return type(error).__name__, str(error)


def impatient(chosen: dict[str, Any]) -> tuple[str, str]:
    """The same on a rank that does not wait for a store that fails."""
    from fullshard.faults import patience

    waits = patience._WAITS_S
    patience._WAITS_S = ()
    try:
        return outcome(chosen)
    finally:
        patience._WAITS_S = waits


def test_a_run_saves_to_a_store_and_keeps_its_log_there(half: str, folder: Path) -> None:
    run = files.place(half)
    assert names(run) == [
        ".model-is-whole",
        "checkpoint-4",
        "last",
        "log.txt",
        "metrics.jsonl",
        "model",
        "recipe.resolved.yaml",
        "units.json",
    ]
    assert (run / "last").read_text() == "checkpoint-4"
    local = folder / "runs" / "half"
    assert (run / "metrics.jsonl").read_bytes() == (local / "metrics.jsonl").read_bytes()
    assert not list(local.glob("checkpoint-*"))


def test_another_machine_resumes_bitwise_with_the_whole_history(
    ranks: RankPool, folder: Path, half: str, straight: list[tuple[float, ...]]
) -> None:
    chosen = settings(folder, "half", output="elsewhere", checkpoint={"every_steps": 2, "keep": 1})
    records = ranks.run(train, chosen, world=2)[0]
    assert curve(records, *NUMBERS) == straight
    assert [r["step"] for r in records if r.get("event") == "saved"] == [2, 4, 6, 8, 9]
    assert [n for n in names(store(chosen)) if n.startswith("checkpoint")] == ["checkpoint-9"]


def test_a_named_address_on_another_world_size_takes_the_same_samples(ranks: RankPool, folder: Path, half: str) -> None:
    chosen = settings(folder, "alone", duration={"steps": 12}, checkpoint={"store": None, "at_end": False})
    chosen["log"] = {**chosen["log"], "sample_ids": True}
    two, one = (
        ranks.run(train, chosen | {"name": f"alone-{world}"}, resume=f"{half}/last", world=world)[0] for world in (2, 1)
    )
    assert samples(one) == samples(two)
    assert len(samples(one)) == 12 - files.read_state(files.named(half))["progress"]["step"]
    for ours, theirs in zip(curve(one, "loss"), curve(two, "loss"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)


def test_starting_over_moves_both_the_store_and_the_folder_aside(ranks: RankPool, folder: Path, half: str) -> None:
    last = files.named(half).name
    chosen = settings(folder, "half", output="elsewhere", duration={"steps": 1}, checkpoint={"at_end": False})
    assert ranks.run(outcome, chosen, resume="never", world=2) == [("stopped", "done")] * 2
    aside = files.place(f"{half}.old-1")
    assert files.named(aside).name == last
    assert (aside / "metrics.jsonl").exists()
    assert (folder / "elsewhere" / "half.old-1" / "metrics.jsonl").exists()
    assert files.published(files.place(half)) == []
    assert [step for (step,) in curve(read(folder / "elsewhere" / "half" / FILE), "step")] == [1]


def test_an_object_store_in_the_background_and_half_a_checkpoint(
    ranks: RankPool, folder: Path, straight: list[tuple[float, ...]]
) -> None:
    address = bucket.url(folder / "objects")
    chosen = settings(folder, "objects", checkpoint={"store": address, "asynchronous": True, "at_end": False})
    assert curve(ranks.run(train, chosen, world=2)[0], *NUMBERS) == straight
    run = store(chosen)
    assert [path.name for path in files.published(run)] == ["checkpoint-3", "checkpoint-6", "checkpoint-9"]
    stored = open_tensors(run / "checkpoint-9")
    before = {name: stored.whole(name) for name in stored.names()}
    (run / "checkpoint-9" / files.MANIFEST).unlink()  # killed before the end of its last save
    records = ranks.run(train, chosen, world=2)[0]
    assert f"Resuming from {run}/checkpoint-6" in (folder / "runs" / "objects" / "log.txt").read_text()
    assert curve(records, *NUMBERS) == straight
    again = open_tensors(run / "checkpoint-9")
    assert again.names() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(again.whole(name), tensor), name


@pytest.mark.parametrize(("background", "name"), [(False, "__1_0.distcp"), (True, "manifest.json")])
def test_a_store_that_fails_in_the_middle_stops_every_rank_with_the_reason(
    ranks: RankPool, folder: Path, background: bool, name: str
) -> None:
    place = folder / f"refusing-{name}"
    saving = {"store": bucket.url(place), "every_steps": 2, "asynchronous": background, "at_end": False}
    chosen = settings(folder, f"refused-{name}", duration={"steps": 1000}, checkpoint=saving)
    (place / bucket.REFUSING).write_text(f"checkpoint-4/{name}")
    ends = ranks.run(impatient, chosen, world=2)
    assert [kind for kind, _ in ends] == ["CheckpointError"] * 2, ends
    for _, said in ends:
        assert f"{store(chosen)}/checkpoint-4 cannot be " in said
        assert f"LibraryError: 503 SlowDown for {name}" in said
    [left] = files.published(store(chosen))
    assert left.name == "checkpoint-2"
    (place / bucket.REFUSING).unlink()
    assert ranks.run(outcome, chosen | {"duration": {"steps": 4}}, world=2) == [("stopped", "done")] * 2
    assert f"Resuming from {left}" in (folder / "runs" / chosen["name"] / "log.txt").read_text()
    assert [path.name for path in files.published(store(chosen))] == ["checkpoint-2", "checkpoint-4"]


@pytest.mark.parametrize(
    ("background", "name", "waits"),
    [
        (False, "__1_0.distcp", [1, 2]),
        (True, "manifest.json", [1, 2]),
        pytest.param(True, "__0_0.distcp", [1, 2, 4, 8, 16], marks=pytest.mark.slow),  # half a minute
    ],
)
def test_a_store_that_is_gone_for_a_while_delays_a_save_and_loses_nothing(
    ranks: RankPool, folder: Path, background: bool, name: str, waits: list[int]
) -> None:
    place = folder / f"back-{name}"
    saving = {"store": bucket.url(place), "every_steps": 2, "asynchronous": background, "at_end": False}
    chosen = settings(folder, f"back-{name}", duration={"steps": 6}, checkpoint=saving)
    (place / bucket.REFUSING).write_text(f"checkpoint-4/{name}\n{len(waits)}")
    assert ranks.run(outcome, chosen, world=2) == [("stopped", "done")] * 2
    said = " ".join((folder / "runs" / chosen["name"] / "log.txt").read_text().split())
    assert f"LibraryError: 503 SlowDown for {name}" in said
    assert sorted({int(wait) for wait in re.findall(r"Trying again in (\d+) s\.", said)}) == waits
    delayed = said.rpartition("Trying again in")[2].partition("checkpoint-6")[0]
    assert "checkpoint-4" in delayed
    assert "save less often" not in delayed, "the store was gone: no other setting would have helped"
    assert [path.name for path in files.published(store(chosen))] == [f"checkpoint-{step}" for step in (2, 4, 6)]
    assert not [line for path in files.published(store(chosen)) for line in integrity.problems(path)]


def slowly_saved(chosen: dict[str, Any]) -> tuple[str, str]:
    """How a run ended in which every save in the background goes on for two seconds after somebody waits for it."""
    from fullshard.checkpoint import saver

    settle, write, awaited = saver.Saver.settle, saver.write, threading.Event()

    def waits(self: Any, **named: Any) -> None:
        if self.background.busy:
            awaited.set()
        settle(self, **named)

    def writes(*given: Any, **named: Any) -> Any:
        awaited.wait()
        time.sleep(2)
        return write(*given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saver.Saver, "settle", waits)
        patch.setattr(saver, "write", writes)
        return outcome(chosen)


def test_only_a_save_that_the_next_one_waits_for_asks_for_fewer_of_them(ranks: RankPool, folder: Path) -> None:
    saving = {"store": None, "every_steps": 2, "asynchronous": True, "at_end": False}
    chosen = settings(folder, "slow", duration={"steps": 4}, checkpoint=saving)
    assert ranks.run(slowly_saved, chosen, world=1) == [("stopped", "done")]
    said = " ".join((folder / "runs" / "slow" / "log.txt").read_text().split())
    assert said.count("save less often") == 1, "the end waits for the last save, which is no news"
    assert said.index("save less often") < said.index("checkpoint-4")


def test_local_checkpoints_beside_an_empty_store_are_an_error(ranks: RankPool, folder: Path) -> None:
    chosen = settings(folder, "moved", duration={"steps": 3}, checkpoint={"store": None, "at_end": False})
    ranks.run(train, chosen, world=1)
    chosen["checkpoint"]["store"] = f"file://{folder}/store"
    [(kind, said)] = ranks.run(outcome, chosen, world=1)
    local = folder / "runs" / "moved"
    assert kind == "CheckpointError"
    assert said.startswith(f"{local} has checkpoints of an earlier run, but checkpoint.store = file://{folder}/store")
    chosen["duration"] = {"steps": 6}
    assert ranks.run(outcome, chosen, resume=str(local), world=1) == [("stopped", "done")]
    assert [path.name for path in files.published(store(chosen))] == ["checkpoint-6"]


def trial(chosen: dict[str, Any]) -> list[tuple[str, str, str]]:
    from fullshard.check.trial import run_trial
    from fullshard.recipes.read import read as read_recipe

    return [(f.level, f.check, f.text) for f in run_trial(read_recipe(chosen))]


@pytest.mark.parametrize("kind", ["file", "bucket"])
def test_the_trial_of_a_check_uses_the_store_and_leaves_nothing_there(ranks: RankPool, folder: Path, kind: str) -> None:
    place = folder / f"trial-{kind}"
    address = bucket.url(place) if kind == "bucket" else f"file://{place}/deep"
    found = ranks.run(trial, settings(folder, "trial", checkpoint={"store": address}), world=2)[0]
    assert not [finding for finding in found if finding[0] != "ok"]
    [written] = [text for _, check, text in found if check == "checkpoint"]
    assert f"written to {address} in" in written
    [shared] = [text for _, check, text in found if check == "shared files"]
    assert shared == f"{address}: rank 0 sees every rank's file, and every rank sees rank 0's"
    assert not [path for path in place.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("s3://box/runs", r"store: s3://box/runs needs the package s3fs, .*pip install 'fullshard[s3]'"),
        ("nosuch://box/runs", "store: nosuch://box/runs: nosuch:// is not a known kind of store"),
        (
            "file:///proc/runs",
            "store: checkpoint.store = file:///proc/runs: writing and reading back a small file failed",
        ),
        ("memory://runs", "store: checkpoint.store = memory://runs is the memory of one process, but 2 ranks must"),
    ],
)
def test_a_store_that_cannot_be_used_stops_a_run_before_its_ranks_meet(
    ranks: RankPool, folder: Path, address: str, said: str
) -> None:
    kind, text = ranks.run(outcome, settings(folder, "refused", checkpoint={"store": address}), world=2)[0]
    assert kind == "SetupError"
    assert said.split(".*")[0] in text
    assert said.split(".*")[-1] in text
    assert not (folder / "runs" / "refused" / "log.txt").exists()


def in_memory(chosen: dict[str, Any], out: str) -> dict[str, Any]:
    """Everything in one process, whose memory is the store."""
    from fullshard.cli import app

    MemoryFileSystem.store.clear()
    run: Any = store(chosen)
    found: dict[str, Any] = {}
    train(chosen | {"duration": {"steps": 4}})
    found["half"] = [path.name for path in files.published(run)], (run / "last").read_text()
    found["records"] = train(chosen)
    found["best"] = (run / "best").read_text(), files.read_state(files.named(run))["progress"]["best_step"]
    found["kept"] = [path.name for path in files.published(run)]
    call = CliRunner()
    found["verified"] = call.invoke(app, ["verify", str(run)])
    found["exported"] = call.invoke(app, ["export", f"{run}/best", f"{out}/exported"])
    run.fs.get(f"{run.path}/model", f"{out}/model", recursive=True)
    found["from"] = outcome(
        chosen | {"name": "from", "model": {"from": f"{run}/best"}, "duration": {"steps": 1}, "optimizer": {"lr": 1e-8}}
    )
    assert found["from"] == ("stopped", "done"), found["from"]
    run.fs.get(f"{run.parent.path}/from/model", f"{out}/from", recursive=True)
    shard = next(path for path in (run / "checkpoint-6").iterdir() if path.name.endswith(".distcp"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    found["damaged"] = call.invoke(app, ["verify", "--json", str(run)])
    MemoryFileSystem.store.clear()
    return {
        key: (value.exit_code, value.output) if hasattr(value, "exit_code") else value for key, value in found.items()
    }


def test_a_store_in_memory_trains_resumes_verifies_exports_and_starts_another(
    ranks: RankPool, folder: Path, tmp_path: Path
) -> None:
    saving = {"store": "memory://box/runs", "every_steps": 2, "best": "loss", "export": "best"}
    chosen = settings(folder, "memory", duration={"steps": 6}, checkpoint=saving)
    chosen |= {"data": {**chosen["data"], "holdout": 0.2}, "evaluate": {"every_steps": 2}}
    [found] = ranks.run(in_memory, chosen, str(tmp_path), world=1)
    assert found["half"] == (["checkpoint-2", "checkpoint-4"], "checkpoint-4")
    assert [step for (step,) in curve(found["records"], "step")] == [1, 2, 3, 4, 5, 6]
    assert found["best"][0] == f"checkpoint-{found['best'][1]}"
    assert found["verified"][0] == 0, found["verified"]
    assert found["verified"][1].count("is intact") == len(found["kept"])
    assert found["exported"][0] == 0, found["exported"]
    ours, theirs, started = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "exported", "from"))
    assert ours.keys() == theirs.keys() == started.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
        assert_near(started[name], tensor, within=1e-6)  # one step of 1e-8 on
    code, report = found["damaged"]
    assert code == 2
    assert [c["whole"] for c in json.loads(report)["checkpoints"]] == [True] * (len(found["kept"]) - 1) + [False]


def test_the_model_at_the_store_loads_after_a_download(folder: Path, half: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    place: Any = files.place(f"{half}.old-1/model")
    place.fs.get(place.path, str(tmp_path / "model"), recursive=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    stored = open_tensors(files.named(f"{half}.old-1")).section("model")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, stored.whole(name)), name
