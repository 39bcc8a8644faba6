"""Next-token prediction for models that read more than text: the batch's media go to the model as they are.

Must not know media, data sources, optimizers or FSDP.
"""

from __future__ import annotations

from typing import Any

from fullshard.contracts.model import TokenModel
from fullshard.contracts.objective import Batch
from fullshard.errors import SetupError
from fullshard.text.next_token import NextToken

MEDIA = "media."
"""The prefix of a batch's keys that go to the model."""


class MediaNextToken(NextToken):
    """Cross-entropy of the next token, given tokens and media."""

    def _run(self, model: Any, reduce: Any, batch: Batch) -> Any:
        if not isinstance(model, TokenModel):
            raise SetupError(f"objective.kind = {self.kind()} needs a model with a vision or audio tower: model.kind.")
        media = {key.removeprefix(MEDIA): value for key, value in batch.items() if key.startswith(MEDIA)}
        positions = batch["position_ids"]
        if (own := media.pop("mrope", None)) is not None:
            import torch

            # The first row tells documents apart; the others are time, height and width.
            positions = torch.stack([positions, *own.unbind(-1)])
        inputs = {"input_ids": batch["input_ids"], "position_ids": positions, **media}
        bounds = batch.get("bounds")
        return model.hidden_states_and_head(reduce, **inputs, bounds=bounds, full_logits=self.full_logits)


__all__ = ["MediaNextToken"]
