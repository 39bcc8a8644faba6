"""fp16 with a loss scaler on real ranks: overflows skipped by all, clipping, the scale over checkpoints, its floor; and
the proof of the first update, every verdict provoked."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import PrivateAttr
from safetensors.torch import load_file
from torch import nn

from fullshard.checkpoint import folder as files
from fullshard.checkpoint import integrity
from fullshard.contracts.objective import Batch, Terms
from fullshard.contracts.optimizer import Optimizer
from fullshard.families.language.objectives.causal_lm import CausalLM
from fullshard.log.metrics import FILE, read
from fullshard.optim.adamw import AdamW
from fullshard.schedules.linear import Linear
from tests.ranks import RankPool
from tests.small import curve, model_folder, recipe, token_file, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fp16")
    model_folder(path / "model", tied=False)
    token_file(path / "train.jsonl", records=90)
    return path


def outcome(settings: dict[str, Any]) -> tuple[str, str, int]:
    """How a rank's run ended: the reason or the error, and the last step."""
    from fullshard.recipes.read import read as read_recipe
    from fullshard.run import execute

    try:
        result = execute(read_recipe(settings), resume="auto")
    except Exception as error:
        return type(error).__name__, str(error), -1
    return result.stopped, "", result.step


def run_folder(settings: dict[str, Any]) -> Path:
    return Path(settings["output"], settings["name"])


class Disturbed(CausalLM):
    """The usual loss, whose gradient is multiplied by `factor` on some ranks from one micro-batch to another."""

    factor: str
    """As text: in a recipe a number is finite."""
    ranks: tuple[int, ...] = (0, 1)
    since: int = 0
    until: int = 10**9
    _seen: int = PrivateAttr(0)

    def loss(self, model: nn.Module, batch: Batch, aux: dict[str, nn.Module]) -> Terms:
        terms = super().loss(model, batch, aux)
        disturbed = self.since <= self._seen < self.until and int(os.environ["RANK"]) in self.ranks
        self._seen += torch.is_grad_enabled()
        if disturbed and terms.loss_sum.requires_grad:
            terms.loss_sum.register_hook(lambda gradient: gradient * float(self.factor))
        return terms


DISTURBED = f"{__name__}.Disturbed"


class Descent(Optimizer):
    """Plain descent: an update is as long as its gradient."""

    def open(self, named_parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.groups(named_parameters), lr=self.lr)


# An overflow


