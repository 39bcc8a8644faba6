"""Evaluations of images that a model makes: FID is that of torchmetrics, a classifier's answers are counted once each,
on any number of ranks; the user's code is loaded, tried, and refused with a reason."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fullshard.contracts.evaluation import EvaluationInputs
from fullshard.data.loader import Loader
from fullshard.errors import RecipeError
from fullshard.families.diffusion.encoders.image import Images
from fullshard.families.diffusion.evaluations.fid import Fid
from fullshard.families.diffusion.evaluations.recognition import Recognition
from fullshard.families.diffusion.evaluations.user_code import load, load_callable
from fullshard.families.diffusion.image_samples import ImageCollator
from fullshard.families.diffusion.objectives.flow_matching import FlowMatching
from fullshard.families.diffusion.sampling.image_batches import FILLER, shares
from fullshard.families.diffusion.sampling.sampler import sample
from tests.ranks import RankPool

SAMPLES, MADE, STEPS, SEED = 21, 31, 2, 4  # odd, so that ranks must fill up
CODE = """
import torch
from torch import nn


class Features(nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(64, 6, generator=generator))
        self.drop = nn.Dropout(0.5)

    def forward(self, images):
        assert images.dtype == torch.float32 and images.min() >= 0 and images.max() <= 1
        return torch.tanh(self.drop(images.flatten(1)) @ self.weight)


def three(images):
    assert images.dtype == torch.uint8
    return (images.flatten(1).float().mean(1) * 1000).long() % 3


def logits(images):
    return images.flatten(1)[:, :3].numpy()


def one_for_all(images):
    return images.mean()


class Wants:
    def __init__(self, size):
        pass


