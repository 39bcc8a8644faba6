"""Averaged weights: their settings, and evaluations that look at them instead of the trained ones, or at both.

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
"""Of the numbers and pictures of averaged weights, if the trained ones are evaluated too."""


class Ema(Section):
    """An exponential moving average of the weights, kept in fp32 and sharded like them."""

    decay: float = Field(0.9999, ge=0, lt=1)
    """How much of the average stays at each update; 0.9999 remembers about the last 10,000."""
    warmup: bool = True
    """Begin with less: at update n at most n / (n + 9), so that the first weights are soon forgotten."""
    evaluate: Literal["ema", "model", "both"] = "ema"
    """Whose validation numbers and pictures: of the average, of the trained weights, or both, the average's as ema_."""

    @classmethod
    def from_short(cls, value: Any) -> Any:
        if value is True:
            return {}
        return {"decay": value} if isinstance(value, (int, float)) and value is not False else value

    def decay_at(self, update: int) -> float:
        """What stays of the average at an update, counted from 1: nothing at the first."""
        if update <= 1:
            return 0.0
        return min(self.decay, update / (update + 9)) if self.warmup else self.decay

    def names(self, numbers: Numbers) -> Numbers:
        """What validation numbers are called; those of averaged weights are better in the same direction."""
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
    """An evaluation as the loop runs it, of averaged weights."""

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
    """What the loop runs, of the weights that the settings name."""
    if average is None or average.settings.evaluate == "model":
        return list(parts)
    averaged = [OfAverage(part, average, PREFIX if average.settings.evaluate == "both" else "") for part in parts]
    return averaged if average.settings.evaluate == "ema" else [*parts, *averaged]