def states(path: Path, names: list[str]) -> list[dict[str, torch.Tensor]]:
    """Weights and optimizer state of checkpoints."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    found = []
    for name in names:
        stored = dcp.FileSystemReader(path / name).read_metadata().state_dict_metadata
        state: dict[str, Any] = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype)
            for key, entry in stored.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        dcp.load(state, checkpoint_id=path / name)
        found.append(state)
    return found


def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks: RankPool, folder: Path) -> None:
    """Two micro-batches a step: the second one of step 3 overflows on rank 1."""
    settings = recipe(
        folder,
        name="one-rank",
        precision="fp16",
        objective={"kind": DISTURBED, "factor": "inf", "ranks": [1], "since": 5, "until": 6},
        checkpoint={"every_steps": 1, "keep": None},
    )
    records = [record for record in ranks.run(train, settings, world=2)[0] if record["kind"] == "train"]
    assert [record["skipped_steps"] for record in records] == [0, 0, 1, 1, 1, 1]
    assert [record["loss_scale"] for record in records] == [65536.0] * 2 + [32768.0] * 4
    assert [record["lr"] for record in records] == pytest.approx([1e-2 * (1 - done / 6) for done in (0, 1, 2, 2, 3, 4)])
    assert [record["samples"] for record in records] == [16, 32, 48, 64, 80, 90], "the data continues"
    names = [f"checkpoint-{step}" for step in (2, 3, 4)]
    before, after, later = ranks.run(states, run_folder(settings), names, world=1)[0]
    assert {key.split("/")[0] for key in before} == {"model", "optimizer"}
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items()), "weights and moments stay, bitwise"
    assert not any(torch.equal(later[key], tensor) for key, tensor in before.items() if key.startswith("model/"))
    progress = [files.read_state(run_folder(settings) / name)["progress"] for name in names]
    assert [(p["step"], p["schedule_step"]) for p in progress] == [(2, 2), (3, 2), (4, 3)]
    assert "1 of 6 steps overflowed in fp16" in (run_folder(settings) / "log.txt").read_text()


def test_without_overflow_nothing_is_skipped(ranks: RankPool, folder: Path) -> None:
    for precision in ("fp16", "bf16"):
        settings = recipe(folder, name=f"healthy-{precision}", precision=precision, duration={"steps": 2})
        records = [record for record in ranks.run(train, settings, world=2)[0] if record["kind"] == "train"]
        assert [record.get("skipped_steps") for record in records] == [0 if precision == "fp16" else None] * 2


# Clipping


def test_clipping_acts_on_unscaled_gradients(ranks: RankPool, folder: Path) -> None:
    """Norms of about 2 are clipped to 0.25; of gradients that are still scaled nothing would be left."""
    start = load_file(folder / "model" / "model.safetensors")
    found = {}
    for precision in ("fp32", "fp16"):
        settings = recipe(
            folder,
            name=f"clip-{precision}",
            precision=precision,
            optimizer={"kind": f"{__name__}.Descent", "lr": 0.1, "weight_decay": 0.0, "clip": 0.25},
            duration={"steps": 1},
        )
        [(norm,)] = curve(ranks.run(train, settings, world=2)[0], "grad_norm")
        moved = load_file(run_folder(settings) / "model" / "model.safetensors")
        found[precision] = norm, {name: moved[name] - start[name] for name in start}
    (norm, exact), (half_norm, half) = found["fp32"], found["fp16"]
    assert norm > 1
    assert half_norm == pytest.approx(norm, rel=2e-3)
    assert float(torch.stack([d.norm() for d in half.values()]).norm()) == pytest.approx(0.1 * 0.25, rel=1e-4)
    for name, difference in exact.items():
        assert float((half[name] - difference).norm()) < 0.02 * float(difference.norm()), name


# The scale


def resumed_from(checkpoint: Path, target: Path, **scaler: Any) -> Path:
    """A copy of a checkpoint with another loss scale."""
    shutil.copytree(checkpoint, target)
    state = json.loads((target / "state.json").read_text())
    assert scaler.keys() <= state["scaler"].keys()
    state["scaler"] |= scaler
    files.write_json(target / files.STATE, state)
    manifest = files.read_manifest(target)
    digests = {files.STATE: integrity.checksum(target / files.STATE)}
    manifest["files"] |= integrity.describe(target, digests)  # or it passes for damaged
    files.write_json(target / files.MANIFEST, manifest)
    return target


def test_the_scale_is_restored_and_grows(ranks: RankPool, folder: Path) -> None:
    settings = recipe(folder, name="before", precision="fp16", checkpoint={"every_steps": 2, "keep": None})
    ranks.run(train, settings, world=2)
    state = files.read_state(run_folder(settings) / "checkpoint-2")["scaler"]
    assert (state["scale"], state["_growth_tracker"]) == (65536.0, 2)
    near = resumed_from(run_folder(settings) / "checkpoint-2", folder / "near", scale=1024.0, _growth_tracker=1998)
    again = settings | {"name": "grown"}
    records = ranks.run(train, again, resume=str(near), world=2)[0]
    assert curve(records, "step", "loss_scale") == [(3, 1024.0), (4, 2048.0), (5, 2048.0), (6, 2048.0)]
    assert files.read_state(run_folder(again) / "checkpoint-6")["scaler"]["_growth_tracker"] == 2


def test_a_loss_scale_that_keeps_falling_ends_the_run(ranks: RankPool, folder: Path) -> None:
    """65536 is halved 17 times before it is below 1. Every gradient of rank 1 overflows, but that of the head."""
    settings = recipe(
        folder,
        name="bottomless",
        precision="fp16",
        objective={"kind": f"{__name__}.BrokenBelow"},
        duration={"steps": 40},
        checkpoint={"every_steps": 5, "keep": None},
    )
    ends = ranks.run(outcome, settings, world=2)
    assert [end[0] for end in ends] == ["NumericalError"] * 2, ends
    assert ends[0] == ends[1], "the same diagnosis on every rank"
    said = ends[0][1]
    assert said.startswith("The loss scale fell to 0.5"), said
    assert "first model.embed_tokens.weight, model.layers.0" in said
    assert "gradients of 35 parameters" in said, "all but that of the head"
    assert "Use precision: bf16" in said
    assert said.endswith(f"The last checkpoint before it is {run_folder(settings) / 'checkpoint-15'}."), said
    records = [record for record in read(run_folder(settings) / FILE) if record["kind"] == "train"]
    assert [record["skipped_steps"] for record in records] == list(range(1, 17))
    assert records[-1]["loss_scale"] == 1.0
    assert [path.name for path in files.published(run_folder(settings))] == [f"checkpoint-{n}" for n in (5, 10, 15)]


class BrokenBelow(CausalLM):
    """The usual loss; on rank 1 everything below the last norm gets an infinite gradient."""

    _hung: list[Any] = PrivateAttr(default_factory=list)

    def loss(self, model: Any, batch: Batch, aux: dict[str, nn.Module]) -> Terms:
        def infinite(_: nn.Module, args: Any, output: torch.Tensor) -> None:
            if output.requires_grad and os.environ["RANK"] == "1":
                output.register_hook(lambda gradient: gradient * math.inf)

        if not self._hung:
            self._hung.append(model.model.norm.register_forward_hook(infinite))
        return super().loss(model, batch, aux)


# The first update


DENOISERS, DENOISE = "tests.dist.denoiser.Denoisers", "tests.dist.denoiser.Denoise"
PROVEN = (
    "First update proven: the gradients of {} trained parameters are finite, {} are not zero, {} parameters changed."
)


class Poisoned(AdamW):
    """AdamW that sets one parameter's gradient, on rank 1 alone, before the update."""

    poisoned: str
    value: str

    def open(self, named_parameters: Any) -> torch.optim.Optimizer:
        parameters = dict(named_parameters)
        optimizer = super().open(parameters.items())

        def poison(*_: Any) -> None:
            if os.environ["RANK"] == "1":
                gradient: Any = parameters[self.poisoned].grad
                gradient.to_local().fill_(float(self.value))

        optimizer.register_step_pre_hook(poison)
        return optimizer


