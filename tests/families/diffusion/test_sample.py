"""`fullshard sample`: the images are those of a plain loop over the exported model, on any number of ranks; options,
files, and messages about mistakes."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from fullshard.checkpoint.folder import pointed
from fullshard.cli import app
from fullshard.contracts.launcher import Launcher, Ranks
from fullshard.data.order import FIXED, draws
from fullshard.families.diffusion.keyed_noise import NOISE, normal
from fullshard.families.diffusion.sampling.image_batches import SamplerSettings
from tests.near import assert_near
from tests.ranks import RankPool
from tests.small import train

WANTED, STEPS, GUIDANCE, SEED = (7, 0, 3), 4, 3.0, 5
OPTIONS = ["--classes", "7,0,3", "--per-class", "3", "--steps", str(STEPS), "--guidance", "3", "--seed", "5"]


class Recorder(Launcher):
    """Writes down what it was to start."""

    path: str

    def start(self, command: Sequence[str], ranks: Ranks) -> int:
        Path(self.path).write_text(json.dumps([*command, str(ranks.per_node)]))
        return 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sample")


@pytest.fixture(scope="module")
def run(ranks: RankPool, folder: Path) -> Path:
    """Two checkpoints of a run that has moved since."""
    shape = {"sample_size": 8, "in_channels": 1, "out_channels": 1}
    settings = {
        "name": "digits",
        "output": str(folder / "runs"),
        "model": {"kind": "diffusers", "architecture": "dit", "size": "tiny", "classes": 10, "overrides": shape},
        "objective": {"kind": "flow_matching"},
        "data": {
            "train": {"kind": "digits", "part": "train"},
            "holdout": 0,
            "cache": str(folder / "cache"),
            "pack": False,
            "encode": {"kind": "image", "mean": "measure", "scale": "measure"},
        },
        "batch": {"per_device": 64},
        "duration": {"steps": 6},
        "optimizer": {"lr": 3e-2},
        "precision": "fp32",
        "topology": {
            "device": "cpu",
            "launcher": {"kind": "tests.families.diffusion.test_sample.Recorder", "path": str(folder / "started.json")},
        },
        "evaluate": {"parts": []},
        "checkpoint": {"every_steps": 3, "best": None},
        "log": {"sinks": []},
    }
    ranks.run(train, settings, world=1)
    return (folder / "runs" / "digits").rename(folder / "moved")


def by_hand(run: Path) -> np.ndarray:
    """Euler's method on the exported model: (9, 8, 8) with values from -1 to 1."""
    from diffusers import DiTTransformer2DModel

    from fullshard.families.diffusion.sources.digits import Digits

    records = Digits(part="train").open()
    pixels = np.stack([records[i]["image"] for i in range(len(records))]) / 127.5 - 1
    model = DiTTransformer2DModel.from_pretrained(run / "model").eval()
    labels = torch.tensor(WANTED).repeat_interleave(3)
    x = normal(torch.from_numpy(draws(np.arange(9), seed=SEED, stream=FIXED)), (1, 8, 8), NOISE)
    for step in range(STEPS):
        time = torch.full((9,), 1 - step / STEPS)
        with torch.no_grad():
            told = model(x, timestep=time * 1000, class_labels=labels).sample
            free = model(x, timestep=time * 1000, class_labels=torch.full_like(labels, 10)).sample
        x = x - (free + GUIDANCE * (told - free)) / STEPS
    return x[:, 0].numpy() * pixels.std() + pixels.mean()  # type: ignore[no-any-return]


def made(run: str, batch_size: int) -> torch.Tensor | None:
    """What one rank makes; sent to the rank pool."""
    from fullshard.commands.chosen_run import choose, on_this_machine
    from fullshard.dist.world import join
    from fullshard.families.diffusion.sampling import from_run
    from fullshard.log.console import Console

    options = from_run.SampleOptions(WANTED, 3, SamplerSettings(STEPS, "euler", GUIDANCE, SEED), batch_size, None)
    chosen = choose(run, None, here=on_this_machine(devices="auto", nodes=1))
    loaded = from_run.load(chosen, options, Console(silent=True))
    world = join(device="cpu", backend="gloo", timeout_s=60)
    return from_run.make(loaded, chosen, options, world, from_run.no_bar)


def invoked(words: list[str]) -> tuple[int, str]:
    """The command on one rank of the pool, which was started by a launcher."""
    done = CliRunner().invoke(app, words)
    return done.exit_code, done.output


@pytest.mark.parametrize(("world", "batch_size"), [(1, 64), (1, 4), (2, 64), (2, 2)])
def test_the_images_are_those_of_a_plain_loop_on_any_ranks(
    ranks: RankPool, run: Path, world: int, batch_size: int
) -> None:
    found, *others = ranks.run(made, str(run), batch_size, world=world)
    assert others == [None] * (world - 1)
    assert found.shape == (9, 1, 8, 8)
    expected = by_hand(run)
    assert np.ptp(expected, axis=0).max() > 0.5
    assert_near(found[:, 0], expected)


