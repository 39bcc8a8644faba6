"""Gives a sharded module its values: each rank reads or makes only what it keeps, one unit at a time.

No rank ever holds the whole model. Fresh values are drawn per unit from (seed, unit name), so they do not depend on the
number of ranks. Must not know file formats, model classes or losses.
"""

from __future__ import annotations

import hashlib
import zlib

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.contracts.model import Family, Weights
from fullshard.dist import reduce
from fullshard.dist.agreement import differences, some
from fullshard.dist.gradients import checksums
from fullshard.errors import CheckpointError, SetupError


def materialise(
    module: nn.Module, ties: list[list[str]], *, parameters_on: torch.device, buffers_on: torch.device
) -> None:
    """Allocates this rank's slices, filled with NaN so that a value never set shows; moves buffers without casting."""

    def allocate(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor.to(buffers_on)
        real = torch.empty_like(tensor, device=parameters_on)
        (real.to_local() if isinstance(real, DTensor) else real).fill_(float("nan"))
        return real

    module._apply(allocate)
    tie(module, ties)


def tie(module: nn.Module, ties: list[list[str]]) -> None:
    """Makes each group of names one parameter object again."""
    for first, *others in ties:
        parameter = module.get_parameter(first)
        for name in others:
            owner, _, key = name.rpartition(".")
            module.get_submodule(owner)._parameters[key] = parameter


def rows_of(parameter: DTensor) -> tuple[int, int]:
    """The rows of the whole tensor that this rank keeps: FSDP cuts dim 0 into equal chunks, the last ones shorter."""
    mesh = parameter.device_mesh
    shards, index = mesh["dp_shard"].size(), mesh.get_local_rank("dp_shard")
    chunk = -(-parameter.shape[0] // shards)
    return min(index * chunk, parameter.shape[0]), min((index + 1) * chunk, parameter.shape[0])


def slices(parameter: DTensor) -> list[tuple[int, int]]:
    """Who keeps how many rows of one whole copy of the tensor, in order: (rank, rows), beginning with rank 0."""
    mesh = parameter.device_mesh
    shards = mesh["dp_shard"].size()
    chunk = -(-parameter.shape[0] // shards)
    ranks = mesh.mesh.reshape(-1, shards)[0].tolist()
    bounds = [min(index * chunk, parameter.shape[0]) for index in range(shards + 1)]
    return [(rank, bounds[index + 1] - bounds[index]) for index, rank in enumerate(ranks)]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's slice."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def whole(parameter: DTensor) -> torch.Tensor:
    """The whole tensor on every rank. Not DTensor's `full_tensor`: over gloo its collective crashes on a GPU."""
    mesh = parameter.device_mesh
    shards, rows = mesh["dp_shard"].size(), parameter.to_local()
    chunk = -(-parameter.shape[0] // shards)
    mine = rows.new_zeros((chunk, *parameter.shape[1:]))
    mine[: rows.shape[0]] = rows
    gathered = rows.new_empty((chunk * shards, *parameter.shape[1:]))
    reduce.gather_tensor(gathered, mine, group=mesh.get_group("dp_shard"))
    return gathered[: parameter.shape[0]]


@torch.no_grad()
def fill(
    module: nn.Module,
    template: nn.Module,
    units: dict[str, list[str]],
    ties: list[list[str]],
    *,
    family: Family,
    weights: Weights | None,
    draw_on: torch.device,
    seed: int,
) -> None:
    """Values for every parameter: stored ones where `weights` has them, fresh ones elsewhere."""
    stored = weights.names() if weights else set()
    parameters = dict(module.named_parameters())
    if weights:
        _agree_on_stored(weights, {name: p.shape for name, p in parameters.items() if name in stored})
    for unit, members in units.items():
        fresh = [name for name in members if name not in stored]
        for name in members:
            if weights and name in stored:
                start, stop = rows_of(_sharded(parameters[name]))
                _sharded(parameters[name]).to_local().copy_(weights.read(name, start, stop))
        if fresh:
            _fill_fresh(parameters, template, unit, fresh, family=family, draw_on=draw_on, seed=seed)
    for name, buffer in module.named_buffers():
        if weights and name in stored:
            buffer.copy_(weights.read(name, 0, buffer.shape[0] if buffer.dim() else 1))
    tie(module, ties)


def _fill_fresh(
    parameters: dict[str, nn.Parameter],
    template: nn.Module,
    unit: str,
    fresh: list[str],
    *,
    family: Family,
    draw_on: torch.device,
    seed: int,
) -> None:
    """Makes the unit real in the template, initialises it there, keeps this rank's rows, and lets it go again.

    Drawn on the device that computes, also when parameters live on the host: the values must not depend on that."""
    owners = [(name, template.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in fresh]
    meta = {name: owner._parameters[key] for name, owner, key in owners}
    for name, owner, key in owners:
        empty = torch.full(parameters[name].shape, float("nan"), device=draw_on, dtype=torch.float32)
        owner._parameters[key] = nn.Parameter(empty, requires_grad=False)
    with torch.random.fork_rng(devices=[draw_on] if draw_on.type == "cuda" else []):
        torch.manual_seed(zlib.crc32(f"{seed}/{unit}".encode()))
        family.initialise(template.get_submodule(unit), root=template)
    for name, owner, key in owners:
        start, stop = rows_of(_sharded(parameters[name]))
        _sharded(parameters[name]).to_local().copy_(owner.get_parameter(key)[start:stop])
        owner._parameters[key] = meta[name]


_LOOKED_AT = 2**22
"""Elements of a row up to which it is compared: the experts of a large mixture have rows of gigabytes."""


def _agree_on_stored(weights: Weights, shapes: dict[str, torch.Size]) -> None:
    """Every rank reads its own slices, maybe from a copy of its own: some rows of each tensor must be the same for all.
    Without this, ranks would fill one model from two."""
    if reduce.place()[0] == 1:
        return
    facts: dict[str, str | None] = {}
    for name, shape in sorted(shapes.items()):
        length = shape[0] if shape else 1
        row = shape[1:].numel()
        if row > _LOOKED_AT:
            continue
        chosen = [(0, length)] if length * row <= 2**16 else [(i, i + 1) for i in (0, length // 2, length - 1)]
        content = hashlib.blake2b(digest_size=6)
        for start, stop in chosen:
            rows = weights.read(name, start, stop).contiguous().reshape(-1)
            content.update(rows.view(torch.uint8).numpy().tobytes())
        facts[name] = content.hexdigest()
    if found := differences(facts):
        raise SetupError(
            f"The ranks read different weights, by a hash of some rows: {some(found)}. Give every node the same model "
            "folder."
        )


def agree(module: nn.Module) -> None:
    """Copies of the model that several ranks hold, and buffers, which every rank holds, are equal in every bit."""
    if reduce.place()[0] == 1:
        return
    facts: dict[str, str | None] = {
        name: str(sum_) for name, sum_ in fingerprints(dict(module.named_parameters())).items()
    }
    buffers = {name: torch.view_as_real(b) if b.is_complex() else b for name, b in module.named_buffers() if b.numel()}
    if buffers:
        facts |= dict(zip(buffers, map(str, checksums(list(buffers.values())).tolist()), strict=True))
    if found := differences(facts):
        raise SetupError(
            f"The ranks start from different values, by the sum of their bits: {some(found)}. Check that every node "
            "has the same model folder, the same kind of GPU and the same versions."
        )


@torch.no_grad()
def fingerprints(parameters: dict[str, nn.Parameter]) -> dict[str, int]:
    """A checksum of each whole parameter, the same for any number of ranks: the sum of its bits as integers."""
    if not parameters:
        return {}
    sums = checksums(list(parameters.values()))
    mesh = _sharded(next(iter(parameters.values()))).device_mesh
    sums = reduce.sum_over_shards(sums.to(mesh.device_type), mesh).cpu()
    return dict(zip(parameters, sums.tolist(), strict=True))


def _sharded(parameter: nn.Parameter) -> DTensor:
    assert isinstance(parameter, DTensor), "every parameter belongs to an FSDP unit"
    return parameter


@torch.no_grad()
def prove(module: nn.Module, trainable: set[str], storage: dict[str, torch.dtype]) -> None:
    """Every value was set, every dtype is the planned one, and what was trainable before still is, nothing else."""
    mine = [n for n, p in module.named_parameters() if torch.isnan(_sharded(p).to_local()).any()]
    # From every rank: a small parameter lies on one of them, and all must stop.
    unset = sorted({name for names in reduce.gather_objects(mine) for name in names})
    if unset:
        raise CheckpointError(
            f"{len(unset)} parameters have no value or NaN after loading, first {unset[0]}. "
            "The stored weights are damaged, or the model leaves these parameters uninitialised."
        )
    prove_storage(module, storage)
    now = {name for name, p in module.named_parameters() if p.requires_grad}
    assert now == trainable, f"sharding changed what is trainable: {sorted(now ^ trainable)[:3]}"


def prove_storage(module: nn.Module, storage: dict[str, torch.dtype]) -> None:
    """Every parameter is kept in the dtype that the plan says."""
    for name, parameter in module.named_parameters():
        assert parameter.dtype == storage[name], f"{name} is kept in {parameter.dtype}, planned was {storage[name]}"
