"""A small encoder, uneven samples with hard negatives, and the gradients of one step: sharded, and in plain PyTorch."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fullshard.config.part import decode
from fullshard.contracts.model import Family
from fullshard.contracts.objective import Objective
from fullshard.data.order import rank_slices
from fullshard.dist import values
from fullshard.dist.gradients import one_by_one
from fullshard.dist.mesh import choose_layout, make_mesh
from fullshard.dist.shard import ShardPlan, shard
from fullshard.dist.world import join
from fullshard.dist.wrap import find_blocks
from fullshard.families.embedding.batching.chunks import Chunk, Texts, cut, inputs
from fullshard.families.embedding.encoders.pairs import PairCollator, Pairs
from fullshard.families.embedding.objectives.contrastive import Contrastive

SAMPLES = 5  # no number of ranks divides it: the last place of a step is a filler
VOCABULARY = 60


def encoder_folder(folder: Path, *, dropout: float = 0.0, seed: int = 3) -> Path:
    """A tiny BERT with fixed random weights, saved by Transformers."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        initializer_range=0.4,
    )
    BertModel(config).save_pretrained(folder)
    return folder


def samples(texts: int | None = None) -> list[dict[str, np.ndarray]]:
    """Two or three hard negatives each, or as many `texts` in all; very different lengths, some labels equal."""
    draw = random.Random(5)
    found = []
    for index in range(SAMPLES):
        lengths = [draw.randrange(1, 9) for _ in range(texts or 4 + index % 2)]
        tokens = [draw.randrange(VOCABULARY) for _ in range(sum(lengths))]
        found.append(
            {
                "tokens": np.array(tokens, dtype=np.int32),
                "lengths": np.array(lengths, dtype=np.int32),
                "label": np.array([index % 4 / 4.0]),
            }
        )
    return found


def batches(rank: int, world: int, per_device: int, texts: int | None = None) -> list[dict[str, Any]]:
    """The micro-batches of one rank, as the loader gives them."""
    collator, all_samples, found = PairCollator(Pairs()), samples(texts), []
    for places in rank_slices(np.arange(SAMPLES), per_device=per_device, rank=rank, world=world):
        real = [all_samples[index] for index in places if index >= 0]
        rows = real + [collator.blank((real or all_samples)[0])] * (len(places) - len(real))
        ids = [index for index in places if index >= 0] + [-1] * (len(places) - len(real))
        found.append({**collator.collate(rows, length=None), "sample_ids": torch.tensor(ids)})
    return found


def build(model: dict[str, Any], objective: Contrastive, *, packed: bool) -> tuple[nn.Module, nn.Module]:
    """The model sharded over the ranks, and the same values in a plain module."""
    world = join(device="cpu", backend="gloo", timeout_s=60)
    family = decode(Family, model, where="model")
    modules = []
    for _ in range(2):
        module = family.build(processor=None)
        objective.extend(module)
        modules.append(module)
    sharded, plain = modules
    layout = choose_layout("full", world, state_bytes=0)
    plan = ShardPlan(find_blocks(sharded, hints=family.blocks(sharded)), layout, torch.float32)
    weights = family.weights(sharded)
    mesh = make_mesh(layout, world)
    shard(sharded, plan, mesh, family=family, weights=weights, device=world.device, seed=0)
    plain.to_empty(device="cpu")
    own = dict(sharded.named_parameters())
    draw = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            full: Any = own[name]
            if "lora_B" in name:  # fresh ones are zero, and would leave the other half without a gradient
                full.to_local().copy_(torch.randn(full.shape, generator=draw)[slice(*values.rows_of(full))] * 0.3)
            parameter.copy_(values.whole(full))
        fresh = decode(Family, model, where="model").build(processor=None)
        for (_, buffer), (_, right) in zip(plain.named_buffers(), fresh.named_buffers(), strict=True):
            buffer.copy_(right)
    for module in (sharded, plain):
        module.packs = packed  # type: ignore[assignment]
        module.train()
    return sharded, plain


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            gradient: Any = parameter.grad
            found[name] = values.whole(gradient) if hasattr(gradient, "to_local") else gradient.clone()
    module.zero_grad(set_to_none=True)
    return found


def reference(
    module: Any, objective: Contrastive, world: int, per_device: int, teacher: Any = None
) -> tuple[float, dict[str, torch.Tensor]]:
    """One process, every text embedded once with gradients, one loss over all samples, one backward pass.

    Ranks and chunks are gone through in turn only to draw the random numbers of dropout as they do."""
    parts, vectors = [], []
    scalars = None
    cache = objective.cache
    for rank in range(world):
        texts = Texts.of(batches(rank, world, per_device))
        torch.manual_seed(100 + rank)
        found = []
        chunks = cut(texts, size=cache.chunk if cache else None, tokens=cache.tokens if cache else None)
        for chunk in chunks:
            given = inputs(texts, chunk, packed=module.packs, pad=0)
            rows, scalars = module.embed(**given, tokens=objective.similarity.tokens)
            found += list(rows.split(texts.lengths[chunk.texts].tolist()) if objective.similarity.tokens else rows)
        order = np.argsort(np.concatenate([chunk.texts for chunk in chunks]))
        vectors.append([found[place] for place in order])
        parts.append(texts)
    embedded = whole_step(parts, vectors, scalars, objective)
    if teacher is not None:
        with torch.no_grad():
            rows = [inputs(t, Chunk(np.arange(len(t.lengths))), packed=False, pad=0) for t in parts]
            taught = whole_step(parts, [list(teacher.embed(**given)[0]) for given in rows], None, objective)
        names = ("queries", "positives", "negatives")
        embedded = replace(embedded, **{f"teacher_{name}": getattr(taught, name) for name in names})
    loss = objective._reduced(embedded) / SAMPLES
    loss.backward()
    return float(loss.detach()), gradients(module)