def judged(folder: Path, name: str, **sections: Any) -> dict[str, Any]:
    sections = {"duration": {"steps": 3}, **sections}
    settings = recipe(folder, name=name, checkpoint={"at_end": False}, **sections)
    if "kind" in settings["model"]:
        settings["model"] = sections["model"]
    return settings


UP = "model.layers.1.mlp.up_proj.weight"
VERDICTS: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "the loss of one rank": (
        {"objective": {"kind": DISTURBED, "factor": "nan", "ranks": [1]}},
        "NumericalError",
        ["36 of 36 trained parameters have a gradient that is not finite: model.embed_tokens.weight", "and 31 more"],
    ),
    "a part of one parameter on one rank": (
        {"optimizer": {"kind": f"{__name__}.Poisoned", "poisoned": UP, "value": "nan"}},
        "NumericalError",
        [f"1 of 36 trained parameters have a gradient that is not finite: {UP}. Look for"],
    ),
    "all zero": (
        {"objective": {"kind": DISTURBED, "factor": "0"}},
        "NumericalError",
        ["the gradients of all 36 trained parameters are zero", "some labels are not masked"],
    ),
    "nothing changed": (
        {"precision": "bf16-pure", "optimizer": {"lr": 1e-9}},
        "NumericalError",
        [
            "left all 36 trained parameters unchanged: with a learning rate of 1e-09",
            "use another precision than bf16-pure",
        ],
    ),
    "not used": (
        {"model": {"kind": DENOISERS, "name": "idle"}, "objective": {"kind": DENOISE}},
        "SetupError",
        ["2 of 29 trained parameters have no gradient: idle.weight, idle.bias.", "[idle.weight, idle.bias]"],
    ),
}


