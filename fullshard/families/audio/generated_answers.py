"""Evaluations that compare answers as texts: the model generates them, always with the most likely token.

All ranks share the validation samples, and run every forward pass together. Must not know FSDP or how the model was
trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from fullshard.contracts.data import Features
from fullshard.contracts.evaluation import Evaluation, EvaluationInputs, Findings
from fullshard.contracts.objective import Numbers, Objective
from fullshard.errors import RecipeError
from fullshard.families.audio.error_rates import jiwer
from fullshard.formatting.plural import counted
from fullshard.multimodal.answers import greedy, last_answer, stop_tokens
from fullshard.text.tokens import inner_tokenizer

if TYPE_CHECKING:
    from torch import nn

_WIDTH = 100
"""The most characters of an answer on the console."""


@dataclass(frozen=True)
class Answered:
    """The expected and the generated answer to a validation sample."""

    expected: str
    found: str
    cut: bool
    """Whether the answer ended at the limit."""


class GeneratedAnswers(Evaluation):
    """Generates the last answer of each validation sample."""

    needs_held_out: ClassVar[bool] = True
    needs_tokenizer: ClassVar[bool] = True

    samples: int | None = Field(64, ge=1)
    """Answer this many of the first validation samples; null: all of them."""
    tokens: int | None = Field(None, ge=1)
    """The longest answer that is generated; null: twice as long as the longest expected one."""
    show: int = Field(3, ge=0)
    """Print this many of the answers."""

    def gives(self, objective: Objective, model: nn.Module) -> Numbers | None:
        if not hasattr(objective, "likeliest"):
            raise RecipeError(
                f"evaluate.parts: {self.kind()} needs an objective that predicts tokens, found objective.kind = "
                f"{objective.kind()}. Use objective: audio_lm, or leave {self.kind()} out."
            )
        return self.numbers

    def check(self, objective: Objective, model: nn.Module, held_out: Any) -> None:
        jiwer()

    def measured(self, expected: Sequence[str], found: Sequence[str]) -> dict[str, float]:
        """The numbers of all answers."""
        raise NotImplementedError

    def run(self, inputs: EvaluationInputs) -> Findings:
        answers = answered(inputs, samples=self.samples, tokens=self.tokens)
        if not answers:
            return Findings()
        numbers = self.measured([each.expected for each in answers], [each.found for each in answers])
        lines = [f"  expected: {_line(each.expected)}  answer: {_line(each.found)}" for each in answers[: self.show]]
        cut = sum(each.cut for each in answers)
        head = f"Answers to {counted(len(answers), 'validation sample')}"
        head += f"; {cut:,} did not end within the limit (`tokens` of {self.kind()})" if cut else ""
        return Findings(numbers, ["\n".join([head, *lines])] if lines or cut else [])


def answered(inputs: EvaluationInputs, *, samples: int | None, tokens: int | None) -> list[Answered]:
    """The answers to the first validation samples, the same on every rank."""
    tokenizer, stored = inner_tokenizer(inputs.processor), inputs.held_out
    if stored is None:
        return []
    pairs = list(islice(_asked(stored, inputs.processor), samples))
    if not pairs:
        return []
    expected = [answer for _, answer in pairs]
    ends = stop_tokens(tokenizer, expected)
    limit = tokens or 2 * max(map(len, expected))
    made: dict[int, list[int]] = {}
    for with_clips in (True, False):
        # All ranks run a tower, or none: samples with clips and those without take turns.
        numbers = [at for at, (asked, _) in enumerate(pairs) if bool(len(asked["audio_sizes"])) == with_clips]
        rows = greedy(inputs, [pairs[at][0] for at in numbers], tokens=limit, ends=ends)
        made |= dict(zip(numbers, rows, strict=True))

    def text(row: Sequence[int]) -> str:
        return str(tokenizer.decode(list(row), skip_special_tokens=True)).strip()

    return [Answered(text(row), text(made[at]), made[at][-1] not in ends) for at, row in enumerate(expected)]


def _asked(stored: Any, processor: Any) -> Iterator[tuple[Features, list[int]]]:
    """Samples up to their last answer, and that answer; without those that have a clip after it."""
    for at in stored.chosen:
        sample = stored.store[int(at)]
        asked, answer = last_answer(sample)
        if (sample["input_ids"][len(asked["input_ids"]) :] != processor.audio_token_id).all():
            yield asked, answer


def _line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 4]} ..."


__all__ = ["GeneratedAnswers", "answered"]
