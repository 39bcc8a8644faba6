"""How often the next action on a desktop is predicted, by its type, beside always giving the most frequent one.

Each token is predicted after the true tokens before it. Keys, buttons and the direction of a movement are compared, not
the exact time or distance. All ranks run every forward pass together. Must not know FSDP or how the model was trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from fullshard.contracts.data import IGNORE
from fullshard.contracts.evaluation import Evaluation, EvaluationInputs, Findings
from fullshard.contracts.no_grad import no_grad
from fullshard.contracts.objective import Numbers, Objective
from fullshard.errors import RecipeError
from fullshard.families.vision.desktop.actions import Meaning, accuracy, baseline, meaning_of_text
from fullshard.families.vision.desktop.formats import FORMATS
from fullshard.families.vision.desktop.token_format import EVENT_END

if TYPE_CHECKING:
    import torch
    from torch import nn

TYPES = ("key", "button", "movement", "scroll")


class Actions(Evaluation):
    """`actions`, `actions_key`, ...: shares of predicted actions; `actions_baseline`: of the most frequent ones."""

    numbers: ClassVar[Numbers | None] = {
        "actions": "max",
        "actions_baseline": "max",
        **{f"actions_{name}": "max" for name in TYPES},
    }
    needs_held_out: ClassVar[bool] = True

    def check_encoder(self, objective: Objective, model: nn.Module, encoder: Any) -> None:
        if not hasattr(encoder, "format") or not hasattr(objective, "likeliest"):
            raise RecipeError(
                "evaluate.parts: actions needs recordings of a desktop, found data.encode.kind = "
                f"{encoder.kind()}. Use data.encode: desktop with objective: vision_lm, or leave actions out."
            )

    @no_grad
    def run(self, inputs: EvaluationInputs) -> Findings:
        from fullshard.dist.reduce import gather_objects
        from fullshard.dist.upload import to_device

        pairs: list[tuple[Meaning | None, Meaning | None]] = []
        with inputs.bar(inputs.num_batches) as bar:
            for batch in inputs.batches():
                objective: Any = inputs.objective
                predicted = objective.likeliest(inputs.model, to_device(batch, inputs.device))
                pairs += _compared(batch["labels"], predicted.cpu(), inputs)
                bar.advance()
        every = [pair for part in gather_objects(pairs) for pair in part if pair[0] is not None]
        expected, found = [pair[0] for pair in every], [pair[1] for pair in every]
        scores, usual = accuracy(expected, found), baseline(expected, expected)
        numbers = {f"actions_{name}": scores[name].share for name in TYPES if name in scores}
        return Findings({"actions": scores["all"].share, "actions_baseline": usual["all"].share, **numbers})


def _compared(
    labels: torch.Tensor, predicted: torch.Tensor, inputs: EvaluationInputs
) -> Iterator[tuple[Meaning | None, Meaning | None]]:
    """The meaning of each action in the labels, and of the tokens predicted in its place."""
    tokenizer, form = inputs.processor.tokenizer, FORMATS[inputs.encoder.settings.format]
    end = tokenizer.convert_tokens_to_ids(EVENT_END)

    def meaning(tokens: list[int]) -> Meaning | None:
        text = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return meaning_of_text(text, form)

    for row, guess in zip(labels.tolist(), predicted.tolist(), strict=True):
        true: list[int] = []
        said: list[int] = []
        for token, other in zip(row, guess, strict=True):
            if token != IGNORE:
                true.append(token)
                said.append(other)
                if token == end:
                    yield meaning(true), meaning(said)
                    true, said = [], []


__all__ = ["Actions"]
