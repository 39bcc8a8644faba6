"""Answers that a model generates to its own validation samples, always the most likely token, on all ranks together.

With a key-value cache if the family has one; else every token runs the whole row again. Must not know media, files or
how the model was trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from fullshard.contracts.data import IGNORE, Features
from fullshard.contracts.evaluation import EvaluationInputs
from fullshard.contracts.model import Continuation
from fullshard.contracts.no_grad import no_grad
from fullshard.contracts.objective import Batch
from fullshard.multimodal.objective import MEDIA

if TYPE_CHECKING:
    import torch

_PER_TOKEN = ("input_ids", "labels", "position_ids", "mrope", "token_type_ids")
"""Features with an entry for each token; others may be as long by chance."""


def last_answer(sample: Features) -> tuple[Features, list[int]]:
    """A sample up to its last answer, and the tokens of that answer."""
    learned = np.flatnonzero(sample["labels"] != IGNORE)
    # An answer is a run of learned positions; a label is the token after its position.
    begin = learned[np.flatnonzero(np.diff(learned, prepend=-2) > 1)[-1]]
    before = {name: array[: begin + 1] if name in _PER_TOKEN else array for name, array in sample.items()}
    return before, sample["labels"][learned[learned >= begin]].tolist()


def stop_tokens(tokenizer: Any, answers: Sequence[Sequence[int]]) -> set[int]:
    """The tokens that end an answer: the tokenizer's, and special ones with which the chat template ends answers."""
    return {tokenizer.eos_token_id, *(row[-1] for row in answers if row[-1] in tokenizer.added_tokens_decoder)}


@no_grad
def greedy(inputs: EvaluationInputs, prompts: Sequence[Features], *, tokens: int, ends: set[int]) -> list[list[int]]:
    """The continuation of each prompt by up to `tokens` tokens, on every rank; the ranks share the prompts. All prompts
    have media, or all have none, because every rank has to run the same towers."""
    from fullshard.dist import reduce

    ranks, rank = reduce.place()
    found: dict[int, list[int]] = {}
    for first in range(0, len(prompts), ranks):
        number = first + rank
        # A rank without a prompt runs along with the first one.
        made = _continue(inputs, prompts[number if number < len(prompts) else first], tokens=tokens, ends=ends)
        found |= {number: made} if number < len(prompts) else {}
    every = {number: made for part in reduce.gather_objects(found) for number, made in part.items()}
    return [every[number] for number in range(len(prompts))]


def _continue(inputs: EvaluationInputs, prompt: Features, *, tokens: int, ends: set[int]) -> list[int]:
    from fullshard.dist.upload import to_device

    batch = to_device(inputs.collator.collate([prompt], length=None), inputs.device)
    if inputs.family is not None and inputs.family.keeps_cache:
        return _with_cache(inputs, batch, tokens=tokens, ends=ends)
    return _by_whole_rows(inputs, batch, tokens=tokens, ends=ends)


def _with_cache(inputs: EvaluationInputs, batch: Batch, *, tokens: int, ends: set[int]) -> list[int]:
    from fullshard.dist.reduce import place

    media = {name.removeprefix(MEDIA): value for name, value in batch.items() if name.startswith(MEDIA)}
    if media.pop("mrope", None) is not None:
        # Positions in time, height and width are found anew from the places of the media.
        media["mm_token_type_ids"] = (batch["input_ids"] == inputs.processor.image_token_id).long()
    way = Continuation(tokens, temperature=0.0, top_p=1.0, seed=0, ends=frozenset(ends), plain=True)
    with _kernels_for_one_token(inputs.model):
        [made] = inputs.family.continued(
            inputs.model, batch["input_ids"].tolist(), way, device=inputs.device, in_step=place()[0] > 1, media=media
        )
    return list(made)


@contextmanager
def _kernels_for_one_token(model: Any) -> Iterator[None]:
    """Without a kernel that needs packed rows, and without compiled blocks: every token has its own shape."""
    import torch

    from fullshard.hf.architecture.attention import set_attention, use_varlen

    packed = getattr(model, "takes_bounds", False)
    compiled = any(part._compiled_call_impl is not None for part in model.modules())
    if packed:
        set_attention(model, "sdpa")
    try:
        with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
            yield
    finally:
        if packed:
            use_varlen(model)


def _by_whole_rows(inputs: EvaluationInputs, batch: Batch, *, tokens: int, ends: set[int]) -> list[int]:
    from fullshard.dist.reduce import any_rank

    made = list[int]()
    for _ in range(tokens):
        likeliest = int(inputs.objective.next_token_logits(inputs.model, batch)[0].argmax())
        if not (made and made[-1] in ends):
            made.append(likeliest)
            batch = _extended(batch, likeliest, token_type=getattr(inputs.processor, "text_type", 0))
        # Ranks that are done run along until all are.
        if not any_rank(made[-1] not in ends, inputs.device):
            break
    return made


def _extended(batch: Batch, token: int, *, token_type: int) -> Batch:
    """The batch of one row with one more token of text."""
    import torch

    def longer(name: str, new: Any) -> dict[str, torch.Tensor]:
        old = batch.get(name)
        return {} if old is None else {name: torch.cat([old, torch.full_like(old[:, :1], int(new(old)))], dim=1)}

    return {
        **batch,
        **longer("input_ids", lambda _: token),
        **longer("position_ids", lambda old: old[0, -1] + 1),
        # Time, height and width of a text token are one more than the largest before it.
        **longer(f"{MEDIA}mrope", lambda old: old.max() + 1),
        **longer(f"{MEDIA}token_type_ids", lambda _: token_type),
    }


__all__ = ["greedy", "last_answer", "stop_tokens"]
