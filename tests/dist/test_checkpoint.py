"""Checkpoints on real ranks: what is written and when; and a run that stopped anywhere goes on as if it had not."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import psutil  # type: ignore[import-untyped]
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from fullshard.checkpoint import folder as files
from fullshard.evaluate.base import Evaluation, EvaluationInputs, Findings
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
    model_folder(path / "wider", hidden_size=48)
    model_folder(path / "deeper", num_hidden_layers=4)
    overflowing(model_folder(path / "loud", tied=False))
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


def outcome(settings: dict[str, Any], resume: str = "auto") -> tuple[str, str]:
    """How a rank's run ended: the reason, or the class and text of the error."""
    from fullshard.read import read as read_recipe
    from fullshard.run import execute

    try:
        return "stopped", execute(read_recipe(settings), resume=resume).stopped
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


def test_every_so_many_steps_and_at_the_end(ranks: RankPool, folder: Path) -> None:
    chosen = settings(folder, "every", checkpoint={"every_steps": 2, "keep": None}, duration={"steps": 5})
    ranks.run(train, chosen, world=2)
    assert checkpoints(run_folder(chosen)) == ["checkpoint-2", "checkpoint-4", "checkpoint-5"]
    assert os.readlink(run_folder(chosen) / "last") == "checkpoint-5"


def test_every_second_epoch(ranks: RankPool, folder: Path) -> None:
    chosen = settings(folder, "epochs", checkpoint={"every_epochs": 2, "keep": None}, batch={"global": 48})
    ranks.run(train, chosen, world=1)
    assert checkpoints(run_folder(chosen)) == ["checkpoint-4", "checkpoint-8", "checkpoint-9"]  # epochs of 2 steps


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


# Resume


CASES: dict[str, dict[str, Any]] = {
    "dropout": {"model": DROPOUT, "data": {"shuffle": True}},
    "packed": {"data": {"shuffle": True, "pack": True, "sequence_length": 40}, "batch": {"per_device": 2, "global": 4}},
    "lora": {"model": {"lora": {"r": 4, "dropout": 0.2}}, "data": {"shuffle": True}},
    "fp16": {"precision": "fp16", "model": {"path": "loud", **DROPOUT}},
    "replicated": {"sharding": {"strategy": "none"}, "model": DROPOUT},
}


@pytest.mark.parametrize("case", CASES)
def test_resumed_is_straight_bit_by_bit(ranks: RankPool, folder: Path, case: str) -> None:
    straight = settings(folder, f"{case}-straight", **CASES[case])
    resumed = settings(folder, f"{case}-resumed", **CASES[case])
    keys = ("step", "loss", "grad_norm", "lr", "samples", "tokens") + (("loss_scale",) if case == "fp16" else ())
    expected = curve(ranks.run(train, straight, world=2)[0], *keys)
    checkpoint = run_folder(straight) / f"checkpoint-{STOP}"
    found = curve(ranks.run(train, resumed, resume=str(checkpoint), world=2)[0], *keys)
    assert [row[0] for row in found] == list(range(STOP + 1, STEPS + 1))
    assert found == expected[STOP:]
    assert_bitwise(run_folder(resumed), run_folder(straight))
    clock = [curve(read(run_folder(run) / FILE), "seconds") for run in (straight, resumed)]
    assert clock[1][0] > clock[0][STOP - 1], "the clock goes on as well"


def test_dropout_is_really_on(folder: Path) -> None:
    """Otherwise the cases above would prove less than they say."""
    runs = folder / "runs"
    losses = [curve(read(runs / f"{case}-straight" / FILE), "loss")[0] for case in ("dropout", "replicated")]
    assert losses[0] != losses[1]


def test_the_resume_of_a_resume_is_straight(ranks: RankPool, folder: Path) -> None:
    again = settings(folder, "dropout-again", **CASES["dropout"])
    earlier = folder / "runs" / "dropout-resumed" / "checkpoint-8"
    found = curve(ranks.run(train, again, resume=str(earlier), world=2)[0], "loss", "grad_norm")
    assert found == curve(read(folder / "runs" / "dropout-straight" / FILE), "loss", "grad_norm")[8:]
    assert_bitwise(run_folder(again), folder / "runs" / "dropout-straight")


def test_the_loss_scale_of_fp16_is_restored(folder: Path) -> None:
    scales = curve(read(folder / "runs" / "fp16-straight" / FILE), "loss_scale")
    assert scales[STOP - 1] < (65536.0,), "the scale must have moved before the checkpoint, or nothing is tested"
    assert None not in [norm for (norm,) in curve(read(folder / "runs" / "fp16-straight" / FILE), "grad_norm")[STOP:]]
    state = files.read_state(folder / "runs" / "fp16-straight" / f"checkpoint-{STOP}")
    assert state["scaler"]["scale"] == scales[STOP - 1][0]


