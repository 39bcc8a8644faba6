"""How many answers the model gets right, token for token; a few are generated and shown with their pictures.

All ranks run every forward pass together. Must not know FSDP or how the model was trained.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from fullshard.contracts.evaluation import EvaluationInputs, Findings
from fullshard.families.vision.shown_answers import Shown, choose, pictures_of, pixels, readable, sheet, table
from fullshard.formatting.plural import counted
from fullshard.multimodal.answers import greedy, last_answer, stop_tokens
from fullshard.multimodal.right_answers import RightAnswers
from fullshard.text.tokens import inner_tokenizer


class Answers(RightAnswers):
    """`answers`: the share of answers of the validation data that are right from the first to the last token."""

    usual_objective: ClassVar[str] = "vision_lm"

    show: int = Field(4, ge=0)
    """Generate answers to this many of the first validation samples with images, and write them with their pictures to
    `pictures/answers-STEP.png` and `.md` in the run folder, and to TensorBoard."""
    show_tokens: int = Field(32, ge=1)
    """The longest answer that is generated to be shown."""

    def run(self, inputs: EvaluationInputs) -> Findings:
        return Findings(super().run(inputs).numbers, self._shown(inputs))

    def _shown(self, inputs: EvaluationInputs) -> list[str]:
        """Generated answers, for the console; their pictures go to the run folder."""
        from fullshard.dist.reduce import place

        tokenizer, image = inner_tokenizer(inputs.processor), getattr(inputs.processor, "image_token_id", None)
        samples = choose(inputs.held_out, self.show, image) if self.show and inputs.held_out else []
        if not samples:
            return []
        asked, expected = zip(*map(last_answer, samples), strict=True)
        made = greedy(inputs, asked, tokens=self.show_tokens, ends=stop_tokens(tokenizer, expected))
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


__all__ = ["Answers"]
