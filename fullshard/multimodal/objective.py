"""Next-token prediction for models that read more than text: the batch's media go to the model as they are.

Must not know media, data sources, optimizers or FSDP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fullshard.contracts.data import IGNORE
from fullshard.contracts.no_grad import no_grad
from fullshard.contracts.objective import Batch
from fullshard.errors import SetupError
from fullshard.text.next_token import NextToken, TokenModel

if TYPE_CHECKING:
    import torch

MEDIA = "media."
"""The prefix of a batch's keys that go to the model."""


_ALLOWED = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 2e-2}
"""How far a prediction may move by rounding, relative to its norm."""


class MediaNextToken(NextToken):
    """Cross-entropy of the next token, given tokens and media."""

    @no_grad
    def check(self, model: Any, batch: Batch, *, packed: bool, compute: torch.dtype) -> list[str]:
        """With the media of a real batch: documents stay apart, and no learned position sees a later token."""
        lines = super().check(model, batch, packed=packed, compute=compute)
        model.eval()
        first, last = _places(batch)
        allowed = _ALLOWED[str(compute).removeprefix("torch.")]
        plain = self.predictions(model, batch).float()
        moved = self._moved(model, batch, plain, last, seen=batch["labels"] != IGNORE, until=last)
        if moved > allowed:
            raise SetupError(
                f"model: with media, a position that carries a loss sees later tokens: they move its prediction by "
                f"{moved:.1e} (allowed: {allowed:.0e}). Use a causal model."
            )
        lines.append(f"with media, positions do not see later tokens ({moved:.1e})")
        if packed:
            later = batch["position_ids"].diff(dim=1, prepend=batch["position_ids"][:, :1]).lt(0).cumsum(1) > 0
            moved = self._moved(model, batch, plain, first, seen=later, until=None)
            if moved > allowed:
                raise SetupError(
                    f"data.pack: with media, a document in a packed row changes the next one by {moved:.1e} (allowed: "
                    f"{allowed:.0e}): the model does not keep documents apart. Set data.pack: false."
                )
            lines.append(f"with media, documents in a packed row do not see each other ({moved:.1e})")
        return lines

    def _moved(self, model: Any, batch: Batch, plain: Any, places: Any, *, seen: Any, until: Any) -> float:
        """How far another token in one place of each row moves the predictions that are looked at; over all ranks."""
        import torch

        from fullshard.dist.reduce import gather_objects

        ids = batch["input_ids"].clone()
        rows = torch.arange(len(ids), device=ids.device)
        # A row without labels stays: it may hold nothing but a medium.
        other = torch.where(
            (batch["labels"] != IGNORE).any(1), (ids[rows, places] == 0).to(ids.dtype), ids[rows, places]
        )
        ids[rows, places] = other
        changed = self.predictions(model, {**batch, "input_ids": ids}).float()
        if until is not None:
            seen = seen & (torch.arange(ids.shape[1], device=ids.device) < until[:, None])
        apart = (changed - plain).norm(dim=-1) / plain.norm(dim=-1).clamp(min=1e-30)
        return float(max(gather_objects(float(torch.where(seen, apart, 0.0).max()))))

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


def _places(batch: Batch) -> tuple[Any, Any]:
    """The places of the first and of the last token that is learned in each row: never one of a medium."""
    import torch

    learned = (batch["labels"] != IGNORE).int()
    width = learned.shape[1]
    last = width - 1 - learned.flip(1).argmax(1)
    # A label is the token after its position.
    first, last = ((place + 1).clamp(max=width - 1) for place in (learned.argmax(1), last))
    return torch.where(learned.any(1), first, 0), torch.where(learned.any(1), last, 0)


__all__ = ["MediaNextToken"]
