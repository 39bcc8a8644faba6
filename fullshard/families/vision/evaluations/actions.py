"""The accuracy of predicted desktop actions by type, next to the frequency baseline.

Each token is predicted after the true tokens before it. Keys, buttons and the direction of a movement are compared, not
the exact time or distance. All ranks run every forward pass together. Must not know FSDP or how the model was trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from fullshard.contracts.data import IGNORE
from fullshard.contracts.evaluation import Evaluation, EvaluationInputs, Findings
from fullshard.contracts.no_grad import no_grad
from fullshard.contracts.objective import Numbers, Objective
from fullshard.errors import RecipeError
from fullshard.families.vision.desktop.actions import ALL, Meaning, accuracy, baseline, meaning_of_text, pointer_in
from fullshard.families.vision.desktop.events import Mouse
from fullshard.families.vision.desktop.formats import FORMATS
from fullshard.families.vision.desktop.token_format import EVENT_END

if TYPE_CHECKING:
    import torch
    from torch import nn

TYPES = ("key", "button", "movement", "scroll")


class Actions(Evaluation):
    """`actions`, `actions_key`, ...: the share of actions that are predicted right; `actions_baseline`,
    `actions_key_baseline`, ...: the share that always giving the most frequent one gets."""

    numbers: ClassVar[Numbers | None] = {
        f"actions{of_type}{baseline}": "max"
        for of_type in ("", *(f"_{name}" for name in TYPES))
        for baseline in ("", "_baseline")
    }
    needs_held_out: ClassVar[bool] = True

    def check_encoder(self, objective: Objective, model: nn.Module, encoder: Any) -> None:
        if not hasattr(encoder, "format") or not hasattr(objective, "likeliest"):
            raise RecipeError(
                "evaluate.parts: actions needs recordings of a desktop, found data.encode.kind = "
                f"{encoder.kind()}. Use data.encode: desktop with objective: vision_lm, or remove actions."
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
                pairs += _compared(batch, predicted.cpu(), inputs)
                bar.advance()
        every = [pair for part in gather_objects(pairs) for pair in part if pair[0] is not None]
        expected, found = [pair[0] for pair in every], [pair[1] for pair in every]
        scores = {"": accuracy(expected, found), "_baseline": baseline(expected, expected)}
        numbers = {
            f"actions_{name}{suffix}".replace("_all", ""): of_type[name].share
            for name in (ALL, *TYPES)
            for suffix, of_type in scores.items()
            if name in of_type
        }
        return Findings(numbers)


def _compared(
    batch: Mapping[str, Any], predicted: torch.Tensor, inputs: EvaluationInputs
) -> Iterator[tuple[Meaning | None, Meaning | None]]:
    """The meaning of each action in the labels, and of the tokens predicted in its place."""
    tokenizer, form = inputs.processor.tokenizer, FORMATS[inputs.encoder.settings.format]
    end = tokenizer.convert_tokens_to_ids(EVENT_END)

    def text_of(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    for row, places, guess in zip(
        *(t.tolist() for t in (batch["labels"], batch["position_ids"], predicted)), strict=True
    ):
        true: list[int] = []
        said: list[int] = []
        last: Mouse | None = None
        for token, place, other in zip(row, places, guess, strict=True):
            last = last if place else None  # another document of the row
            if token != IGNORE:
                true.append(token)
                said.append(other)
                if token == end:
                    text = text_of(true)
                    yield meaning_of_text(text, form, last=last), meaning_of_text(text_of(said), form, last=last)
                    last = pointer_in(text, form) or last
                    true, said = [], []


__all__ = ["Actions"]
