"""A run that stopped anywhere continues as if it had not: bitwise on the same ranks, within rounding on others."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from fullshard.checkpoint import folder as files
from fullshard.checkpoint.reader import open_tensors
from fullshard.cli import app
from fullshard.log.metrics import FILE, read
from tests.dist.test_checkpoint import DROPOUT, STEPS, STOP, outcome, overflowing, run_folder, settings
from tests.ranks import RankPool
from tests.slow import one_in
from tests.small import curve, model_folder, token_file, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("resume")
    model_folder(path / "model")
    model_folder(path / "wider", hidden_size=48)
    model_folder(path / "deeper", num_hidden_layers=4)
    overflowing(model_folder(path / "loud", tied=False))
    token_file(path / "train.jsonl", records=90)
    return path


def assert_same_end(run: Path, straight: Path) -> None:
    """Every weight and every number of the optimizer's state."""
    ours, theirs = (open_tensors(each / files.name_of(STEPS)) for each in (run, straight))
    assert ours.names() == theirs.names()
    for name in theirs.names():
        assert torch.equal(ours.whole(name), theirs.whole(name)), name


# The same number of ranks

HYBRID: dict[str, Any] = {"sharding": {"strategy": "hybrid"}}
CASES: dict[str, dict[str, Any]] = {
    "dropout": {"model": DROPOUT, "data": {"shuffle": True}},
    "packed-bf16": {
        "data": {"shuffle": True, "pack": True, "sequence_length": 40},
        "batch": {"per_device": 2, "global": 4},
        "precision": "bf16",
        "sharding": {"strategy": "grad_op"},
    },
    "lora": {"model": {"lora": {"r": 4, "dropout": 0.2}}, "data": {"shuffle": True}},
    "lora-fp16": {"model": {"lora": {"r": 4}}, "precision": "fp16", "checkpoint": {"format": "full"}},
    "fp16": {"precision": "fp16", "model": {"path": "loud", **DROPOUT}},
    "replicated": {"sharding": {"strategy": "none"}, "model": DROPOUT, "checkpoint": {"format": "full"}},
    "hybrid-bf16": {**HYBRID, "model": DROPOUT, "precision": "bf16", "batch": {"per_device": 2}},
}


def places(case: str) -> dict[str, int]:
    return {"world": 4, "nodes": 2} if "hybrid" in case else {"world": 2}


@pytest.mark.parametrize("case", one_in(3, CASES))
def test_a_resumed_run_equals_an_uninterrupted_one_bitwise(ranks: RankPool, folder: Path, case: str) -> None:
    sections = CASES[case] | {"checkpoint": {"every_steps": STOP, "keep": None, **CASES[case].get("checkpoint", {})}}
    straight, resumed = (settings(folder, f"{case}-{end}", **sections) for end in ("straight", "resumed"))
    keys = ("step", "loss", "grad_norm", "lr", "samples", "tokens") + (("loss_scale",) if "fp16" in case else ())
    expected = curve(ranks.run(train, straight, **places(case))[0], *keys)
    checkpoint = run_folder(straight) / f"checkpoint-{STOP}"
    found = curve(ranks.run(train, resumed, resume=str(checkpoint), **places(case))[0], *keys)
    assert [row[0] for row in found] == list(range(STOP + 1, STEPS + 1))
    assert found == expected[STOP:]
    assert_same_end(run_folder(resumed), run_folder(straight))
    clock = [curve(read(run_folder(run) / FILE), "seconds") for run in (straight, resumed)]
    assert clock[1][0] > clock[0][STOP - 1], "the clock continues as well"


def test_dropout_is_really_on(ranks: RankPool, folder: Path) -> None:
    """Otherwise the cases above would prove less than they say."""
    without = curve(ranks.run(train, settings(folder, "no-dropout", data={"shuffle": True}), world=2)[0], "loss")
    assert without[0] != curve(read(folder / "runs" / "dropout-straight" / FILE), "loss")[0]


def test_resuming_twice_equals_an_uninterrupted_run(ranks: RankPool, folder: Path) -> None:
    again = settings(folder, "dropout-again", **CASES["dropout"])
    earlier = folder / "runs" / "dropout-resumed" / "checkpoint-8"
    found = curve(ranks.run(train, again, resume=str(earlier), world=2)[0], "loss", "grad_norm")
    assert found == curve(read(folder / "runs" / "dropout-straight" / FILE), "loss", "grad_norm")[8:]
    assert_same_end(run_folder(again), folder / "runs" / "dropout-straight")


@pytest.mark.slow  # looks at the runs of slow cases above
def test_the_loss_scale_of_fp16_is_restored(folder: Path) -> None:
    scales = curve(read(folder / "runs" / "fp16-straight" / FILE), "loss_scale")
    assert scales[STOP - 1] < (65536.0,), "the scale must have moved before the checkpoint, or nothing is tested"
    assert None not in [norm for (norm,) in curve(read(folder / "runs" / "fp16-straight" / FILE), "grad_norm")[STOP:]]
    state = files.read_state(folder / "runs" / "fp16-straight" / f"checkpoint-{STOP}")
    assert state["scaler"]["scale"] == scales[STOP - 1][0]


