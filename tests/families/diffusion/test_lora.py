"""Whole runs that train adapters of a text-conditioned denoiser: the same on any ranks, left as diffusers reads them,
and merged by `fullshard export`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.contracts.objective import Batch, Objective, Terms
from fullshard.families.diffusion.keyed_noise import NOISE, TIME, normal, uniform
from tests.cards import card, run_code
from tests.families.diffusion.denoisers import JOINT, POOLED, TOKENS, WIDTH, family, real, stored
from tests.near import assert_near
from tests.ranks import RankPool
from tests.small import curve, train

LORA = {"r": 2, "alpha": 6}
NUMBERS = ("loss", "grad_norm")


def text_of(labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """Stands for what a text encoder makes of a label's name."""
    table = torch.randn(10, TOKENS * WIDTH + POOLED, generator=torch.Generator().manual_seed(2))[labels]
    states = table[:, POOLED:].reshape(-1, TOKENS, WIDTH)
    return {"states": states, "mask": torch.ones(states.shape[:2], dtype=torch.bool), "pooled": table[:, :POOLED]}


class Described(Objective):
    """Rectified flow with a text for each label."""

    needs: ClassVar[tuple[str, ...]] = ("images", "label", "draws")
    encoder: ClassVar[str | None] = "image"

    def count(self, batch: Batch) -> int:
        return int((batch["sample_ids"] >= 0).sum())

    def loss(self, model: nn.Module, batch: Batch, aux: dict[str, nn.Module]) -> Terms:
        denoiser: Any = model
        images, times = batch["images"], uniform(batch["draws"], TIME)
        noise, share = normal(batch["draws"], images.shape[1:], NOISE), times[:, None, None, None]
        noisy = (1 - share) * images + share * noise
        found = denoiser.denoise(noisy, times * 1000, None, text_of(batch["label"]))
        apart = (found - noise + images).square().flatten(1).mean(1)
        return Terms(torch.where(batch["sample_ids"] >= 0, apart, 0.0).sum())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lora")
    shape = {"sample_size": 8, "in_channels": 1, "pos_embed_max_size": 8}
    chosen = family("sd3", overrides={**JOINT, **shape})
    module = real(chosen)
    chosen.export(module, iter(module.named_parameters()), path / "base", processor=None, dtype=torch.bfloat16)
    return path


def settings(folder: Path, name: str, **sections: Any) -> dict[str, Any]:
    return {
        "name": name,
        "output": str(folder / "runs"),
        "model": {"kind": "diffusers", "path": str(folder / "base"), "lora": LORA},
        "objective": {"kind": f"{__name__}.Described"},
        "data": {"train": {"kind": "digits", "part": "train"}, "holdout": 0, "cache": str(folder), "pack": False},
        "batch": {"per_device": 4, "global": 8},
        "duration": {"steps": 2},
        "optimizer": {"lr": 1e-2},
        "precision": "fp32",
        "topology": {"device": "cpu"},
        "evaluate": {"every_epochs": None, "parts": []},
        "checkpoint": {"every_epochs": None, "best": None},
        "log": {"every_steps": 1, "sinks": []},
        **sections,
    }


@pytest.fixture(scope="module")
def run(ranks: RankPool, folder: Path) -> Path:
    """A run on two ranks; its numbers lie beside."""
    found = curve(ranks.run(train, settings(folder, "two"), world=2)[0], *NUMBERS)
    (folder / "two.json").write_text(json.dumps(found))
    return folder / "runs" / "two"


def test_losses_do_not_depend_on_the_number_of_ranks(ranks: RankPool, folder: Path, run: Path) -> None:
    found = curve(ranks.run(train, settings(folder, "one"), world=1)[0], *NUMBERS)
    np.testing.assert_allclose(json.loads((folder / "two.json").read_text()), found, rtol=1e-6)
    assert found[0] != found[1]
    units = json.loads((run / "units.json").read_text())["units"]
    kept = {tuple(unit["storage"]) for unit in units}
    assert ("bfloat16", "float32") in kept, "a frozen base stays as it is stored, beside adapters in fp32"
    assert all(0 <= unit["trainable"] < unit["parameters"] for unit in units)


@torch.no_grad()
def test_diffusers_reads_the_adapter_and_the_merged_model(folder: Path, run: Path) -> None:
    import diffusers

    assert sorted(path.name for path in (run / "model").iterdir()) == ["README.md", "pytorch_lora_weights.safetensors"]
    theirs = diffusers.SD3Transformer2DModel.from_pretrained(folder / "base", torch_dtype=torch.float32).eval()
    labels = torch.tensor([3, 8])
    text, noisy, times = text_of(labels), torch.randn(2, 1, 8, 8), torch.tensor([20, 900])

    def predicted(model: Any) -> torch.Tensor:
        found: torch.Tensor = model(noisy, text["states"], text["pooled"], times).sample
        return found

    before = predicted(theirs)
    theirs.load_lora_adapter(str(run / "model"), weight_name="pytorch_lora_weights.safetensors")
    after = predicted(theirs)
    assert float((after - before).abs().max()) > 1e-3
    words = ["export", str(run), str(folder / "merged"), "--as", "merged", "--dtype", "fp32"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    merged = diffusers.AutoModel.from_pretrained(str(folder / "merged")).eval()
    assert_near(predicted(merged), after)
    for place in (run / "model", folder / "merged"):
        assert card(place).data.library_name == "diffusers"
        assert_near(predicted(run_code(place)["model"].float().eval()), after, within=2e-2)
    # As the base was stored, if nothing else is asked for; and as a start for another run.
    assert CliRunner().invoke(app, ["export", str(run), str(folder / "low"), "--as", "merged"]).exit_code == 0
    again = stored(folder / "low")
    weights = again.weights(again.build(processor=None))
    assert weights.read("proj_out.weight", 0, 1).dtype == torch.bfloat16
    assert CliRunner().invoke(app, ["export", str(run), str(folder / "alone")]).exit_code == 0
    left, alone = ((place / "pytorch_lora_weights.safetensors") for place in (run / "model", folder / "alone"))
    assert left.read_bytes() == alone.read_bytes()