def whole_step(parts: list[Texts], vectors: list[Any], scalars: Any, objective: Contrastive) -> Any:
    """The samples of all ranks, one after the other, as one rank would see them."""
    from fullshard.similarity.base import Embedded

    most = max(int(texts.per_sample.max()) for texts in parts) - 2
    longest = max(int(texts.lengths.max()) for texts in parts)
    tokens = objective.similarity.tokens

    def room(vector: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(vector, (0, 0, 0, longest - len(vector))) if tokens else vector

    rows: dict[str, list[Any]] = {name: [] for name in ("q", "p", "n", "has", "real", "label", "pk", "nk", "len")}
    for texts, found in zip(parts, vectors, strict=True):
        for sample, first in enumerate(texts.firsts):
            count = int(texts.per_sample[sample]) - 2
            negatives = [room(found[first + 2 + n]) for n in range(count)]
            rows["q"].append(room(found[first]))
            rows["p"].append(room(found[first + 1]))
            rows["n"].append(torch.stack(negatives + [torch.zeros_like(rows["q"][-1])] * (most - count)))
            rows["has"].append(torch.arange(most) < count)
            rows["real"].append(texts.real[sample])
            rows["label"].append(texts.labels[sample])
            rows["pk"].append(texts.keys[first + 1])
            rows["nk"].append(torch.cat([texts.keys[first + 2 : first + 2 + count], torch.zeros(most - count).long()]))
            rows["len"].append(torch.tensor([*texts.lengths[first : first + 2 + count], *[0] * (most - count)]))
    made = {name: torch.stack(each) for name, each in rows.items()}
    masks = torch.arange(longest) < made["len"][..., None]
    names = objective.similarity.learned()
    return Embedded(
        queries=made["q"],
        positives=made["p"],
        negatives=made["n"],
        has_negative=made["has"],
        real=made["real"],
        own=slice(0, len(made["q"])),
        labels=made["label"],
        positive_keys=made["pk"],
        negative_keys=made["nk"],
        scalars=dict(zip(names, scalars, strict=True)) if scalars is not None else {},
        query_tokens=masks[:, 0] if tokens else None,
        positive_tokens=masks[:, 1] if tokens else None,
        negative_tokens=masks[:, 2:] if tokens else None,
    )


def step(
    module: nn.Module, objective: Contrastive, rank: int, world: int, per_device: int, texts: int | None = None
) -> tuple[float, Any]:
    """One sharded step, as train_step runs it; the loss over all ranks and whole gradients."""
    from fullshard.dist import reduce

    mine = batches(rank, world, per_device, texts)
    total = torch.tensor(float(SAMPLES))
    torch.manual_seed(100 + rank)
    terms = objective.backward(module, one_by_one(module, mine), total, {}, lambda loss: loss)
    loss = reduce.sum_over_ranks(terms[0].loss_sum.clone()) / total
    return float(loss), gradients(module)


def apart(
    folder: Path, losses: list[dict[str, Any]], caches: list[Any], *, lora: bool, packed: bool
) -> dict[str, float]:
    """For every loss, dimension and cache: the largest distance of a gradient or the loss from the plain one."""
    import os

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    per_device = {1: 5, 2: 2, 4: 2}[world]
    model = {"kind": "sentence_transformer", "path": str(folder), "lora": 4 if lora else None}
    found = {}
    for loss in losses:
        sharded = plain = None
        for matryoshka in (None, [16, 8, 4]):
            for cache in caches:
                settings = {"kind": "contrastive", "loss": loss, "matryoshka": matryoshka, "cache": cache}
                objective: Any = decode(Objective, settings, where="objective")
                if sharded is None or plain is None:
                    sharded, plain = build(model, objective, packed=packed)
                value, ours = step(sharded, objective, rank, world, per_device)
                right, theirs = reference(plain, objective, world, per_device)
                assert ours.keys() == theirs.keys() != set()
                scale = max(float(g.abs().max()) for g in theirs.values())
                distance = max(float((ours[n] - theirs[n]).abs().max()) for n in ours) / scale
                found[f"{loss['kind']} {matryoshka} {cache}"] = max(distance, abs(value / right - 1))
    return found


def steps_of(folder: Path, settings: list[dict[str, Any]], texts: int) -> list[tuple[float, Any]]:
    """One sharded step for each objective: loss and gradients, by the names of plain Transformers."""
    import os

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found = []
    for each in settings:
        objective: Any = decode(Objective, {"kind": "contrastive", **each}, where="objective")
        sharded, _ = build({"kind": "sentence_transformer", "path": str(folder)}, objective, packed=True)
        found.append(step(sharded, objective, rank, world, 2, texts))
    return found
