"""Averaged weights: their settings, and evaluations of the average, of the trained weights, or of both.

Must not know how the average is kept, nor import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from pydantic import Field

from fullshard.config.part import Section
from fullshard.contracts.evaluation import Evaluation, EvaluationInputs, Findings
from fullshard.contracts.objective import Numbers

PREFIX = "ema_"
"""Prefix of the numbers and pictures of averaged weights if the trained weights are evaluated too."""


class Ema(Section):
    """An exponential moving average of the weights, kept in fp32 and sharded like them."""

    decay: float = Field(0.9999, ge=0, lt=1)
    """Share of the average that each update keeps; 0.9999 averages over about the last 10,000 updates."""
    warmup: bool = True
    """Start with a smaller decay, at most n / (n + 9) at update n, so that the first weights are soon forgotten."""
    evaluate: Literal["ema", "model", "both"] = "ema"
    """Which weights are validated: the average, the trained ones (model), or both, the average's as ema_."""

    @classmethod
    def from_short(cls, value: Any) -> Any:
        if value is True:
            return {}
        return {"decay": value} if isinstance(value, (int, float)) and value is not False else value

    def decay_at(self, update: int) -> float:
        """The share of the average that an update keeps, counted from 1: nothing at the first."""
        if update <= 1:
            return 0.0
        return min(self.decay, update / (update + 9)) if self.warmup else self.decay

    def names(self, numbers: Numbers) -> Numbers:
        """The names of validation numbers; those of averaged weights keep their direction."""
        averaged = {f"{PREFIX}{name}": mode for name, mode in numbers.items()}
        return {**numbers, **averaged} if self.evaluate == "both" else numbers

    def describe(self, *, evaluated: bool) -> str:
        """How the average is kept, and whose weights are validated, if any are."""
        held = f"decay {self.decay:g}" + (", warmed up" if self.warmup else "")
        seen = {"ema": "the average is", "model": "the trained weights are", "both": "the average and the weights are"}
        return f"{held}; {seen[self.evaluate]} validated" if evaluated else held


class AveragedWeights(Protocol):
    """The average of a model's weights, as a run keeps it."""

    settings: Ema

    def in_place(self) -> AbstractContextManager[None]:
        """The model computes with averaged weights inside."""


@dataclass(frozen=True)
class OfAverage:
    """An evaluation that runs on averaged weights."""

    evaluation: Evaluation
    average: AveragedWeights
    prefix: str

    @property
    def only_at_end(self) -> bool:
        return self.evaluation.only_at_end

    def kind(self) -> str:
        return self.evaluation.kind()

    def run(self, inputs: EvaluationInputs) -> Findings:
        """What the evaluation finds, with the prefix."""

        def show(name: str, *args: Any, **settings: Any) -> Any:
            return inputs.show(f"{self.prefix}{name}", *args, **settings)

        with self.average.in_place():
            found = self.evaluation.run(replace(inputs, show=show))
        return Findings({f"{self.prefix}{name}": value for name, value in found.numbers.items()}, found.texts)


def evaluations(parts: Sequence[Evaluation], average: AveragedWeights | None) -> list[Any]:
    """The evaluations that the loop runs, on the weights that the settings choose."""
    if average is None or average.settings.evaluate == "model":
        return list(parts)
    averaged = [OfAverage(part, average, PREFIX if average.settings.evaluate == "both" else "") for part in parts]
    return averaged if average.settings.evaluate == "ema" else [*parts, *averaged]
