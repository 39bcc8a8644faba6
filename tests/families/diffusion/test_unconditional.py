"""Guidance on a model without labels and texts is refused wherever it can be set, and not printed where it cannot
act."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.errors import RecipeError
from fullshard.log.console import Console
from fullshard.recipes.read import read
from fullshard.setup.run_inputs import prepare_inputs
from tests.ranks import RankPool
from tests.small import train

SHAPE = {"sample_size": 8, "in_channels": 1, "out_channels": 1}
FEATURES = "tests.unit.evaluate.test_generated.features"


def settings(folder: Path, **sections: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "name": "free",
        "output": str(folder),
        "model": {"kind": "diffusers", "architecture": "unet", "size": "tiny", "overrides": SHAPE},
        "objective": {"kind": "flow_matching"},
        "data": {"train": {"kind": "digits"}, "holdout": 0.1, "cache": str(folder / "cache"), "pack": False},
        "batch": {"per_device": 16},
        "duration": {"steps": 1},
        "precision": "fp32",
        "topology": {"device": "cpu"},
        "evaluate": {"parts": [{"kind": "pictures", "per_class": 2, "steps": 1}]},
        "checkpoint": {"best": None},
        "log": {"sinks": []},
    }
    return {key: {**value, **sections[key]} if key in sections else value for key, value in base.items()}


def test_a_run_without_labels_is_sampled_without_guidance(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(train, settings(tmp_path), world=1)
    with Image.open(tmp_path / "free" / "pictures" / "samples-1.png") as image:
        assert image.size == (8 * (2 * 9 - 1), 8 * 8)
    words = ["sample", str(tmp_path / "free"), "--per-class", "3", "--steps", "1", "--grid", str(tmp_path / "g.png")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "1 step of heun, without labels or texts, seed 0" in done.output
    with Image.open(tmp_path / "g.png") as image:
        assert image.size == (8 * (3 * 9 - 1), 8 * 8), "the size that was trained"
    for asked in ("2", "0"):
        done = CliRunner().invoke(app, [*words, "--guidance", asked])
        assert done.exit_code == 2
        assert f"--guidance = {asked}: guidance is the weight of a label or a text" in done.output
        assert "Traceback" not in done.output
    assert CliRunner().invoke(app, [*words, "--guidance", "1"]).exit_code == 0


@pytest.mark.parametrize(
    ("part", "where"),
    [
        ({"kind": "pictures", "guidance": 2}, "pictures.guidance = 2"),
        ({"kind": "fid", "guidance": 3, "extractor": FEATURES}, "fid.guidance = 3"),
    ],
)
def test_an_evaluation_is_refused_before_ranks_connect(tmp_path: Path, part: dict[str, Any], where: str) -> None:
    chosen = settings(tmp_path, evaluate={"parts": [part]})
    with pytest.raises(RecipeError, match=f"evaluate.parts: {where}: guidance is .* takes neither. Leave it"):
        prepare_inputs(read(chosen).recipe, world_size=1, console=Console(silent=True))


def test_a_label_that_was_never_dropped_cannot_be_compared_with(tmp_path: Path) -> None:
    """From scratch, the row for no label would stay at its first values."""
    dit = {"architecture": "dit", "classes": 10}
    never = {"objective": {"label_drop": 0}, "model": dit}
    for part, where in (({"kind": "pictures", "guidance": 2}, "pictures"), ({"kind": "recognition"}, "recognition")):
        given = {"guidance": 2, **part, **({"classifier": FEATURES} if where == "recognition" else {})}
        chosen = settings(tmp_path, evaluate={"parts": [given]}, **never)
        with pytest.raises(RecipeError, match=rf"{where}.guidance = 2 compares .* objective.label_drop = 0. Set it to"):
            prepare_inputs(read(chosen).recipe, world_size=1, console=Console(silent=True))
    prepare_inputs(read(settings(tmp_path, **never)).recipe, world_size=1, console=Console(silent=True))


def test_guidance_for_a_model_that_does_not_take_it_is_refused() -> None:
    family = read(settings(Path("nowhere"), model={"guidance": 5.0})).recipe.model
    with pytest.raises(RecipeError, match=r"model.guidance = 5 is for models .* but UNet2DModel does not"):
        family.build(processor=None)