constant = 3
"""


class Model(nn.Module):
    """Predicts something that depends on the image, the time and the class."""

    num_classes, null_label = 3, 3

    def __init__(self, channels: int = 1, text_width: int | None = None) -> None:
        super().__init__()
        self.text_width = text_width
        self.config = SimpleNamespace(sample_size=8)
        self.image_channels = channels

    def denoise(self, noisy: Any, timesteps: Any, labels: Any = None, text: Any = None) -> torch.Tensor:
        shift = (labels + 1) * 0.2
        return 0.5 * noisy + (timesteps / 1000 + shift)[:, None, None, None]


def data() -> tuple[Images, list[dict[str, np.ndarray]]]:
    draw = np.random.default_rng(1)
    samples = [
        {"image": draw.integers(0, 256, (1, 1, 8, 8), dtype=np.uint8), "label": np.array([min(i % 4, 2)])}
        for i in range(SAMPLES)
    ]
    return Images(mean=0.25, scale=2.0), samples


class Bar:
    """Counts."""

    def __init__(self, total: int) -> None:
        self.left = total

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, failed: Any, *_: object) -> None:
        assert failed or self.left == 0

    def advance(self) -> None:
        self.left -= 1


def evaluated(kind: str, settings: dict[str, Any]) -> list[dict[str, float]]:
    """What two validations find on this rank."""
    from fullshard.dist import reduce

    ranks, rank = reduce.place()
    encoder, samples = data()
    collator = ImageCollator(encoder)
    loader = Loader(samples, collator, per_device=4, rank=rank, world=ranks)
    inputs = EvaluationInputs(
        model=Model(),
        objective=FlowMatching(),
        aux={},
        batches=loader.once,
        num_batches=loader.num_batches,
        processor=None,
        sum_over_ranks=reduce.sum_over_ranks,
        device=torch.device("cpu"),
        bar=Bar,
        show=lambda *_: None,
        collator=collator,
    )
    part = {"fid": Fid, "recognition": Recognition}[kind](**settings)
    part.check(inputs.objective, inputs.model, SimpleNamespace(chosen=np.arange(SAMPLES)))
    part.check_encoder(inputs.objective, inputs.model, encoder)
    return [part.run(inputs).numbers for _ in range(2)]


def made(labels: torch.Tensor, guidance: float) -> torch.Tensor:
    """The images by hand, with values from -1 to 1."""
    found = sample(
        FlowMatching(),
        Model(),
        labels,
        torch.arange(len(labels)),
        shape=(1, 8, 8),
        seed=SEED,
        steps=STEPS,
        guidance=guidance,
        method="euler",
    )
    return (found / 2.0 + 0.25).clamp(-1, 1)


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("code") / "judges.py"
    path.write_text(CODE)
    return path


@pytest.mark.parametrize("world", [1, 2])
def test_fid_is_that_of_torchmetrics(ranks: RankPool, code: Path, world: int) -> None:
    from torchmetrics.image.fid import FrechetInceptionDistance

    settings = {"extractor": f"{code}:Features", "images": MADE, "batch_size": 7, "steps": STEPS, "seed": SEED}
    found = ranks.run(evaluated, "fid", settings | {"method": "euler"}, world=world)
    encoder, samples = data()
    labels = torch.tensor([int(s["label"][0]) for s in samples])
    order = torch.from_numpy(np.random.default_rng(SEED).permutation(SAMPLES))
    images = made(labels[order[torch.arange(MADE) % SAMPLES]], 1.0)
    extractor = load(f"{code}:Features", where="")().eval()
    extractor.num_features = 6
    metric = FrechetInceptionDistance(feature=extractor)
    metric.update(torch.cat([torch.from_numpy(s["image"]) for s in samples]).float() / 255, real=True)
    metric.update((images + 1) / 2, real=False)
    with torch.no_grad():
        expected = float(metric.compute())
    assert expected > 0.1
    for numbers in (number for each in found for number in each):
        assert numbers == {"fid": pytest.approx(expected, rel=1e-4)}


@pytest.mark.parametrize("world", [1, 2])
def test_what_a_classifier_recognises_is_counted_once(ranks: RankPool, code: Path, world: int) -> None:
    asked = [2, 0, 1]
    settings = {"classifier": f"{code}:three", "pixels": "uint8", "classes": asked, "per_class": 5, "batch_size": 3}
    more = {"steps": STEPS, "seed": SEED, "method": "euler", "guidance": 3.0}
    found = ranks.run(evaluated, "recognition", settings | more, world=world)
    wanted = torch.tensor(asked).repeat_interleave(5)
    pixels = ((made(wanted, 3.0) + 1) / 2 * 255).round().to(torch.uint8)
    answers = load(f"{code}:three", where="")(pixels)
    share = float((answers == wanted).float().mean())
    assert 0 < share < 1
    assert found == [[{"recognised": pytest.approx(share)}] * 2] * world


def test_logits_of_numpy_are_answers_too(ranks: RankPool, code: Path) -> None:
    settings = {"classifier": f"{code}:logits", "per_class": 4, "steps": STEPS, "seed": SEED, "method": "euler"}
    [found] = ranks.run(evaluated, "recognition", settings, world=1)
    wanted = torch.arange(3).repeat_interleave(4)
    right = made(wanted, 2.0).flatten(1)[:, :3].argmax(1) == wanted
    assert found[0]["recognised"] == pytest.approx(float(right.float().mean()))


def test_shares_are_equal_and_hold_every_number_once() -> None:
    parts = [shares(11, batch=2, ranks=3, rank=rank) for rank in range(3)]
    assert {tuple(len(batch) for batch in part) for part in parts} == {(2, 2)}
    numbers = torch.cat([batch for part in parts for batch in part])
    assert sorted(numbers[numbers != FILLER].tolist()) == list(range(11))


def test_a_module_of_the_user_is_found_by_its_full_name() -> None:
    assert load("torch.nn.Flatten", where="x") is nn.Flatten
    assert isinstance(load_callable("torch.nn.Flatten", where="x"), nn.Flatten)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("missing.py:Name", "there is no file"),
        ("judges.py:Featuers", r"no 'Featuers' in .*did you mean 'Features'"),
        ("judges.py:Wants", "cannot be instantiated without arguments"),
        ("judges.py:constant", "is int, which cannot be called"),
        ("judges", "is not the name of code. Write path.py:Name"),
        ("no_such_package.Thing", "'no_such_package' cannot be imported"),
        ("broken.py:Name", r"failed to import \(ZeroDivisionError"),
    ],
)
def test_code_that_cannot_be_loaded_is_reported(code: Path, name: str, says: str) -> None:
    (code.parent / "broken.py").write_text("1 / 0\n")
    with pytest.raises(RecipeError, match=f"fid.extractor.*{says}"):
        load_callable(str(code.parent / name) if ".py" in name else name, where="fid.extractor")


def checked(evaluation: Any, model: Any) -> None:
    evaluation.check(FlowMatching(), model, SimpleNamespace(chosen=np.arange(SAMPLES)))
    evaluation.check_encoder(FlowMatching(), model, Images())


@pytest.mark.parametrize(
    ("part", "model", "says"),
    [
        ({"classifier": "CODE:one_for_all"}, Model(), "returned float32 of shape .* It must return an integer or"),
        ({"classifier": "CODE:three"}, Model(), r"failed on images of shape \[2, 1, 8, 8\], float32 from 0 to 1"),
        ({"classifier": "CODE:three", "classes": [3]}, Model(), "asks for the class 3, but the model has 3 classes"),
        ({"classifier": "CODE:three"}, Model(channels=4), "the model has 4: these are latents"),
        ({"classifier": "CODE:three"}, Model(text_width=4), "makes images for classes, but the model is condit"),
        ({"classifier": "CODE:three"}, nn.Linear(1, 1), "needs an objective that makes images"),
        ({"extractor": "CODE:one_for_all"}, Model(), r"returned a tensor of \[\] for 2 images of \[1, 8, 8\]"),
    ],
)
def test_what_cannot_work_is_refused_before_the_run(code: Path, part: dict[str, Any], model: Any, says: str) -> None:
    settings = {
        key: value.replace("CODE", str(code)) if isinstance(value, str) else value for key, value in part.items()
    }
    evaluation = Fid(**settings) if "extractor" in part else Recognition(**settings)
    with pytest.raises(RecipeError, match=says):
        checked(evaluation, model)


def test_both_can_choose_the_best_model(code: Path) -> None:
    assert Fid(extractor="a.py:B").gives(FlowMatching(), Model()) == {"fid": "min"}
    assert Recognition(classifier="a.py:B").gives(FlowMatching(), Model()) == {"recognised": "max"}
    with pytest.raises(RecipeError, match="compares with held-out images"):
        Fid(extractor=f"{code}:Features").check(FlowMatching(), Model(), None)


DIGITS = """
import torch
from sklearn.datasets import load_digits
from sklearn.svm import SVC

