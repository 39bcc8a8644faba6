"""The handwritten digits of scikit-learn: 1,797 real images of 8 x 8 grey pixels, in 10 classes.

Nothing is downloaded. Must not know batches or ranks.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from fullshard.contracts.data import Records, Source
from fullshard.data.records import Listed, combine
from fullshard.errors import missing_package

_WHITE = 16
"""The brightest value of scikit-learn's images."""


class Digits(Source):
    """Images (`image`: 8 x 8, from 0 to 255) of the digits 0 to 9 (`label`)."""

    part: Literal["train", "held_out", "all"] = "all"
    """train: the 899 digits with even numbers in scikit-learn's order; held_out: the 898 with odd ones.
    Alternating, because the digits of one writer are next to each other."""

    def open(self) -> Records:
        images, labels = _digits()
        chosen = {"train": range(0, len(labels), 2), "held_out": range(1, len(labels), 2)}.get(
            self.part, range(len(labels))
        )
        rows = [{"image": images[number], "label": int(labels[number])} for number in chosen]
        return Listed(
            rows,
            where=lambda index: f"scikit-learn's digits, number {chosen[index]}",
            fingerprint=lambda: combine("digits", self.part, images.tobytes().hex(), str(labels.tolist())),
        )


def _digits() -> tuple[Any, Any]:
    """Pixels (N, 8, 8) as uint8, and classes (N,)."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped, unused-ignore]
    except ImportError as error:
        raise missing_package("scikit-learn", extra="diffusion", needed_by="kind: digits") from error
    found = load_digits()
    return np.rint(found.images * 255 / _WHITE).astype(np.uint8), found.target


__all__ = ["Digits"]