@pytest.mark.parametrize("verdict", VERDICTS)
def test_a_wrong_first_update_stops_the_run(ranks: RankPool, folder: Path, verdict: str) -> None:
    sections, kind, said = VERDICTS[verdict]
    settings = judged(folder, verdict.replace(" ", "-"), **sections)
    ends = ranks.run(outcome, settings, world=2)
    assert [end[0] for end in ends] == [kind] * 2, ends
    assert ends[0] == ends[1], "the same verdict on every rank"
    for part in said:
        assert part in ends[0][1]


HEALTHY: dict[str, tuple[dict[str, Any], tuple[int, int, int]]] = {
    "full": ({}, (36, 36, 36)),
    "fp16": ({"precision": "fp16"}, (36, 36, 36)),
    # The gradient of A is zero as long as B is; decay moves A all the same.
    "lora": ({"model": {"lora": {"r": 4}}, "optimizer": {"weight_decay": 0.0}}, (42, 21, 21)),
    "warm-up": ({"schedule": {"kind": "linear", "warmup": 2}}, (36, 36, 36)),
    "a part that is zero on one rank": (
        {"optimizer": {"kind": f"{__name__}.Poisoned", "poisoned": UP, "value": "0", "weight_decay": 0.0}},
        (36, 36, 36),
    ),
}


def proofs(settings: dict[str, Any]) -> list[str]:
    """What the log says of the first update, by rank 0."""
    lines = (run_folder(settings) / "log.txt").read_text().splitlines()
    return [line for line in lines if "First update proven" in line and "rank 0" in line]


@pytest.mark.parametrize("case", HEALTHY)
def test_a_healthy_first_update_is_proven_once(ranks: RankPool, folder: Path, case: str) -> None:
    sections, (trained, moving, moved) = HEALTHY[case]
    settings = judged(folder, f"proven-{case.replace(' ', '-')}", **sections)
    assert ranks.run(outcome, settings, world=2) == [("done", "", 3)] * 2
    [line] = proofs(settings)
    assert line.endswith(PROVEN.format(trained, moving, moved)), line


def test_updates_lost_to_rounding_are_counted(ranks: RankPool, folder: Path) -> None:
    settings = judged(folder, "below", precision="bf16-pure", optimizer={"lr": 1e-3, "weight_decay": 0.0})
    assert ranks.run(outcome, settings, world=2) == [("done", "", 3)] * 2
    [line] = proofs(settings)
    # The norms are at 1, where bf16 has steps of 1/128.
    assert "36 are not zero, 23 parameters changed; 13 have a gradient but did not change" in line


def test_steps_that_the_scaler_skips_are_not_judged(ranks: RankPool, folder: Path) -> None:
    """Their gradients are not finite. The third step is the first that counts, and is judged."""
    disturbed = {"kind": DISTURBED, "factor": "inf", "until": 4}
    settings = judged(folder, "skipped-first", precision="fp16", objective=disturbed, duration={"steps": 4})
    assert ranks.run(outcome, settings, world=2) == [("done", "", 4)] * 2
    assert len(proofs(settings)) == 1
    assert curve(read(run_folder(settings) / FILE), "skipped_steps") == [(1,), (2,), (2,), (2,)]
    poisoned = {"kind": f"{__name__}.Poisoned", "poisoned": UP, "value": "nan"}
    settings = judged(folder, "judged-later", precision="fp16", objective=disturbed, optimizer=poisoned)
    ends = ranks.run(outcome, settings, world=2)
    assert [(kind, "1 of 36" in message) for kind, message, _ in ends] == [("NumericalError", True)] * 2


class LateStart(Linear):
    """The first steps at a rate of zero."""

    def factor(self, step: int, total: int) -> float:
        return 0.0 if step < 2 else super().factor(step, total)


def test_steps_at_a_rate_of_zero_are_not_judged(ranks: RankPool, folder: Path) -> None:
    schedule = {"kind": f"{__name__}.LateStart"}
    settings = judged(folder, "late", schedule=schedule)
    assert ranks.run(outcome, settings, world=2) == [("done", "", 3)] * 2
    assert len(proofs(settings)) == 1
