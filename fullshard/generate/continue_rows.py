"""Rows of tokens continued on all ranks: each rank takes its share, and all run as many forward passes.

Must not know options, files or texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fullshard.contracts.model import Continuation, Family
from fullshard.contracts.objective import Objective
from fullshard.contracts.world import World
from fullshard.dist import reduce
from fullshard.multimodal.prompts import Row


def continue_rows(
    rows: Sequence[Row],
    way: Continuation,
    *,
    family: Family,
    objective: Objective,
    module: nn.Module,
    world: World,
    batch_size: int,
    tick: Callable[[], Any],
) -> list[list[int]]:
    """What follows each row, on every rank. Drawn tokens follow from the seed and the number of the row alone, so rows
    with a temperature go one at a time."""
    found: dict[int, list[int]] = {}
    for turn in turns(rows, 1 if way.temperature else batch_size, world.size):
        own = turn[world.rank]
        # A rank without rows left runs along with the first one: all ranks have as many.
        numbers = [*own, *turn[0][:1] * (len(turn[0]) - len(own))]
        some, media = [rows[number].tokens for number in numbers], rows[numbers[0]].media
        drawn = replace(way, seed=way.seed * 1_000_003 + numbers[0])
        made = family.continued(module, some, drawn, device=world.device, in_step=world.size > 1, media=media)
        if made is None:
            made = _by_logits(objective, module, some, drawn, device=world.device)
        found |= dict(zip(own, made, strict=False))
        tick()
    everything = {number: row for part in reduce.gather_objects(found) for number, row in part.items()}
    return [everything[number] for number in range(len(rows))]


def turns(rows: Sequence[Row], size: int, ranks: int) -> list[list[list[int]]]:
    """The numbers of the rows that each rank continues at once, for each turn. Rows with media go one at a time, and
    never beside rows without: all ranks run a tower, or none."""
    found = []
    for media, most in ((True, ranks), (False, size * ranks)):
        numbers = [number for number, row in enumerate(rows) if bool(row.media) == media]
        parts = [numbers[start : start + most] for start in range(0, len(numbers), most)]
        found += [[part[rank::ranks] for rank in range(ranks)] for part in parts]
    return found


@torch.no_grad()
def _by_logits(
    objective: Objective, module: nn.Module, rows: Sequence[list[int]], way: Continuation, *, device: torch.device
) -> list[list[int]]:
    """Token by token, the whole row again for each: for models that keep no keys and values."""
    made: list[list[int]] = []
    for row in rows:
        generator, ids = torch.Generator().manual_seed(way.seed), list(row)
        for _ in range(way.tokens):
            batch = {
                "input_ids": torch.tensor([ids], device=device),
                "position_ids": torch.arange(len(ids), device=device)[None],
            }
            logits = objective.next_token_logits(module, batch)[0].float().cpu()
            done = len(ids) > len(row) and ids[-1] in way.ends
            if not done:
                ids.append(_chosen(logits, way, generator))
            # Ranks that are done run along until all are.
            if not reduce.any_rank(ids[-1] not in way.ends, device):
                break
        made.append(ids[len(row) :])
    return made


def _chosen(logits: torch.Tensor, way: Continuation, generator: torch.Generator) -> int:
    if not way.temperature:
        return int(logits.argmax())
    shares, order = torch.softmax(logits / way.temperature, -1).sort(descending=True)
    # The fewest tokens that together have top_p.
    shares[shares.cumsum(-1) - shares >= way.top_p] = 0
    return int(order[torch.multinomial(shares, 1, generator=generator)])