@pytest.fixture(scope="module")
def two_ranks(ranks: RankPool, folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    """A shuffled run on two ranks, with the samples of each step."""
    chosen = settings(folder, "two", data={"shuffle": True}, log={"sample_ids": True})
    return run_folder(chosen), ranks.run(train, chosen, world=2)[0]


def samples(records: list[dict[str, Any]]) -> list[list[int]]:
    return [sorted(record["sample_ids"]) for record in records if record.get("event") == "samples"]


@pytest.mark.parametrize("world", [1, 4])
def test_another_number_of_ranks_goes_on_with_the_same_samples(
    ranks: RankPool, folder: Path, two_ranks: tuple[Path, list[dict[str, Any]]], world: int
) -> None:
    run, straight = two_ranks
    chosen = settings(folder, f"two-to-{world}", data={"shuffle": True}, log={"sample_ids": True})
    records = ranks.run(train, chosen, resume=str(run / f"checkpoint-{STOP}"), world=world)[0]
    assert samples(records) == samples(straight)[STOP:]
    found, expected = curve(records, "loss", "grad_norm"), curve(straight, "loss", "grad_norm")[STOP:]
    torch.testing.assert_close(torch.tensor(found).double(), torch.tensor(expected).double(), rtol=1e-6, atol=0)


def test_every_epoch_reads_every_sample_once(two_ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    first_epoch = [i for ids in samples(two_ranks[1])[:6] for i in ids]
    assert sorted(first_epoch) == list(range(90))


def test_a_longer_duration_goes_on(ranks: RankPool, folder: Path) -> None:
    same: dict[str, Any] = {"schedule": {"kind": "constant"}, "model": DROPOUT}
    straight = settings(folder, "long", **same)
    expected = curve(ranks.run(train, straight, world=2)[0], "step", "loss", "grad_norm")
    extended = settings(folder, "extended", duration={"steps": 5}, **same)
    assert ranks.run(outcome, extended, world=2) == [("stopped", "done")] * 2
    modified = (run_folder(extended) / "model" / "model.safetensors").stat().st_mtime_ns
    # The same recipe again has nothing to do and touches nothing.
    assert ranks.run(outcome, extended, world=2) == [("stopped", "done")] * 2
    assert (run_folder(extended) / "model" / "model.safetensors").stat().st_mtime_ns == modified
    # Unless it ended between the last save and the export.
    shutil.rmtree(run_folder(extended) / "model")
    assert ranks.run(outcome, extended, world=2) == [("stopped", "done")] * 2
    assert (run_folder(extended) / "model" / "config.json").exists()
    extended["duration"] = {"steps": STEPS}
    records = ranks.run(train, extended, world=2)[0]
    assert curve(records, "step", "loss", "grad_norm") == expected
    assert curve(records, "seconds") == sorted(curve(records, "seconds")), "the clock goes on as well"
    assert_bitwise(run_folder(extended), run_folder(straight))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch": {"global": 8}}, "samples per step: 16 then, 8 now"),
        ({"seed": 1}, "seed: 0 then, 1 now"),
        ({"data": {"shuffle": False}}, "shuffled: True then, False now"),
        ({"data": {"shuffle": True, "sequence_length": 40}}, "sequence length: 48 then, 40 now"),
    ],
    ids=str,
)
def test_steps_that_would_mean_other_samples_are_refused(
    ranks: RankPool, folder: Path, two_ranks: tuple[Path, Any], changes: dict[str, Any], said: str
) -> None:
    chosen = settings(folder, "refused", **{"data": {"shuffle": True}, **changes})
    for kind, message in ranks.run(outcome, chosen, resume=str(two_ranks[0] / "last"), world=2):
        assert kind == "CheckpointError"
        assert said in message
        assert "--resume never" in message


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("wider", r"model/model.embed_tokens.weight \[97, 32\] in it, \[97, 48\] here"),
        ("deeper", "missing in it, first model/model.layers.3"),
        (
            {"lora": 4},
            "missing in it, first model/.*base_layer.*; 126 in it are not known here, first model/model.layers.0",
        ),
    ],
    ids=str,
)
def test_the_checkpoint_of_another_model_is_refused_by_tensor_name(
    ranks: RankPool, folder: Path, two_ranks: tuple[Path, Any], model: Any, said: str
) -> None:
    changed = {"path": model} if isinstance(model, str) else model
    chosen = settings(folder, "another", data={"shuffle": True}, model=changed)
    for kind, message in ranks.run(outcome, chosen, resume=str(two_ranks[0] / "last"), world=2):
        assert kind == "CheckpointError", message
        assert re.search(said, message), message
        assert "--resume never" in message


