"""Checkpoints on real ranks: what is written and when; and a run that stopped anywhere continues as if it had not."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import psutil  # type: ignore[import-untyped]
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from fullshard.checkpoint import folder as files
from fullshard.commands.verify import problems
from fullshard.contracts.evaluation import Evaluation, EvaluationInputs, Findings
from fullshard.log.metrics import FILE, last_step, read
from tests.ranks import RankPool
from tests.small import curve, model_folder, recipe, token_file, train

STEPS, STOP = 9, 4
"""90 records make epochs of 6 steps: step 4 is in the middle of the first one."""
DROPOUT = {"overrides": {"attention_dropout": 0.2}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints")
    model_folder(path / "model")
    token_file(path / "train.jsonl", records=90)
    return path


def overflowing(model: Path) -> None:
    """Makes the gradient of the embedding so large that fp16 overflows until the loss scale has come down."""
    state = load_file(model / "model.safetensors")
    state["model.embed_tokens.weight"] *= 0.03
    save_file(state, model / "model.safetensors", metadata={"format": "pt"})


def settings(folder: Path, name: str, **sections: Any) -> dict[str, Any]:
    if "path" in sections.get("model", {}):
        sections["model"] = {**sections["model"], "path": str(folder / sections["model"]["path"])}
    sections.setdefault("duration", {"steps": STEPS})
    sections.setdefault("checkpoint", {"every_steps": STOP, "keep": None})
    return recipe(folder, name=name, **sections)


def outcome(settings: dict[str, Any], resume: str = "auto", anyway: bool = False) -> tuple[str, str]:
    """How a rank's run ended: the reason, or the class and text of the error."""
    from fullshard.recipes.read import read as read_recipe
    from fullshard.run import execute

    try:
        return "stopped", execute(read_recipe(settings), resume=resume, anyway=anyway).stopped
    except Exception as error:
        return type(error).__name__, str(error)


def run_folder(settings: dict[str, Any]) -> Path:
    return Path(settings["output"], settings["name"])


def checkpoints(run: Path) -> list[str]:
    return [path.name for path in files.published(run)]


def weights(run: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(next((run / "model").glob("*.safetensors")))
    return tensors


def assert_bitwise(run: Path, straight: Path) -> None:
    ours, theirs = weights(run), weights(straight)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


class Trouble(Evaluation):
    """Does something to one rank in the middle of a run, after step `at`: an evaluation is called on every rank."""

    at: int
    rank: int
    act: str
    steps: ClassVar[dict[int, int]] = {}

    def run(self, inputs: EvaluationInputs) -> Findings:
        seen = self.steps[id(inputs)] = self.steps.get(id(inputs), 0) + 1
        if seen == self.at and int(os.environ["RANK"]) == self.rank:
            getattr(self, f"_{self.act}")()
        return Findings()

    def _sigterm(self) -> None:
        # Twice, as from a scheduler that signals every process and from the launcher that passes its own on.
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)

    def _sigusr1(self) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)

    def _full_disk(self) -> None:
        # A larger file cannot be written, in this process alone; log.txt and metrics.jsonl are smaller.
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, resource.RLIM_INFINITY))

    def _folder_gone(self) -> None:
        run = Path(os.environ["TROUBLE_RUN"])
        run.rename(run.with_name("moved"))
        run.write_text("in the way")


def troubled(settings: dict[str, Any], resume: str = "auto") -> tuple[str, str]:
    os.environ["TROUBLE_RUN"] = str(run_folder(settings))
    Trouble.steps.clear()
    try:
        return outcome(settings, resume)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def trouble(act: str, *, at: int, rank: int) -> dict[str, Any]:
    return {"every_steps": 1, "parts": [{"kind": f"{__name__}.Trouble", "at": at, "rank": rank, "act": act}]}


# When


def test_2500_samples_in_three_epochs_are_saved_at_40_80_and_120(ranks: RankPool, tmp_path: Path) -> None:
    small: dict[str, Any] = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    }
    model_folder(tmp_path / "model", num_hidden_layers=1, **small)
    (tmp_path / "train.jsonl").write_text("".join(f'{{"input_ids": [{i % 97}, {i % 89}]}}\n' for i in range(2500)))
    chosen = recipe(tmp_path, name="three", batch={"per_device": 8, "accumulate": 8}, duration={"epochs": 3})
    chosen |= {"log": {"every_steps": 40, "sinks": []}, "sharding": {"wrap": {"whole": True}}}
    del chosen["checkpoint"], chosen["batch"]["global"], chosen["duration"]["steps"]
    ranks.run(train, chosen, world=1)
    assert checkpoints(run_folder(chosen)) == ["checkpoint-40", "checkpoint-80", "checkpoint-120"]


