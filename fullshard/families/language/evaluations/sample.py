"""Continues prompts with the current weights, so that a person can see what the model has learned.

All ranks run every forward pass together. Must not know FSDP or how the model was trained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from fullshard.contracts.evaluation import Evaluation, EvaluationInputs, Findings
from fullshard.contracts.no_grad import no_grad
from fullshard.contracts.objective import Numbers

if TYPE_CHECKING:
    import torch


class Sample(Evaluation):
    """Continues each prompt, token by token."""

    numbers: ClassVar[Numbers | None] = {}
    needs_tokenizer: ClassVar[bool] = True

    prompts: list[str] = Field(["The"], min_length=1)
    """What to continue."""
    tokens: int = Field(60, ge=1)
    """The longest continuation."""
    temperature: float = Field(0.8, ge=0)
    """0 always takes the most likely token."""
    only_at_end: bool = True

    def run(self, inputs: EvaluationInputs) -> Findings:
        import torch

        generator = torch.Generator().manual_seed(0)
        texts = []
        for prompt in self.prompts:
            ids = inputs.processor(prompt, add_special_tokens=False)["input_ids"] or [inputs.processor.eos_token_id]
            ids = self._continue(inputs, list(ids), generator)
            text = inputs.processor.decode(ids, skip_special_tokens=True)
            texts.append(f"Sample continuation of {prompt!r}:\n    " + text.strip().replace("\n", "\n    "))
        return Findings(texts=texts)

    @no_grad
    def _continue(self, inputs: EvaluationInputs, ids: list[int], generator: torch.Generator) -> list[int]:
        import torch

        for _ in range(self.tokens):
            row = torch.tensor([ids], device=inputs.device)
            batch = {"input_ids": row, "position_ids": torch.arange(len(ids), device=inputs.device)[None]}
            logits = inputs.objective.next_token_logits(inputs.model, batch)[0].float().cpu()
            if self.temperature == 0:
                chosen = logits.argmax()
            else:
                chosen = torch.multinomial(torch.softmax(logits / self.temperature, -1), 1, generator=generator)[0]
            ids.append(int(chosen))
            if ids[-1] == inputs.processor.eos_token_id:
                break
        return ids


__all__ = ["Sample"]
