"""How many answers the model gets right, token for token, as greedy decoding would give them.

Greedy decoding gives the expected answer if and only if every one of its tokens is the most likely one after those
before it, so one forward pass is enough. A few answers are generated token by token and shown with their pictures. All
ranks run every forward pass together. Must not know FSDP or how the model was trained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from fullshard.contracts.data import IGNORE
from fullshard.contracts.evaluation import Evaluation, EvaluationInputs, Findings
from fullshard.contracts.no_grad import no_grad
from fullshard.contracts.objective import Numbers, Objective
from fullshard.errors import RecipeError
from fullshard.families.vision.shown_answers import Shown, choose, pictures_of, pixels, readable, sheet, table
from fullshard.formatting.plural import counted
from fullshard.multimodal.answers import greedy, last_answer
from fullshard.text.tokens import inner_tokenizer

if TYPE_CHECKING:
    import torch
    from torch import nn


class Answers(Evaluation):
    """`answers`: the share of answers of the validation data that are right from the first to the last token."""

    numbers: ClassVar[Numbers | None] = {"answers": "max"}
    needs_held_out: ClassVar[bool] = True

    show: int = Field(4, ge=0)
    """Generate answers to this many of the first validation samples with images, and write them with their pictures to
    `pictures/answers-STEP.png` and `.md` in the run folder, and to TensorBoard."""
    show_tokens: int = Field(32, ge=1)
    """The longest answer that is generated to be shown."""

    def gives(self, objective: Objective, model: nn.Module) -> Numbers | None:
        if not hasattr(objective, "likeliest"):
            raise RecipeError(
                f"evaluate.parts: answers needs an objective that predicts tokens, found objective.kind = "
                f"{objective.kind()}. Use objective: vision_lm, or leave answers out."
            )
        return self.numbers

    @no_grad
    def run(self, inputs: EvaluationInputs) -> Findings:
        import torch

        from fullshard.dist.upload import to_device

        found = torch.zeros(2, dtype=torch.float64, device=inputs.device)
        with inputs.bar(inputs.num_batches) as bar:
            for batch in inputs.batches():
                there = to_device(batch, inputs.device)
                predicted = inputs.objective.likeliest(inputs.model, there)  # type: ignore[attr-defined]
                found += _right(predicted, there["labels"])
                bar.advance()
        right, total = inputs.sum_over_ranks(found).tolist()
        return Findings({"answers": right / max(total, 1.0)}, self._shown(inputs))

    def _shown(self, inputs: EvaluationInputs) -> list[str]:
        """Generated answers, for the console; their pictures go to the run folder."""
        from fullshard.dist.reduce import place

        tokenizer, image = inner_tokenizer(inputs.processor), getattr(inputs.processor, "image_token_id", None)
        samples = choose(inputs.held_out, self.show, image) if self.show and inputs.held_out else []
        if not samples:
            return []
        asked, expected = zip(*map(last_answer, samples), strict=True)
        ends = {tokenizer.eos_token_id, *(row[-1] for row in expected if row[-1] in tokenizer.added_tokens_decoder)}
        made = greedy(inputs, asked, tokens=self.show_tokens, ends=ends)
        if place()[1]:
            return []
        said = [
            [readable(row, tokenizer, image) for row in rows]
            for rows in ([a["input_ids"] for a in asked], expected, made)
        ]
        pictures = [pictures_of(sample, getattr(inputs.encoder.settings, "image_root", None)) for sample in samples]
        shown = [Shown(*each) for each in zip(pictures, *said, strict=True)]
        where = (
            f": {inputs.show('answers', pixels(sheet(shown)), columns=1, text=table(shown))}" if any(pictures) else ""
        )
        lines = [f"  {each.question}  expected: {each.expected}  answer: {each.answer}" for each in shown]
        return ["\n".join([f"Answers to {counted(len(shown), 'validation sample')}{where}", *lines])]


def _right(predicted: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """(answers that are right, answers): an answer is a run of positions that are learned."""
    import torch

    learned = labels != IGNORE
    begins = learned & ~torch.nn.functional.pad(learned, (1, 0))[:, :-1]
    # Answers are numbered over all rows; number 0 collects what is not learned.
    number = torch.where(learned, begins.reshape(-1).cumsum(0).reshape(labels.shape), 0)
    wrong = number[learned & (predicted != labels)].unique().numel()
    total = int(begins.sum())
    return torch.tensor([total - wrong, total], dtype=torch.float64, device=labels.device)


__all__ = ["Answers"]
