"""How good the digits are that the recipe `diffusion` learns to write, measured against the real ones.

    python benchmarks/digits.py                  trains the recipe, then measures
    python benchmarks/digits.py runs/diffusion   measures a run that is there

A support vector classifier of scikit-learn learns the training half of the real digits and is marked on the other half.
It then reads samples of the run's exported model, as many of each class. Beside that: how far samples lie from each
other, and whether they are copies: how far each lies from the nearest digit of the training half, against the same for
real digits of the other half.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

CLASSES = 10
BAR_CLASSIFIER, BAR_RECOGNISED, BAR_DIVERSITY = 0.97, 0.90, 0.5


@dataclass(frozen=True)
class Quality:
    """What was measured; distances are Euclidean, with pixels from -1 to 1."""

    classifier: float
    """Share of held-out real digits that the classifier reads as what they are."""
    recognised: float
    """Share of samples that it reads as the class asked for."""
    diversity: float
    """Mean distance of two samples of a class, against that of two real digits of a class."""
    nearest: float
    """Median distance of a sample from the nearest training digit, against that of a held-out real digit."""
    copies: float
    """Share of samples nearer to a training digit than 99 % of held-out real digits are."""


def real(part: Any) -> tuple[np.ndarray, np.ndarray]:
    """Pixels (N, 64) from -1 to 1, and classes."""
    from fullshard.families.diffusion.sources.digits import Digits

    records = Digits(part=part).open()
    rows = [records[number] for number in range(len(records))]
    pixels = np.stack([np.asarray(row["image"], dtype=np.float32).ravel() for row in rows])
    return pixels / 127.5 - 1, np.array([row["label"] for row in rows])


def make(run: Path, *, each: int, guidance: float, steps: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Samples of the model that the run exported, in one process: pixels (N, 64) and the classes asked for."""
    from fullshard.families.diffusion.denoiser.bind import bind
    from fullshard.families.diffusion.objectives.flow_matching import FlowMatching
    from fullshard.families.diffusion.sampling.sampler import sample
    from fullshard.kernels.amx import avoid_broken_amx

    avoid_broken_amx()
    diffusers: Any = __import__("diffusers")
    model = diffusers.DiTTransformer2DModel.from_pretrained(run / "model").eval()
    bind(model, classes=CLASSES)
    labels = torch.arange(CLASSES).repeat_interleave(each)
    images = sample(
        FlowMatching(),
        model,
        labels,
        torch.arange(len(labels)),
        shape=(1, 8, 8),
        seed=seed,
        steps=steps,
        guidance=guidance,
        method="heun",
    )
    return images.clamp(-1, 1).flatten(1).numpy(), labels.numpy()


def measure(pixels: np.ndarray, labels: np.ndarray) -> Quality:
    """Of samples, against the real digits."""
    from sklearn.svm import SVC  # type: ignore[import-untyped, unused-ignore]

    trained, classes = real("train")
    held_out, others = real("held_out")
    reader = SVC(C=10).fit(trained, classes)
    near = np.array([nearest(row, trained) for row in pixels])
    near_real = np.array([nearest(row, trained) for row in held_out])
    return Quality(
        classifier=float(reader.score(held_out, others)),
        recognised=float((reader.predict(pixels) == labels).mean()),
        diversity=spread(pixels, labels) / spread(held_out, others),
        nearest=float(np.median(near) / np.median(near_real)),
        copies=float((near < np.quantile(near_real, 0.01)).mean()),
    )


def nearest(row: np.ndarray, others: np.ndarray) -> float:
    return float(np.sqrt(((others - row) ** 2).sum(1)).min())


def spread(pixels: np.ndarray, labels: np.ndarray) -> float:
    """The mean over classes of the mean distance of two of a class."""
    means = [torch.pdist(torch.from_numpy(pixels[labels == label])).mean() for label in range(CLASSES)]
    return float(torch.stack(means).mean())


def show(rows: Sequence[tuple[float, Quality]], count: int) -> None:
    print(f"| guidance | recognised of {count} | diversity | nearest | copies | classifier on real digits |")
    print("|---|---|---|---|---|---|")
    for guidance, found in rows:
        print(
            f"| {guidance:g} | {found.recognised:.1%} | {found.diversity:.2f} | {found.nearest:.2f} | "
            f"{found.copies:.1%} | {found.classifier:.1%} |"
        )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", nargs="?", type=Path)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--guidance", type=float, nargs="*", default=[1.0, 2.0, 4.0])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        run = options.run
        if run is None:
            import fullshard

            run = Path(fullshard.train(fullshard.read("diffusion", f"output={temporary}")).folder)
        found = []
        for guidance in options.guidance:
            samples = make(run, each=options.count // CLASSES, guidance=guidance, steps=32)
            found.append((guidance, measure(*samples)))
        show(found, options.count)
    chosen = dict(found).get(2.0, found[0][1])
    good = chosen.classifier >= BAR_CLASSIFIER and chosen.recognised >= BAR_RECOGNISED
    return 0 if good and chosen.diversity >= BAR_DIVERSITY and chosen.nearest >= 1 else 1


if __name__ == "__main__":
    sys.exit(main())