def test_saves_by_steps_and_at_the_end(ranks: RankPool, folder: Path) -> None:
    chosen = settings(folder, "every", checkpoint={"every_steps": 2, "keep": None}, duration={"steps": 5})
    ranks.run(train, chosen, world=2)
    assert checkpoints(run_folder(chosen)) == ["checkpoint-2", "checkpoint-4", "checkpoint-5"]
    assert os.readlink(run_folder(chosen) / "last") == "checkpoint-5"
    manifest = files.read_manifest(run_folder(chosen) / "checkpoint-5")
    assert (manifest["step"], manifest["epoch"], manifest["format"]) == (5, 0, "sharded")
    assert manifest["tensors"]["model/model.embed_tokens.weight"] == {"shape": [97, 32], "dtype": "float32"}


def test_saves_every_second_epoch(ranks: RankPool, folder: Path) -> None:
    chosen = settings(folder, "epochs", checkpoint={"every_epochs": 2, "keep": None}, batch={"global": 48})
    ranks.run(train, chosen, world=1)
    assert checkpoints(run_folder(chosen)) == ["checkpoint-4", "checkpoint-8", "checkpoint-9"]  # epochs of 2 steps


def test_saves_by_minutes_of_rank_0(ranks: RankPool, folder: Path) -> None:
    """Time is always up here. Rank 0 says so in a step, all ranks read it in the next one and save there."""
    chosen = settings(folder, "minutes", checkpoint={"every_minutes": 1e-9, "keep": None}, duration={"steps": 5})
    ranks.run(train, chosen, world=2)
    assert checkpoints(run_folder(chosen)) == ["checkpoint-2", "checkpoint-4", "checkpoint-5"]


def test_a_trial_leaves_no_checkpoint_and_no_model(ranks: RankPool, folder: Path) -> None:
    chosen = settings(folder, "trial", checkpoint={"at_end": False}, duration={"steps": 2})
    ranks.run(train, chosen, world=1)
    assert checkpoints(run_folder(chosen)) == []
    assert not (run_folder(chosen) / "model").exists()


def test_retention_deletes_neither_best_nor_last(ranks: RankPool, folder: Path) -> None:
    """The loss falls, so the first validation is the `best` one by the largest loss."""
    chosen = settings(
        folder,
        "best",
        duration={"steps": 6},
        data={"validation": str(folder / "train.jsonl")},
        checkpoint={"every_steps": 1, "keep": 2, "best": {"metric": "loss", "mode": "max"}},
        evaluate={"every_steps": 1, "parts": ["loss"]},
    )
    records = ranks.run(train, chosen, world=2)[0]
    run, losses = run_folder(chosen), [r["loss"] for r in records if r["kind"] == "validation"]
    assert losses.index(max(losses)) == 0
    assert checkpoints(run) == ["checkpoint-1", "checkpoint-5", "checkpoint-6"]
    assert os.readlink(run / "best") == "checkpoint-1"
    assert os.readlink(run / "last") == "checkpoint-6"
    assert files.read_state(run / "best")["progress"]["best"] == losses[0]


@pytest.fixture(scope="module")
def two_ranks(ranks: RankPool, folder: Path) -> Path:
    """A shuffled run on two ranks."""
    chosen = settings(folder, "two", data={"shuffle": True})
    ranks.run(train, chosen, world=2)
    return run_folder(chosen)


# Saves that do not end well


