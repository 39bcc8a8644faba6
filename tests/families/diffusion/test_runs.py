"""Whole diffusion runs on real digits: the losses of a plain diffusers loop on any ranks, splits and layouts; a resumed
run is the straight one bit by bit; half precision stays near; what is left is read by diffusers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fullshard
from fullshard.checkpoint.reader import open_tensors
from fullshard.cli import app
from fullshard.data.order import FIXED, draws, permutation
from fullshard.errors import DataError
from fullshard.families.diffusion.encoders.image import Images
from fullshard.families.diffusion.image_samples import ImageCollator
from fullshard.families.diffusion.keyed_noise import LABEL_DROP, NOISE, TIME, normal, uniform
from tests.cards import card, run_code
from tests.ranks import RankPool
from tests.small import curve, train

STEPS, GLOBAL, LR, DROP = 5, 16, 1e-3, 0.25
NUMBERS = ("loss", "grad_norm")
SHAPE = {"sample_size": 8, "in_channels": 1, "out_channels": 1, "patch_size": 2, "num_layers": 2}
WIDTH = {"num_attention_heads": 2, "attention_head_dim": 16, "num_embeds_ada_norm": 10}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from diffusers import DiTTransformer2DModel

    path = tmp_path_factory.mktemp("digits")
    torch.manual_seed(0)
    DiTTransformer2DModel(**SHAPE, **WIDTH).save_pretrained(path / "model")
    return path


def settings(folder: Path, name: str, **sections: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "name": name,
        "output": str(folder / "runs"),
        "seed": 3,
        "model": {"kind": "diffusers", "path": str(folder / "model")},
        "objective": {"kind": "flow_matching", "label_drop": DROP},
        "data": {
            "train": {"kind": "digits", "part": "train"},
            "holdout": 0,
            "cache": str(folder / "cache"),
            "pack": False,
        },
        "batch": {"per_device": 4, "global": GLOBAL},
        "duration": {"steps": STEPS},
        "optimizer": {"lr": LR},
        "schedule": {"kind": "constant"},
        "precision": "fp32",
        "topology": {"device": "cpu"},
        "sharding": {},
        "evaluate": {"every_epochs": None, "parts": []},
        "checkpoint": {"every_steps": 2, "every_epochs": None, "keep": None, "best": None},
        "log": {"every_steps": 1, "sinks": []},
    }
    return {
        key: {**value, **sections[key]} if isinstance(sections.get(key), dict) else sections.get(key, value)
        for key, value in base.items()
    }


@pytest.fixture(scope="module")
def straight(ranks: RankPool, folder: Path) -> list[tuple[float, ...]]:
    return curve(ranks.run(train, settings(folder, "straight"), world=1)[0], *NUMBERS)


def digits(part: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Images from -1 to 1, and labels."""
    from fullshard.families.diffusion.sources.digits import Digits

    records = Digits(part=part).open()
    images = torch.stack(
        [torch.tensor(np.asarray(records[i]["image"]), dtype=torch.float32) for i in range(len(records))]
    )
    return (images / images.max() * 2 - 1)[:, None], torch.tensor([records[i]["label"] for i in range(len(records))])