def test_a_damaged_checkpoint_is_refused_by_file(ranks: RankPool, folder: Path, two_ranks: tuple[Path, Any]) -> None:
    damaged = folder / "damaged" / "checkpoint-4"
    shutil.copytree(two_ranks[0] / "checkpoint-4", damaged)
    with (damaged / "__1_0.distcp").open("r+b") as file:
        file.truncate(2000)
    chosen = settings(folder, "damaged", data={"shuffle": True})
    for kind, message in ranks.run(outcome, chosen, resume=str(damaged), world=2):
        assert kind == "CheckpointError", message
        assert str(damaged) in message


# Saves that do not end well


def test_an_unfinished_checkpoint_is_not_resumed_from_and_goes_with_the_next_save(
    ranks: RankPool, folder: Path, two_ranks: tuple[Path, Any]
) -> None:
    chosen = settings(folder, "unfinished", data={"shuffle": True})
    run = run_folder(chosen)
    shutil.copytree(two_ranks[0] / "checkpoint-4", run / "checkpoint-4")
    # A save that was cut off just before its manifest: everything else is there.
    leftover = run / ".unfinished-checkpoint-8"
    shutil.copytree(two_ranks[0] / "checkpoint-8", leftover)
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
    assert checkpoints(run) == ["checkpoint-2"]
    assert os.readlink(run / "last") == "checkpoint-2"
    # With room again the run goes on from the last whole checkpoint and clears up.
    assert ranks.run(outcome, chosen, world=2) == [("stopped", "done")] * 2
    assert not list(run.glob(".unfinished-*"))


def test_a_run_folder_that_is_gone_stops_all_ranks(ranks: RankPool, folder: Path) -> None:
    chosen = settings(folder, "gone", checkpoint={"every_steps": 2})
    ends = ranks.run(troubled, chosen | {"evaluate": trouble("folder_gone", at=2, rank=0)}, world=2)
    assert [kind for kind, _ in ends] == ["CheckpointError"] * 2, ends
    assert "cannot be created" in ends[0][1]


# Signals


@pytest.mark.parametrize(
    ("act", "rank", "at"), [("sigterm", 1, 2), ("sigusr1", 0, 4), ("sigterm", 1, 5), ("sigusr1", 1, 7)]
)
def test_a_signal_to_one_rank_stops_all_at_one_step_and_the_run_goes_on(
    ranks: RankPool, folder: Path, act: str, rank: int, at: int
) -> None:
    """The wish travels with the next step's count and is read a step later: the stop is two steps after the signal,
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
    assert checkpoints(run_folder(stopped)) == [f"checkpoint-{step}"]
    records = ranks.run(train, stopped | validated, world=2)[0]
    expected = read(run_folder(straight) / FILE)
    assert curve(records, "step", "loss", "grad_norm") == curve(expected, "step", "loss", "grad_norm")
    assert_bitwise(run_folder(stopped), run_folder(straight))
    late = [(r["step"], r["loss"]) for r in expected if r["kind"] == "validation" and r["step"] >= step]
    assert [(r["step"], r["loss"]) for r in records if r["kind"] == "validation"] == late


def test_sigterm_to_one_rank_of_the_command_ends_with_75_and_the_same_command_goes_on(folder: Path) -> None:
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
            process.wait(timeout=60)
        finally:
            process.kill()
            process.wait()
    said = (folder / "command.txt").read_text()
    assert process.returncode == 75, said
    assert "Stopped by a signal" in said
    [checkpoint] = checkpoints(run)
    step = int(checkpoint.rpartition("-")[2])
    again = subprocess.run([*command, f"duration.steps={step + 2}"], capture_output=True, text=True, timeout=120)
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"Resuming from {run / checkpoint}" in again.stdout
    assert [row[0] for row in curve(read(run / FILE), "step")] == list(range(1, step + 3))


def wait_for_step(run: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    """Returns once the run has logged the step; looks five times a second, with a deadline, while the process lives."""
    deadline = time.monotonic() + 90
    while not (run / FILE).exists() or (last_step(run / FILE) or 0) < step:
        assert time.monotonic() < deadline, "the run did not start"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.2)
