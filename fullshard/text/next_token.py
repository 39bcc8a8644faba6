"""Next-token prediction: pre-training and supervised fine-tuning; the labels say which positions count.

The loss works on hidden states and the head, so full logits never exist. Must not know data sources, optimizers, FSDP.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from fullshard.contracts.data import IGNORE
from fullshard.contracts.no_grad import no_grad
from fullshard.contracts.objective import Batch, Numbers, Objective, Terms
from fullshard.errors import SetupError
from fullshard.text.document_bounds import document_bounds

if TYPE_CHECKING:
    import torch
    from torch import nn

TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
"""How far two ways of computing the same logits may differ, relative to the largest."""


@runtime_checkable
class TokenModel(Protocol):
    """A module that hands hidden states and its head to a loss, so that full logits never exist."""

    def hidden_states_and_head(self, reduce: Any, **inputs: Any) -> Any:
        """`reduce(hidden_states, head)`, called inside the forward pass."""


class NextToken(Objective):
    """Cross-entropy of the next token; `labels[i]` is the target of position i."""

    needs: ClassVar[tuple[str, ...]] = ("input_ids", "position_ids", "labels")
    numbers: ClassVar[Numbers | None] = {"loss": "min", "accuracy": "max", "perplexity": "min"}

    full_logits: bool = False
    """Use the model's own full logits: slower, with more memory, for heads that are more than a matrix product."""

    def count(self, batch: Batch) -> int:
        return int((batch["labels"] != IGNORE).sum())

    def loss(self, model: nn.Module, batch: Batch, aux: dict[str, nn.Module]) -> Terms:
        import torch

        from fullshard.text.linear_cross_entropy import linear_cross_entropy

        targets = batch["labels"].reshape(-1)

        def reduce(hidden: torch.Tensor, head: Any) -> tuple[torch.Tensor, torch.Tensor]:
            if head is None or head.weight is None:
                return _plain_cross_entropy(_logits(hidden, head).reshape(len(targets), -1), targets)
            return linear_cross_entropy(
                hidden.reshape(len(targets), -1),
                head.weight,
                targets,
                bias=head.bias,
                scale=head.scale,
                softcap=head.softcap,
            )

        loss, correct = self._run(model, reduce, batch)
        count = (targets != IGNORE).sum()
        return Terms(loss, {} if torch.is_grad_enabled() else {"accuracy": (correct, count)})

    def _run(self, model: Any, reduce: Any, batch: Batch) -> Any:
        inputs = {key: batch[key] for key in ("input_ids", "position_ids")}
        if isinstance(model, TokenModel):
            bounds = batch.get("bounds")
            return model.hidden_states_and_head(reduce, **inputs, bounds=bounds, full_logits=self.full_logits)
        output = model(**inputs)
        return reduce(getattr(output, "logits", output), None)

    def next_token_logits(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """(rows, vocabulary) of what may follow each row."""
        import torch

        bounds = document_bounds(batch["position_ids"].cpu()).to(batch["input_ids"].device)
        with torch.compiler.set_stance("force_eager"):  # every call has another length
            last: torch.Tensor = self._run(model, lambda h, head: _logits(h[:, -1], head), {**batch, "bounds": bounds})
        return last

    def derived(self, numbers: dict[str, float]) -> dict[str, float]:
        """Perplexity follows from the loss."""
        return {"perplexity": math.exp(min(numbers["loss"], 80.0))}

    def predictions(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        found: torch.Tensor = self._run(model, _logits, batch)
        return found

    def likeliest(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """(rows, positions): the most likely token where a label counts, and IGNORE elsewhere."""
        import torch

        labels = batch["labels"]

        def reduce(hidden: torch.Tensor, head: Any) -> torch.Tensor:
            found = torch.full_like(labels, IGNORE)
            learned = labels != IGNORE
            found[learned] = torch.cat([_logits(part, head).argmax(-1) for part in hidden[learned].split(1024)])
            return found

        found: torch.Tensor = self._run(model, reduce, batch)
        return found

    @no_grad
    def check(self, model: Any, batch: Batch, *, packed: bool, compute: torch.dtype) -> list[str]:
        """The head path gives the model's own logits."""
        import torch

        hands_over_head: bool = isinstance(model, TokenModel)
        if self.full_logits or not hands_over_head:
            return []
        ids = batch["input_ids"].reshape(-1).repeat(16)[None, :16]
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        row = {"input_ids": ids, "position_ids": positions, "bounds": document_bounds(positions.cpu()).to(ids.device)}
        model.eval()
        with torch.compiler.set_stance("force_eager"):
            own = model.hidden_states_and_head(_logits, **row, full_logits=True)
            return [_check_head(self.predictions(model, row), own, compute)]


def _logits(hidden: torch.Tensor, head: Any) -> torch.Tensor:
    return hidden if head is None else head.logits(hidden)


def _check_head(ours: torch.Tensor, own: torch.Tensor, compute: torch.dtype) -> str:
    from fullshard.dist.reduce import gather_objects

    # The maximum over ranks, so that all of them stop.
    apart = max(gather_objects(float((ours - own).abs().max() / own.abs().max().clamp(min=1e-6))))
    allowed = TOLERANCE[str(compute).removeprefix("torch.")]
    if not apart <= allowed:
        raise SetupError(
            f"The loss from hidden states and head differs from that of the model's own logits by {apart:.1e} "
            f"(allowed: {allowed:.0e}). Its head does more than a matrix product: set objective.full_logits: true."
        )
    return f"the chunked loss agrees with the model's own logits ({apart:.1e})"


def _plain_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from torch import nn

    loss = nn.functional.cross_entropy(logits.float(), targets, ignore_index=IGNORE, reduction="sum")
    return loss, ((logits.argmax(-1) == targets) & (targets != IGNORE)).sum().float()


__all__ = ["NextToken"]