def plain_loop(folder: Path) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Rectified flow as it is written down, with diffusers' model and torch's AdamW; only the random numbers are drawn
    as the run draws them."""
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel.from_pretrained(folder / "model").eval()  # in training it would drop labels itself
    images, labels = digits("train")
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    order, found = permutation(len(images), seed=3, epoch=0, shuffle=True), []
    for step in range(STEPS):
        chosen = order[step * GLOBAL :][:GLOBAL]
        keys = torch.from_numpy(draws(chosen, seed=3, stream=0))
        x0, z, t = images[chosen], normal(keys, (1, 8, 8), NOISE), uniform(keys, TIME)
        label = torch.where(uniform(keys, LABEL_DROP) < DROP, 10, labels[chosen])
        wide = t[:, None, None, None]
        output = model((1 - wide) * x0 + wide * z, timestep=t * 1000, class_labels=label).sample
        loss = torch.nn.functional.mse_loss(output, z - x0)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append((float(loss.detach()), float(norm)))
    return found, dict(model.named_parameters())


def test_a_run_equals_the_plain_loop(folder: Path, straight: Any) -> None:
    found, parameters = plain_loop(folder)
    np.testing.assert_allclose(straight, found, rtol=2e-5)
    saved = open_tensors(folder / "runs" / "straight" / "last").section("model")
    for name, parameter in parameters.items():
        torch.testing.assert_close(saved.whole(name), parameter.detach(), rtol=0, atol=2e-4 * LR / 1e-3)


@pytest.mark.parametrize(
    ("name", "world", "sections"),
    [
        ("two", 2, {}),
        ("four", 4, {"batch": {"per_device": 1}}),
        ("split", 1, {"batch": {"per_device": 1}}),
        ("hybrid", 4, {"sharding": {"strategy": "hybrid"}, "batch": {"per_device": 2}}),
        ("recomputed", 2, {"sharding": {"activation_checkpointing": "full"}}),
    ],
)
def test_losses_do_not_depend_on_ranks_and_splits(
    ranks: RankPool, folder: Path, straight: Any, name: str, world: int, sections: dict[str, Any]
) -> None:
    nodes = 2 if name == "hybrid" else 1
    records = ranks.run(train, settings(folder, name, **sections), world=world, nodes=nodes)[0]
    np.testing.assert_allclose(curve(records, *NUMBERS), straight, rtol=1e-6)


def test_a_resumed_run_equals_the_straight_one(ranks: RankPool, folder: Path, straight: Any) -> None:
    ranks.run(train, settings(folder, "half", duration={"steps": 2}), world=1)
    assert curve(ranks.run(train, settings(folder, "half"), world=1)[0], *NUMBERS) == straight


@pytest.mark.parametrize(("precision", "near"), [("bf16", 2e-2), ("fp16", 5e-3)])
def test_half_precision_stays_close(ranks: RankPool, folder: Path, straight: Any, precision: str, near: float) -> None:
    """With recomputed blocks, in which times must stay exact as well."""
    recomputed = {"activation_checkpointing": "full"}
    chosen = settings(folder, precision, precision=precision, duration={"steps": 3}, sharding=recomputed)
    found = curve(ranks.run(train, chosen, world=2)[0], "loss")
    np.testing.assert_allclose(found, [(loss,) for loss, _ in straight[:3]], rtol=near)


def test_diffusers_reads_the_export(folder: Path, straight: Any) -> None:
    from diffusers import DiTTransformer2DModel

    run = folder / "runs" / "straight"
    loaded = DiTTransformer2DModel.from_pretrained(run / "model")
    saved = open_tensors(run / "last").section("model")
    assert card(run / "model").data.library_name == "diffusers"
    for model in (loaded, run_code(run / "model")["model"]):
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, saved.whole(name)), name


def test_noise_is_fixed_in_validation(ranks: RankPool, folder: Path) -> None:
    held = {"validation": {"kind": "digits", "part": "held_out"}}
    often = {"every_steps": 1, "per_device": 300, "parts": ["loss"]}
    sections = {"data": held, "evaluate": often, "optimizer": {"lr": 1e-12}, "duration": {"steps": 2}}
    losses = []
    for world in (1, 2):
        records = ranks.run(train, settings(folder, f"held-{world}", **sections), world=world)[0]
        losses += [record["loss"] for record in records if record["kind"] == "validation"]
    assert len(losses) == 4
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)


def evaluated(run: str, *words: str) -> tuple[int, str]:
    """`fullshard evaluate` on one rank of the pool, which was started by a launcher."""
    done = CliRunner().invoke(app, ["evaluate", run, *words])
    return done.exit_code, done.stdout or done.stderr


def test_evaluate_gives_the_loss_of_plain_diffusers(ranks: RankPool, folder: Path, straight: Any) -> None:
    from diffusers import DiTTransformer2DModel

    run = folder / "runs" / "straight"
    images, labels = digits("held_out")
    keys = torch.from_numpy(draws(np.arange(len(images)), seed=3, stream=FIXED))
    noise, times = normal(keys, (1, 8, 8), NOISE), uniform(keys, TIME)
    wide = times[:, None, None, None]
    labels = torch.where(uniform(keys, LABEL_DROP) < DROP, 10, labels)
    model = DiTTransformer2DModel.from_pretrained(run / "model").eval()
    with torch.no_grad():
        output = model((1 - wide) * images + wide * noise, timestep=times * 1000, class_labels=labels).sample
    expected = float(torch.nn.functional.mse_loss(output, noise - images))
    words = ["evaluate.parts=[loss]", "evaluate.per_device=300", "--data", "{kind: digits, part: held_out}", "--json"]
    for world in (1, 2):
        (code, said), *_ = ranks.run(evaluated, str(run), *words, world=world)
        assert code == 0, said
        found = json.loads(said)
        assert (found["step"], found["ranks"]) == (STEPS, world)
        np.testing.assert_allclose(found["numbers"]["loss"], expected, rtol=1e-5)


def test_ddpm_trains_on_any_ranks(ranks: RankPool, folder: Path) -> None:
    objective = {"kind": "ddpm", "prediction": "v", "betas": "cosine", "min_snr": 5.0}
    found = [
        curve(ranks.run(train, settings(folder, f"ddpm-{world}", objective=objective), world=world)[0], *NUMBERS)
        for world in (1, 2)
    ]
    np.testing.assert_allclose(found[1], found[0], rtol=1e-6)


def test_pictures_are_the_same_on_any_ranks(ranks: RankPool, folder: Path) -> None:
    from PIL import Image
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    part = {"kind": "pictures", "classes": [3, 0, 7], "per_class": 2, "steps": 2}
    assert torch.equal(
        ImageCollator(Images(mean=0.5, scale=4.0)).decode(torch.tensor([-6.0, 2.0])), torch.tensor([-1.0, 1.0])
    )
    found = []
    for world in (1, 2):
        shown = {"evaluate": {"every_epochs": None, "parts": [part]}, "log": {"sinks": ["tensorboard"]}}
        chosen = settings(folder, f"pictures-{world}", duration={"steps": 1}, **shown)
        records = ranks.run(train, chosen, world=world)[0]
        [told] = [record for record in records if record.get("event") == "picture"]
        assert (told["step"], told["file"]) == (1, "pictures/samples-1.png")
        run = folder / "runs" / f"pictures-{world}"
        with Image.open(run / told["file"]) as image:
            found.append(np.asarray(image).astype(int))
        events = EventAccumulator(str(run / "logs"), size_guidance={"images": 0}).Reload()
        assert [event.step for event in events.Images("samples")] == [1]
    assert found[0].shape == (8 * (3 * 9 - 1), 8 * (2 * 9 - 1), 3)
    assert abs(found[0] - found[1]).max() <= 1
    assert len(np.unique(found[0])) > 20


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        (
            {"evaluate": {"parts": [{"kind": "pictures", "classes": [10]}]}},
            "asks for the class 10, but the model has 10",
        ),
        ({"objective": {"kind": "causal_lm", "label_drop": None}}, "label_drop"),
        ({"model": {"classes": 12}}, "of another shape"),
    ],
)
def test_mistakes_end_before_the_first_step(ranks: RankPool, folder: Path, sections: dict[str, Any], says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        ranks.run(train, settings(folder, "wrong", **sections), world=1)


@pytest.mark.parametrize("kind", ["flow_matching", "ddpm"])
def test_a_label_that_the_model_has_no_row_for_names_its_record(tmp_path: Path, kind: str) -> None:
    recipe = settings(tmp_path, "few", objective={"kind": kind})
    recipe["model"] = {"kind": "diffusers", "architecture": "dit", "size": "tiny", "classes": 5, "overrides": SHAPE}
    with pytest.raises(DataError, match=r"digits, number \d+: the label [5-9], but the model has the classes 0 to 4"):
        fullshard.train(fullshard.read(recipe))