@pytest.mark.slow  # looks at the runs of slow cases above
def test_a_full_checkpoint_is_two_files_that_safetensors_reads(folder: Path) -> None:
    checkpoint = folder / "runs" / "replicated-straight" / f"checkpoint-{STEPS}"
    held = {path.name for path in checkpoint.iterdir()}
    assert held == {"manifest.json", "state.json", "model.safetensors", "optimizer.safetensors"}
    exported = load_file(folder / "runs" / "replicated-straight" / "model" / "model.safetensors")
    stored = load_file(checkpoint / "model.safetensors")
    assert exported.keys() == stored.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in stored.items())
    moments = load_file(checkpoint / "optimizer.safetensors")
    assert moments["model.norm.weight/step"] == STEPS
    assert moments["model.norm.weight/exp_avg"].shape == stored["model.norm.weight"].shape


@pytest.mark.slow  # looks at the runs of slow cases above
def test_an_adapter_checkpoint_holds_the_adapters_alone(folder: Path) -> None:
    checkpoint = folder / "runs" / "lora-straight" / f"checkpoint-{STEPS}"
    names = open_tensors(checkpoint).section("model").names()
    assert names
    assert all("lora_" in name for name in names)
    frozen = files.read_state(checkpoint)["frozen"]
    assert "model.layers.0.mlp.down_proj.base_layer.weight" in frozen


@pytest.mark.slow  # looks at the runs of slow cases above
def test_adapters_on_another_base_are_refused(ranks: RankPool, folder: Path) -> None:
    shutil.copytree(folder / "model", folder / "nudged")
    state = load_file(folder / "nudged" / "model.safetensors")
    state["model.layers.1.mlp.down_proj.weight"][-1, -1] += 1e-3
    save_file(state, folder / "nudged" / "model.safetensors", metadata={"format": "pt"})
    changed = CASES["lora"] | {"model": {**CASES["lora"]["model"], "path": "nudged"}}
    chosen = settings(folder, "other-base", **changed)
    checkpoint = folder / "runs" / "lora-straight" / f"checkpoint-{STOP}"
    for kind, message in ranks.run(outcome, chosen, resume=str(checkpoint), anyway=True, world=2):
        assert kind == "CheckpointError"
        assert "1 of 35 differ" in message, message
        assert "first model.layers.1.mlp.down_proj.base_layer.weight" in message


# Another number of ranks, another strategy, another format

WORLDS: dict[int, dict[str, Any]] = {
    1: {"strategy": "none", "format": "full"},
    2: {"strategy": "full", "format": "sharded"},
    4: {"strategy": "hybrid", "format": "sharded"},
}
MOVES = [(2, 1, "full"), (2, 4, "hybrid"), (4, 2, "grad_op"), (4, 1, "full"), (1, 2, "none"), (1, 4, "full")]


def move_settings(folder: Path, name: str, *, strategy: str, format: str = "sharded") -> dict[str, Any]:
    return settings(
        folder,
        name,
        data={"shuffle": True},
        log={"sample_ids": True},
        sharding={"strategy": strategy},
        checkpoint={"every_steps": STOP, "keep": None, "format": format},
        batch={"per_device": 2},
    )


@pytest.fixture(scope="module")
def straight(ranks: RankPool, folder: Path) -> dict[int, tuple[Path, list[dict[str, Any]]]]:
    """A shuffled run on each number of ranks, with the samples of each step."""
    found = {}
    for world, how in WORLDS.items():
        chosen = move_settings(folder, f"straight-{world}", **how)
        nodes = 2 if how["strategy"] == "hybrid" else 1
        found[world] = run_folder(chosen), ranks.run(train, chosen, world=world, nodes=nodes)[0]
    return found


def samples(records: list[dict[str, Any]]) -> list[list[int]]:
    return [sorted(record["sample_ids"]) for record in records if record.get("event") == "samples"]


def assert_close(found: list[Any], expected: list[Any]) -> None:
    torch.testing.assert_close(torch.tensor(found).double(), torch.tensor(expected).double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("world", "to", "strategy"), one_in(3, MOVES))
def test_another_number_of_ranks_continues_with_the_same_samples(
    ranks: RankPool, folder: Path, straight: dict[int, tuple[Path, Any]], world: int, to: int, strategy: str
) -> None:
    run, expected = straight[world]
    chosen = move_settings(folder, f"{world}-to-{to}", strategy=strategy)
    nodes = 2 if strategy == "hybrid" else 1
    resume = str(run / f"checkpoint-{STOP}")
    records = ranks.run(train, chosen, resume=resume, world=to, nodes=nodes)[0]
    assert samples(records) == samples(expected)[STOP:]
    assert_close(curve(records, "loss", "grad_norm"), curve(expected, "loss", "grad_norm")[STOP:])


def test_every_epoch_reads_every_sample_once(straight: dict[int, tuple[Path, Any]]) -> None:
    for world in WORLDS:
        first_epoch = [i for ids in samples(straight[world][1])[:6] for i in ids]
        assert sorted(first_epoch) == list(range(90))