def test_an_unfinished_checkpoint_is_not_resumed_and_is_removed_by_the_next_save(
    ranks: RankPool, folder: Path, two_ranks: Path
) -> None:
    chosen = settings(folder, "unfinished", data={"shuffle": True})
    run = run_folder(chosen)
    shutil.copytree(two_ranks / "checkpoint-4", run / "checkpoint-4")
    # A save that was cut off just before its manifest: everything else is there.
    leftover = run / ".unfinished-checkpoint-8"
    shutil.copytree(two_ranks / "checkpoint-8", leftover)
    (leftover / files.MANIFEST).unlink()
    for kind, message in ranks.run(outcome, chosen, resume=str(leftover), world=1):
        assert kind == "CheckpointError"
        assert "not a finished checkpoint" in message
    records = ranks.run(train, chosen, world=2)[0]
    assert curve(records, "step")[0] == (5,)
    assert not leftover.exists()
    assert checkpoints(run) == ["checkpoint-4", "checkpoint-8", "checkpoint-9"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_under_one_rank_stops_all(ranks: RankPool, folder: Path, rank: int) -> None:
    chosen = settings(folder, f"full-disk-{rank}", checkpoint={"every_steps": 2})
    ends = ranks.run(troubled, chosen | {"evaluate": trouble("full_disk", at=4, rank=rank)}, world=2)
    assert [kind for kind, _ in ends] == ["CheckpointError"] * 2, ends
    assert "Check disk space" in ends[rank][1]
    run = run_folder(chosen)
    # The first is saved before an evaluation of the user's own runs for the first time.
    assert checkpoints(run) == ["checkpoint-1", "checkpoint-2"]
    assert os.readlink(run / "last") == "checkpoint-2"
    assert problems(run / "checkpoint-2") == [], "the one before is whole"
    # With free space again the run continues from the last complete checkpoint and cleans up.
    assert ranks.run(outcome, chosen, world=2) == [("stopped", "done")] * 2
    assert not list(run.glob(".unfinished-*"))


def test_a_deleted_run_folder_stops_all_ranks(ranks: RankPool, folder: Path) -> None:
    chosen = settings(folder, "gone", checkpoint={"every_steps": 2})
    ends = ranks.run(troubled, chosen | {"evaluate": trouble("folder_gone", at=2, rank=0)}, world=2)
    assert [kind for kind, _ in ends] == ["CheckpointError"] * 2, ends
    assert "cannot be created" in ends[0][1]


# Signals


@pytest.mark.parametrize(
    ("act", "rank", "at"), [("sigterm", 1, 2), ("sigusr1", 0, 4), ("sigterm", 1, 5), ("sigusr1", 1, 7)]
)
def test_a_signal_to_one_rank_stops_all_at_the_same_step_and_the_run_resumes(
    ranks: RankPool, folder: Path, act: str, rank: int, at: int
) -> None:
    """The flag travels with the next step's count and is read a step later: the stop is two steps after the signal,
    which for 4 is the last step of an epoch and for 7 the last of the run."""
    same: dict[str, Any] = {
        "model": DROPOUT,
        "data": {"validation": str(folder / "train.jsonl")},
        "checkpoint": {"best": {"metric": "loss"}},
    }
    validated: dict[str, Any] = {"evaluate": {"every_steps": 3, "parts": ["loss"]}}
    straight = settings(folder, "quiet", **same, **validated)
    if not run_folder(straight).exists():
        ranks.run(train, straight, world=2)
    stopped = settings(folder, f"{act}-{at}", **same)
    evaluate = trouble(act, at=at, rank=rank)
    ends = ranks.run(troubled, stopped | {"evaluate": evaluate | {"every_epochs": None}}, world=2)
    assert ends == [("stopped", "signal")] * 2
    step = min(at + 2, STEPS)
    # The first is saved before an evaluation of the user's own runs for the first time.
    assert checkpoints(run_folder(stopped)) == ["checkpoint-1", f"checkpoint-{step}"]
    records = ranks.run(train, stopped | validated, world=2)[0]
    expected = read(run_folder(straight) / FILE)
    assert curve(records, "step", "loss", "grad_norm") == curve(expected, "step", "loss", "grad_norm")
    assert_bitwise(run_folder(stopped), run_folder(straight))
    late = [(r["step"], r["loss"]) for r in expected if r["kind"] == "validation" and r["step"] >= step]
    assert [(r["step"], r["loss"]) for r in records if r["kind"] == "validation"] == late


def test_sigterm_to_one_rank_exits_with_75_and_the_run_resumes(ranks: RankPool, folder: Path) -> None:
    chosen = settings(folder, "command", duration={"steps": 100_000}, checkpoint={"every_steps": None})
    recipe_file = folder / "command.yaml"
    recipe_file.write_text(yaml.safe_dump(chosen))
    command = [sys.executable, "-m", "fullshard", "train", str(recipe_file), "--devices", "2"]
    run = run_folder(chosen)
    with (folder / "command.txt").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            wait_for_step(run, 3, process)
            ours = psutil.Process(process.pid).children()
            next(child for child in ours if child.environ().get("RANK") == "1").send_signal(signal.SIGTERM)
            process.wait(timeout=300)
        finally:
            process.kill()
            process.wait()
    said = (folder / "command.txt").read_text()
    assert process.returncode == 75, said
    assert "Stopped by a signal" in said
    [checkpoint] = checkpoints(run)
    step = int(checkpoint.rpartition("-")[2])
    assert problems(run / checkpoint) == []
    ranks.run(train, chosen | {"duration": {"steps": step + 2}}, world=2)
    assert [row[0] for row in curve(read(run / FILE), "step")] == list(range(1, step + 3))


def wait_for_step(run: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    """Returns once the run has logged the step; looks five times a second while the process lives."""
    while not (run / FILE).exists() or (last_step(run / FILE) or 0) < step:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.2)