digits = load_digits()
classifier = SVC(gamma=0.001).fit(digits.data[::2], digits.target[::2])


def recognise(images):
    return classifier.predict((images.flatten(1) * 16).cpu().numpy())


def features(images):
    return images.flatten(2).mean(2).repeat(1, 2) + images.flatten(1)[:, 20:22]
"""


def test_a_run_keeps_the_model_that_is_best_by_them(ranks: RankPool, tmp_path: Path) -> None:
    from tests.small import train

    code = tmp_path / "digits_code.py"
    code.write_text(DIGITS)
    shape = {"sample_size": 8, "in_channels": 1, "out_channels": 1}
    way = {"steps": 2, "method": "euler", "batch_size": 100}
    fid = {"kind": "fid", "extractor": f"{code}:features", "images": 40, **way}
    recognition = {"kind": "recognition", "classifier": f"{code}:recognise", "per_class": 3, **way}
    found = []
    for world in (1, 2):
        settings = {
            "name": f"digits-{world}",
            "output": str(tmp_path / "runs"),
            "model": {"kind": "diffusers", "architecture": "dit", "size": "tiny", "classes": 10, "overrides": shape},
            "objective": {"kind": "flow_matching"},
            "data": {
                "train": {"kind": "digits", "part": "train"},
                "validation": {"kind": "digits", "part": "held_out"},
                "cache": str(tmp_path / "cache"),
                "pack": False,
                "encode": {"kind": "image", "mean": "measure", "scale": "measure"},
            },
            "batch": {"per_device": 32 // world},
            "duration": {"steps": 2},
            "precision": "fp32",
            "topology": {"device": "cpu"},
            "evaluate": {"every_steps": 1, "per_device": 300, "parts": [fid, recognition]},
            "checkpoint": {"best": {"metric": "fid", "mode": "min"}},
            "log": {"sinks": []},
        }
        records = ranks.run(train, settings, world=world)[0]
        found.append([(r["fid"], r["recognised"]) for r in records if r["kind"] == "validation"])
        assert (tmp_path / "runs" / f"digits-{world}" / "best").exists()
    assert len(found[0]) == 2
    assert all(fid > 0 and 0 <= share <= 1 for fid, share in found[0])
    assert found[0][0][0] != found[0][1][0]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4)
