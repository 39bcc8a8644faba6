"""Averaged weights: diffusers' own average of the same weights, on any ranks; validated, exported and resumed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import fullshard
from fullshard.checkpoint.reader import open_tensors
from fullshard.cli import app
from fullshard.contracts.ema import Ema
from fullshard.errors import CheckpointError
from fullshard.export.source import weights_of
from fullshard.log.metrics import FILE, read
from tests.families.diffusion.test_runs import LR, SHAPE, STEPS, WIDTH, settings
from tests.near import assert_near
from tests.ranks import RankPool
from tests.small import train

DECAY = 0.6
EVERY = {"checkpoint": {"every_steps": 1}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from diffusers import DiTTransformer2DModel

    path = tmp_path_factory.mktemp("ema")
    torch.manual_seed(0)
    DiTTransformer2DModel(**SHAPE, **WIDTH).save_pretrained(path / "model")
    return path


def averaged(folder: Path, name: str, *, ema: Any = DECAY, **sections: Any) -> dict[str, Any]:
    return {**settings(folder, name, **(EVERY | sections)), "ema": ema}


def run_of(ranks: RankPool, recipe: dict[str, Any], *, world: int) -> Path:
    ranks.run(train, recipe, world=world)
    return Path(recipe["output"], recipe["name"])


@pytest.fixture(scope="module")
def straight(ranks: RankPool, folder: Path) -> Path:
    validated = {"evaluate": {"every_steps": 2, "parts": ["loss"]}, "data": {"holdout": 0.1}}
    both = {"decay": DECAY, "evaluate": "both"}
    return run_of(ranks, averaged(folder, "straight", ema=both, **validated), world=2)


def average_of(run: Path, step: int | None = None) -> dict[str, torch.Tensor]:
    kept = open_tensors(run / (f"checkpoint-{step}" if step else "last")).section("optimizer")
    return {name.removesuffix("/ema"): kept.whole(name) for name in kept.names() if name.endswith("/ema")}


def reference(run: Path) -> dict[str, torch.Tensor]:
    """What diffusers' EMAModel makes of the weights after each step."""
    from diffusers.training_utils import EMAModel

    names, follower = sorted(average_of(run)), None
    for step in range(1, STEPS + 1):
        stored = open_tensors(run / f"checkpoint-{step}").section("model")
        weights = [torch.nn.Parameter(stored.whole(name)) for name in names]
        follower = follower or EMAModel(weights, decay=DECAY)
        follower.step(weights)
    assert follower is not None
    return dict(zip(names, follower.shadow_params, strict=True))


def test_the_average_equals_diffusers(straight: Path) -> None:
    expected, found = reference(straight), average_of(straight)
    trained = open_tensors(straight / "last").section("model")
    assert found.keys() == expected.keys()
    assert len(found) > 20
    for name, tensor in expected.items():
        assert_near(found[name], tensor, within=1e-6)
    assert any(not torch.equal(found[name], trained.whole(name)) for name in found)


@pytest.mark.parametrize(
    ("name", "world", "sections"),
    [("split", 1, {"batch": {"per_device": 2}}), ("copies", 2, {"sharding": {"strategy": "none"}})],
)
def test_the_average_is_the_same_for_any_ranks_splits_and_layouts(
    ranks: RankPool, folder: Path, straight: Path, name: str, world: int, sections: dict[str, Any]
) -> None:
    run = run_of(ranks, averaged(folder, name, data={"holdout": 0.1}, **sections), world=world)
    found = average_of(run)
    for name, tensor in average_of(straight).items():
        # Adam makes a whole step of a gradient that is nearly zero: the last digits of a sum show as part of the rate.
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0.1 * LR)


def test_a_resumed_run_continues_the_same_average(ranks: RankPool, folder: Path, straight: Path) -> None:
    """Bitwise, the weights and the average; evaluating the average left the training alone."""
    run = run_of(ranks, averaged(folder, "resumed", data={"holdout": 0.1}), world=2)
    for step in range(3, STEPS + 1):
        shutil.rmtree(run / f"checkpoint-{step}")
    again = averaged(folder, "resumed", data={"holdout": 0.1})
    ranks.run(train, again, world=2)
    ours, theirs = open_tensors(run / "last"), open_tensors(straight / "last")
    assert ours.names() == theirs.names()
    assert all(torch.equal(ours.whole(name), theirs.whole(name)) for name in ours.names())


def test_the_average_is_validated_and_exported(folder: Path, straight: Path) -> None:
    from diffusers import DiTTransformer2DModel

    numbers = [record for record in read(straight / FILE) if record["kind"] == "validation"]
    assert {"loss", "ema_loss"} <= numbers[-1].keys()
    assert numbers[-1]["loss"] != numbers[-1]["ema_loss"]
    exported = dict(DiTTransformer2DModel.from_pretrained(straight / "model").named_parameters())
    for name, tensor in average_of(straight).items():
        assert torch.equal(exported[name], tensor), name


def test_validation_of_the_average_is_that_of_its_export(ranks: RankPool, folder: Path, straight: Path) -> None:
    """A run that starts from the exported average, and validates before its first step."""
    at_start = {"evaluate": {"every_epochs": None, "at_start": True, "parts": ["loss"]}, "data": {"holdout": 0.1}}
    start = settings(folder, "from-average", duration={"steps": 1}, model={"path": str(straight / "model")}, **at_start)
    run = run_of(ranks, start, world=1)
    first, last = (
        next(r for r in order if r["kind"] == "validation") for order in (read(run / FILE), read(straight / FILE)[::-1])
    )
    assert first["loss"] == pytest.approx(last["ema_loss"], rel=1e-5)


def test_the_command_exports_either(folder: Path, straight: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    for weights, out in (("ema", "a"), ("model", "b")):
        done = CliRunner().invoke(app, ["export", str(straight), str(tmp_path / out), "--weights", weights])
        assert done.exit_code == 0, done.output
    name = "transformer_blocks.1.ff.net.2.weight"
    files = {out: load_file(tmp_path / out / "diffusion_pytorch_model.safetensors")[name] for out in "ab"}
    assert torch.equal(files["a"], average_of(straight)[name])
    assert torch.equal(files["b"], open_tensors(straight / "last").section("model").whole(name))


def test_a_run_without_an_average_cannot_export_one(ranks: RankPool, folder: Path) -> None:
    run = run_of(ranks, settings(folder, "none", duration={"steps": 1}), world=1)
    with pytest.raises(CheckpointError, match="holds no averaged weights"):
        weights_of(run / "last", "ema")
    assert weights_of(run / "last", None).names()


def test_decay_warms_up() -> None:
    assert [Ema(decay=0.9).decay_at(n) for n in (1, 2, 11, 1000)] == [0.0, 2 / 11, 11 / 20, 0.9]
    assert [Ema(decay=0.9, warmup=False).decay_at(n) for n in (1, 2)] == [0.0, 0.9]


def test_its_short_spellings() -> None:
    assert fullshard.read("quickstart", "ema=true").ema == Ema()
    assert fullshard.read("diffusion", "ema=null").ema is None
    assert fullshard.read("diffusion", "ema=false").ema is None
