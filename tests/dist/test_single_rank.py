"""One rank alone casts a unit's parameters together and leaves gradients in their place: the same numbers as by FSDP's
own way, to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fullshard.dist import single_rank
from tests.dist.sharded_model import half, spread, tokens
from tests.ranks import RankPool


def losses(settings: dict[str, Any], compute: torch.dtype, *, together: bool) -> tuple[list[float], list[int]]:
    """Of a few steps, and how many parameters were cast in each call."""
    cast, counts = single_rank._cast, []

    def counted(parameters: list[Any]) -> None:
        counts.append(len(parameters))
        cast(parameters)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(single_rank, "_cast", counted)
        if not together:
            patch.setattr(single_rank, "save_passes", lambda units: None)
        module, _, _ = spread(settings, compute)
        trained = [p for p in module.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        found = []
        for _ in range(3):
            for _ in range(2):  # gradients of a second micro-batch are added to those of the first
                loss = module(input_ids=tokens(64)).logits.square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    return found, counts


MODELS = {
    "full": {"architecture": "qwen3", "size": "tiny"},
    "lora": {"architecture": "qwen3", "size": "tiny", "lora": True},
}


@half
@pytest.mark.parametrize("model", MODELS)
def test_casting_together_changes_no_bit(ranks: RankPool, model: str, compute: torch.dtype) -> None:
    [(expected, none)] = ranks.run(losses, MODELS[model], compute, world=1, together=False)
    [(found, counts)] = ranks.run(losses, MODELS[model], compute, world=1, together=True)
    assert found == expected
    assert len(set(found)) == 3, "the steps must change something"
    assert not none
    assert max(counts) > 8, "a block's parameters go together"


def test_memory_for_a_reduction_is_taken_once() -> None:
    reduction, options = single_rank._InPlace(), {"dtype": torch.float32, "device": torch.device("cpu")}
    given = [reduction.allocate((4,), **options) for _ in range(4)]
    assert given[0] is given[1]
    assert given[2] is given[3]
    assert given[1] is not given[2], "the first still holds gradients"
    del given
    reduction.allocate((4,), **options)  # and the pass broke off
    begun = reduction.allocate((4,), **options)
    assert reduction.allocate((4,), **options) is begun


def test_with_two_ranks_fsdp_is_left_alone(ranks: RankPool) -> None:
    for _, counts in ranks.run(losses, MODELS["full"], torch.bfloat16, world=2, together=True):
        assert not counts


def test_without_the_private_names_fsdp_is_left_alone(ranks: RankPool) -> None:
    [(found, counts)] = ranks.run(without_names, world=1)
    assert found
    assert not counts


def without_names() -> tuple[list[float], list[int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(single_rank, "_NAMES", ((single_rank.FSDPParamGroup, "a_name_that_torch_does_not_have"),))
        return losses(MODELS["full"], torch.bfloat16, together=True)