def test_the_command_starts_ranks_that_write_the_grid_and_the_files(ranks: RankPool, run: Path, tmp_path: Path) -> None:
    words = ["sample", str(run), *OPTIONS, "--method", "euler", "--devices", "2", "--checkpoint", "latest"]
    done = CliRunner().invoke(app, [*words, "--grid", str(tmp_path / "g.png"), "--images", str(tmp_path / "i")])
    assert (done.exit_code, done.output) == (0, "")
    *command, per_node = json.loads((run.parent / "started.json").read_text())
    assert (command[1:4], per_node) == (["-m", "fullshard", "sample"], "2")
    (code, said), other = ranks.run(invoked, command[3:], world=2)
    assert (code, other) == (0, (0, ""))
    for line in ("checkpoint-6", "3 images of each class: 7, 0, 3", "4 steps of euler, guidance 3, seed 5", "2 ranks"):
        assert line in said
    assert f"Wrote {tmp_path / 'g.png'} (9 images)" in said.replace("\n", " ")
    expected = ((by_hand(run).clip(-1, 1) + 1) * 127.5).round()
    for number, wanted in enumerate(expected):
        with Image.open(tmp_path / "i" / str(WANTED[number // 3]) / f"{number % 3}.png") as image:
            assert abs(np.asarray(image).astype(float) - wanted).max() <= 1
    with Image.open(tmp_path / "g.png") as image:
        assert image.size == (8 * (3 * 9 - 1), 8 * (3 * 9 - 1))
        assert abs(np.asarray(image)[4 : 8 * 8 : 8, 4 : 8 * 8 : 8, 0].astype(float) - expected[0]).max() <= 1
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_zeroed_gates_pass_the_proof_of_the_first_update(run: Path) -> None:
    """All but the last layer have a gradient of zero then; none is missing."""
    log = (run / "log.txt").read_text()
    found = re.search(r"First update proven: the gradients of (\d+) trained parameters are finite, (\d+) are not", log)
    assert found is not None
    assert int(found[1]) > 40
    assert found[2] == "2"


def test_other_weights_make_other_images(run: Path, tmp_path: Path) -> None:
    """An earlier checkpoint is another model; the exported one is the last, also when the checkpoints are gone."""
    from diffusers import DiTTransformer2DModel

    alone = tmp_path / "alone"
    shutil.copytree(run, alone, ignore=shutil.ignore_patterns("checkpoint-*", "best", "last"))
    DiTTransformer2DModel.from_pretrained(run / "model").save_pretrained(alone / "model")
    words = [*OPTIONS, "--method", "heun", "--per-class", "1"]
    found = []
    for place, extra in ((run, []), (run, ["--checkpoint", "3"]), (run / "checkpoint-3", []), (alone, [])):
        grid = tmp_path / f"{len(found)}.png"
        done = CliRunner().invoke(app, ["sample", str(place), *words, "--grid", str(grid), *extra])
        assert done.exit_code == 0, done.output
        with Image.open(grid) as image:
            found.append(np.asarray(image).astype(int))
    assert abs(found[0] - found[1]).max() > 20
    assert abs(found[1] - found[2]).max() == 0
    assert abs(found[0] - found[3]).max() <= 1
    done = CliRunner().invoke(app, ["sample", str(alone), *words])
    assert done.exit_code == 0
    assert (alone / "pictures" / "sample-model.png").is_file()
    assert pointed(run, "last") == run / "checkpoint-6"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere"], "RUN = nowhere is not a run: there is no such folder"),
        (["EMPTY"], "is not a run: it has no recipe.resolved.yaml and no checkpoint"),
        (["RUN", "--classes", "0,10"], "10 is not a class of the model, it has the classes 0 to 9"),
        (["RUN", "--classes", "cat"], "--classes cat is not a list of classes"),
        (["RUN", "--texts", "a zero"], "has a model that takes no texts"),
        (["RUN", "--texts", "nowhere.txt"], "--texts nowhere.txt cannot be read"),
        (["RUN", "--texts", " "], "a text is missing or blank"),
        (["RUN", "--steps", "0"], "greater than or equal to 1"),
        (["RUN", "--method", "huen"], "--method huen: allowed are heun, euler (did you mean 'heun'?)"),
        (["RUN", "--weights", "ema"], "holds no averaged weights"),
        (["RUN", "--checkpoint", "5"], "there is no such checkpoint in RUN. Give latest, best, or a step: 3, 6."),
        (["RUN", "--checkpoint", "best"], "no best one was chosen"),
        (["RUN/last", "--checkpoint", "3"], "is a checkpoint already"),
        (["BARE"], "RUN = BARE has no checkpoint and no model/"),
        (["TEXT"], "is not a diffusion run: its objective is causal_lm"),
        (["RUN", "--grid", "out.jpg"], "must be a local file whose name ends in .png"),
        (["RUN", "--grid", "RUN/log.txt/out.png"], "cannot be written"),
        (["RUN", "--images", "RUN"], "exists and is not an empty folder"),
        (["RUN", "--devices", "0"], "must be at least 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_reported_in_one_line(run: Path, tmp_path: Path, words: list[str], says: str) -> None:
    places = {"RUN": run, "EMPTY": tmp_path / "empty", "BARE": tmp_path / "bare", "TEXT": tmp_path / "text"}
    places["EMPTY"].mkdir()
    places["BARE"].mkdir()
    shutil.copy(run / "recipe.resolved.yaml", places["BARE"])
    changed(run / "checkpoint-6", places["TEXT"] / "checkpoint-6", objective={"kind": "causal_lm"})

    def placed(text: str) -> str:
        for name, place in places.items():
            head, slash, rest = text.partition("/")
            text = f"{place}{slash}{rest}" if head == name else text
        return text

    done = CliRunner().invoke(app, ["sample", *map(placed, words)])
    assert done.exit_code == 2, done.output
    for name, place in places.items():
        says = says.replace(f"in {name}.", f"in {place}.").replace(f"= {name} ", f"= {place} ")
    assert says in done.output
    assert "Traceback" not in done.output


def changed(checkpoint: Path, copy: Path, **sections: Any) -> None:
    """A checkpoint whose recipe differs."""
    shutil.copytree(checkpoint, copy)
    state = json.loads((copy / "state.json").read_text())
    state["recipe"].update(sections)
    (copy / "state.json").write_text(json.dumps(state))