def test_a_longer_duration_continues_the_run(ranks: RankPool, folder: Path) -> None:
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
    assert curve(records, "seconds") == sorted(curve(records, "seconds")), "the clock continues as well"
    assert_same_end(run_folder(extended), run_folder(straight))


# A recipe that has changed


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch": {"per_device": 2, "global": 8}}, "rows per step: 16 then, 8 now"),
        ({"seed": 1}, "seed: 0 then, 1 now"),
        ({"data": {"shuffle": False}}, "data.shuffle: True then, False now"),
        ({"data": {"shuffle": True, "sequence_length": 40}}, "data.sequence_length: 48 then, 40 now"),
        ({"model": {"path": "deeper"}}, "model.path: .*/model then, .*/deeper now"),
        (
            {"data": {"shuffle": True, "train": "other"}},
            r"content of data.train has changed: added .*/other.jsonl \(90 records in [\d,]+ bytes\); removed .*/train"
            r".jsonl \(90 records in [\d,]+ bytes\); data.train.path: .*/train.jsonl then, .*/other.jsonl now",
        ),
    ],
    ids=["batch", "seed", "order", "length", "model", "content"],
)
def test_a_change_that_makes_it_another_run_is_refused_with_the_difference(
    ranks: RankPool, folder: Path, straight: dict[int, tuple[Path, Any]], changes: dict[str, Any], said: str
) -> None:
    if changes.get("data", {}).get("train"):
        token_file(folder / "other.jsonl", records=90, seed=5)
        changes = {"data": {"shuffle": True, "train": str(folder / "other.jsonl")}}
    chosen = settings(folder, "refused", **{"data": {"shuffle": True}, "batch": {"per_device": 2}, **changes})
    for kind, message in ranks.run(outcome, chosen, resume=str(straight[2][0] / "last"), world=2):
        assert kind == "CheckpointError"
        assert re.search(said, message), message
        assert "--resume never" in message
        assert "--resume-anyway" in message


def test_resume_anyway_accepts_refused_changes_and_harmless_ones_are_noted(
    ranks: RankPool, folder: Path, straight: dict[int, tuple[Path, Any]]
) -> None:
    chosen = move_settings(folder, "anyway", strategy="grad_op")
    chosen |= {"seed": 1, "optimizer": {"lr": 1e-3}, "precision": "bf16"}
    resume = str(straight[2][0] / f"checkpoint-{STOP}")
    assert ranks.run(outcome, chosen, resume=resume, anyway=True, world=2) == [("stopped", "done")] * 2
    said = (run_folder(chosen) / "log.txt").read_text()
    console = " ".join(said.split())
    for line in ("optimizer.lr: 0.01 then, 0.001 now", "precision: fp32 then, bf16 now", "seed: 0 then, 1 now"):
        assert line in console, said


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ([], 0, r"train resumes from \S*/checkpoint-{last}, step {last} of {last}|is finished"),
        (["duration.steps=90"], 0, r"train resumes from \S*/checkpoint-{last}, step {last} of 90"),
        (
            ["duration.steps=90"],
            0,
            r"learning rate at step {last} was \S+ and is \S+ by this recipe; .* then, 90 now\.",
        ),
        (["seed=1"], 2, "cannot be resumed with this recipe, .*seed: 0 then, 1 now"),
        (["seed=1", "--resume-anyway"], 0, "Resumed anyway, .*seed: 0 then, 1 now.*--resume-anyway"),
    ],
    ids=["as it is", "longer", "rate", "refused", "anyway"],
)
def test_check_says_where_a_run_resumes_and_what_has_changed(
    folder: Path, straight: dict[int, tuple[Path, Any]], options: list[str], code: int, said: str
) -> None:
    last = straight[2][0] / "last"
    recipe = folder / "asked.yaml"
    recipe.write_text(yaml.safe_dump(settings(folder, "asked", data={"shuffle": True}, batch={"per_device": 2})))
    result = CliRunner().invoke(app, ["check", str(recipe), "--quick", "--resume", str(last), *options])
    output = " ".join(result.output.split())
    assert result.exit_code == code, output
    assert re.search(said.format(last=files.step_of(last.resolve())), output), output


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("wider", r"model/model.embed_tokens.weight \[97, 32\] \(this run has \[97, 48\]\)"),
        ("deeper", "missing from it, first model/model.layers.3"),
        (
            {"lora": 4},
            "missing from it, first model/.*lora_A.*; 126 tensors not part of this run, first model/model.layers.0",
        ),
    ],
    ids=str,
)
def test_the_checkpoint_of_another_model_is_refused_by_tensor_name(
    ranks: RankPool, folder: Path, straight: dict[int, tuple[Path, Any]], model: Any, said: str
) -> None:
    changed = {"path": model} if isinstance(model, str) else model
    chosen = settings(folder, "another", data={"shuffle": True}, model=changed)
    resume = str(straight[2][0] / "last")
    for kind, message in ranks.run(outcome, chosen, resume=resume, anyway=True, world=2):
        assert kind == "CheckpointError", message
        assert re.search(said, message), message
        assert "--resume never" in message
