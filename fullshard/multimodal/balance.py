"""Which rows share a step and a micro-batch, so that little is padding and all ranks have about as much to do.

Losses do not change: every row is read once per epoch, and a step divides by what all ranks count. Must not know what
a row holds, models or torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fullshard.data.order import FILLER, micro_batches
from fullshard.data.prepare import Prepared
from fullshard.formatting.plural import join_words


@dataclass(frozen=True)
class Balance:
    """The rows of a run, by number."""

    tokens: np.ndarray | None
    """Of each row; None if rows are not made of tokens."""
    media: dict[str, np.ndarray]
    """How much each row holds of images, seconds of audio, ..."""
    has_media: np.ndarray | None
    """Whether a row needs a tower; None for a model without towers."""
    fixed_length: int | None
    """The length that all rows are padded to; None: the longest of their micro-batch."""
    per_device: int
    world: int

    def spread(self, order: np.ndarray) -> np.ndarray:
        """The order of an epoch, with rows that have media spread evenly over it. Otherwise it stays as it is."""
        if self.has_media is None:
            return order
        place = np.empty(len(order))
        for group in (True, False):
            members = np.flatnonzero(self.has_media[order] == group)
            place[members] = (np.arange(len(members)) + 0.5) / max(len(members), 1)
        return order[np.argsort(place, kind="stable")]

    def even(self, rows: np.ndarray) -> np.ndarray:
        """The rows of a step: those of similar length share a micro-batch, and its ranks get about as many media."""
        weight = np.zeros(len(rows)) if self.tokens is None else self.tokens[rows]
        # Longest first: a step that does not fit into memory fails at once.
        found = rows[np.argsort(-weight, kind="stable")]
        size = self.per_device * self.world
        return np.concatenate([self._dealt(found[at : at + size]) for at in range(0, len(found), size)])

    def _dealt(self, rows: np.ndarray) -> np.ndarray:
        """One micro-batch of all ranks, dealt out by media like cards: forth and back."""
        amounts = sum((each[rows] for each in self.media.values()), np.zeros(len(rows)))
        found = rows[np.argsort(-amounts, kind="stable")]
        turns = [found[at : at + self.world] for at in range(0, len(found), self.world)]
        # An incomplete turn stays: its last places have no row.
        return np.concatenate([t[::-1] if n % 2 and len(t) == self.world else t for n, t in enumerate(turns)])

    def numbers(self, rows: np.ndarray) -> dict[str, float]:
        """What is logged of a step's micro-batches, over all ranks: the share of padding, and the media of each."""
        places = micro_batches(rows, per_device=self.per_device, world=self.world)
        batches = len(places) * self.world
        found = {f"{name}_per_micro_batch": float(each[rows].sum()) / batches for name, each in self.media.items()}
        if self.tokens is None:
            return found
        # A micro-batch without rows has the shape of the first row of all.
        widths = np.where(places == FILLER, 0, self.tokens[places]).max(axis=1)
        widths = np.where(widths == 0, self.tokens[0], widths) if self.fixed_length is None else self.fixed_length
        total = self.per_device * np.broadcast_to(widths, (len(places), self.world)).sum()
        return {"padding": 1 - float(self.tokens[rows].sum() / total), **found}


def make_balance(data: Prepared, *, per_device: int, world: int) -> Balance:
    """The balance of a run's training data."""
    amounts = {each.name: each.amounts for each in data.quantities}
    # An objective that lays out its texts pads them itself.
    tokens = None if data.collator.settings.lays_out else amounts.get("tokens")
    feature = data.collator.media_feature
    media = {name: amounts[name] for name in _media(data)}
    has_media = data.train.entries(feature) > 0 if feature else None
    return Balance(tokens, media, has_media, data.train.fixed_length, per_device, world)


def _media(data: Prepared) -> list[str]:
    """The quantities that are images, clips, ..."""
    shown = [each.name for each in data.quantities if each.short and each.name not in ("tokens", "samples")]
    return shown if data.collator.media_feature else []


def chosen(choice: str | None, data: Prepared) -> str:
    """The balance in force: none, batches or steps."""
    automatic = "batches" if data.collator.media_feature and data.train.fixed_length is None else "none"
    return choice or automatic


def balanced(choice: str | None, data: Prepared, *, per_device: int, world: int) -> dict[str, Any]:
    """The loader's settings for data.balance."""
    balance, wanted = make_balance(data, per_device=per_device, world=world), chosen(choice, data)
    found: dict[str, Any] = {"numbers": balance.numbers}
    if wanted != "none":
        found["even"] = balance.even
    if wanted == "steps":
        found["spread"] = balance.spread
    return found


def described(choice: str | None, data: Prepared) -> list[tuple[str, str]]:
    """A line for the header of a run, unless rows keep their order."""
    wanted = chosen(choice, data)
    if wanted == "none":
        return []
    words = ["rows of similar length share a micro-batch"]
    if names := [name.replace("_", " ") for name in _media(data)]:
        words.append(f"ranks get about as many {join_words(names)}")
        words += [f"steps have about as many rows with {join_words(names)}"] if wanted == "steps" else []
    return [("balance", f"{wanted}: {join_words(words)}")]


__all__ = ["Balance", "balanced", "chosen", "described", "make_balance"]
