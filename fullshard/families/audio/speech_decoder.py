"""Speech encoder-decoders, such as Whisper, as models of tokens: the decoder's states and its head for the loss.

The encoder reads the clip of each row; the decoder reads the row's tokens. Must not know losses or ranks.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from fullshard.contracts.model import Continuation
from fullshard.hf.architecture.head import Head, HeadRule
from fullshard.hf.generate import generation_settings, up_to_the_end

T = TypeVar("T")


def bind_speech(module: nn.Module) -> dict[str, list[str]]:
    """Gives the module its method `hidden_states_and_head`; returns its towers."""
    model: Any = module
    model.head_rule = HeadRule(whole=False, reason="the decoder's states and one linear layer")
    model.hidden_states_and_head = types.MethodType(_hidden_states_and_head, module)
    encoder, head = model.get_encoder(), model.get_output_embeddings()
    names = {id(part): name for name, part in module.named_modules()}
    return {"language": [names[id(model.get_decoder())], names[id(head)]], "audio": [names[id(encoder)]]}


def _hidden_states_and_head(
    module: Any,
    reduce: Callable[[torch.Tensor, Head | None], T],
    *,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    bounds: torch.Tensor | None = None,
    full_logits: bool = False,
    **media: Any,
) -> T:
    """`reduce(hidden, head)`, or `reduce(logits, None)` with `full_logits` or an adapted head.

    A row is one text from its start, so positions and bounds say nothing new. Without audio the encoder does not run,
    and the decoder sees one empty state: enough to check how logits are made."""
    head = module.get_output_embeddings()
    if not media:
        width = head.in_features
        media = {"encoder_outputs": (torch.zeros(len(input_ids), 1, width, device=input_ids.device),)}
    inputs = {"decoder_input_ids": input_ids, "use_cache": False, **media}
    if full_logits or hasattr(head, "base_layer"):
        return reduce(module.forward(**inputs).logits, None)
    return reduce(module.base_model(**inputs).last_hidden_state, Head(head.weight, head.bias))


@torch.no_grad()
def continue_speech(
    module: nn.Module,
    rows: Sequence[Sequence[int]],
    way: Continuation,
    *,
    source: Path | None,
    device: torch.device,
    in_step: bool,
    media: Mapping[str, torch.Tensor],
) -> list[list[int]]:
    """The decoder's tokens after each row, with a key-value cache. Rows are equally long, and each has its clip."""
    from transformers import GenerationMixin
    from transformers.modeling_outputs import BaseModelOutput

    model: Any = module
    ids = torch.tensor([list(row) for row in rows], device=device)
    inputs = {name: value.to(device) for name, value in media.items()}
    # The encoder runs inside a forward pass, which gathers its weights; generating then reads what it gave.
    heard = model(decoder_input_ids=ids[:, :1], use_cache=False, **inputs).encoder_last_hidden_state
    if way.temperature:
        torch.manual_seed(way.seed)
    # Whisper's own method finds the language and cuts long audio itself; here both are settled.
    given: Any = GenerationMixin.generate(
        model,
        decoder_input_ids=ids,
        encoder_outputs=BaseModelOutput(last_hidden_state=heard),
        generation_config=generation_settings(model, way, source=source),
        synced_gpus=in_step,
    )
    return [up_to_the_end(row, way.ends) for row in given[:, ids.shape[1] :].tolist()]


__all__ = ["bind_speech", "continue_speech"]
