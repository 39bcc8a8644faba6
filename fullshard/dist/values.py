"""The values of a sharded module: each rank reads or draws only its own slices, one unit at a time.

No rank ever holds the whole model. Fresh values are drawn per unit from (seed, unit name), so they do not depend on the
number of ranks. Must not know file formats, model classes or losses.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.contracts.model import Family, Weights
from fullshard.dist import reduce
from fullshard.dist.agreement import differences, some
from fullshard.dist.gather import gather_tensor
from fullshard.errors import CheckpointError, SetupError
from fullshard.formatting.plural import counted
from fullshard.kernels.float8 import plain

_COMPARED = 2**22
"""Longest row, in elements, that ranks compare: the experts of a large mixture have rows of gigabytes."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def materialise(
    module: nn.Module, ties: list[list[str]], *, parameters_on: torch.device, buffers_on: torch.device
) -> None:
    """Allocates this rank's slices, filled with NaN so that unset values are found; moves buffers without casting."""

    def allocate(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor.to(buffers_on)
        real = torch.empty_like(tensor, device=parameters_on)
        local(real).fill_(float("nan"))
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


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's slice."""
    return tensor.to_local() if isinstance(tensor := plain(tensor), DTensor) else tensor


def _bounds(tensor: DTensor) -> list[int]:
    """The rows at which slices begin and end: FSDP cuts dim 0 into equal chunks, the last ones shorter."""
    rows, shards = tensor.shape[0], tensor.device_mesh["dp_shard"].size()
    return [min(index * -(-rows // shards), rows) for index in range(shards + 1)]


def rows_of(tensor: DTensor) -> tuple[int, int]:
    """The rows of the whole tensor that this rank keeps."""
    index, bounds = tensor.device_mesh.get_local_rank("dp_shard"), _bounds(tensor)
    return bounds[index], bounds[index + 1]


def slices(tensor: DTensor) -> list[tuple[int, int]]:
    """The ranks that hold one whole copy of the tensor, each with its number of rows, in order from rank 0."""
    bounds = _bounds(tensor)
    ranks = tensor.device_mesh.mesh.reshape(-1, len(bounds) - 1)[0].tolist()
    return [(rank, stop - start) for rank, (start, stop) in zip(ranks, pairwise(bounds), strict=True)]


@torch.no_grad()
def whole(tensor: DTensor) -> torch.Tensor:
    """The whole tensor on every rank. Not DTensor's `full_tensor`: over gloo its collective crashes on a GPU."""
    rows, bounds = local(tensor), _bounds(tensor)
    shape = tensor.shape[1:]
    mine = rows.new_zeros((bounds[1], *shape))
    mine[: rows.shape[0]] = rows
    gathered = rows.new_empty((bounds[1] * (len(bounds) - 1), *shape))
    gather_tensor(gathered, mine, group=tensor.device_mesh.get_group("dp_shard"))
    return gathered[: tensor.shape[0]]


def checksums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of each tensor's bits as integers, over this rank's slice: any changed bit shows, nothing is copied."""
    mine = [local(tensor).detach() for tensor in tensors]
    return torch.stack([each.view(_INTEGERS[each.element_size()]).sum(dtype=torch.int64) for each in mine]).cpu()


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
    """Sets every parameter: to the stored value if `weights` has one, else to a fresh one."""
    stored = weights.names() if weights else set()
    parameters = {name: _sharded(p) for name, p in module.named_parameters()}
    if weights:
        _agree_on_stored(weights, {name: p.shape for name, p in parameters.items() if name in stored})
        for name, parameter in parameters.items():
            if name in stored:
                parameter.to_local().copy_(weights.read(name, *rows_of(parameter)))
        for name, buffer in module.named_buffers():
            if name in stored:
                buffer.copy_(weights.read(name, 0, buffer.shape[0] if buffer.dim() else 1))
    for unit, members in units.items():
        fresh = {name: parameters[name] for name in members if name not in stored}
        if fresh:
            _fill_fresh(fresh, template, unit, family=family, draw_on=draw_on, seed=seed)
    tie(module, ties)


def _fill_fresh(
    fresh: dict[str, DTensor], template: nn.Module, unit: str, *, family: Family, draw_on: torch.device, seed: int
) -> None:
    """Allocates the unit in the template, initialises it there, keeps this rank's rows, and frees it.

    Values are drawn on the compute device even for offloaded parameters: offloading must not change them."""
    owners = [(name, template.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in fresh]
    meta = {name: owner._parameters[key] for name, owner, key in owners}
    for name, owner, key in owners:
        empty = torch.full(fresh[name].shape, float("nan"), device=draw_on, dtype=torch.float32)
        owner._parameters[key] = nn.Parameter(empty, requires_grad=False)
    with torch.random.fork_rng(devices=[draw_on] if draw_on.type == "cuda" else []):
        torch.manual_seed(zlib.crc32(f"{seed}/{unit}".encode()))
        family.initialise(template.get_submodule(unit), root=template)
    for name, owner, key in owners:
        fresh[name].to_local().copy_(owner.get_parameter(key)[slice(*rows_of(fresh[name]))])
        owner._parameters[key] = meta[name]


def _agree_on_stored(weights: Weights, shapes: dict[str, torch.Size]) -> None:
    """Compares some rows of each tensor over ranks. Each rank reads its own slices, perhaps from its own copy of the
    files: two different copies must not fill one model."""
    if reduce.place()[0] == 1:
        return
    facts: dict[str, str | None] = {}
    for name, shape in sorted(shapes.items()):
        length, row = shape[0] if shape else 1, shape[1:].numel()
        if row > _COMPARED:
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


@torch.no_grad()
def fingerprints(parameters: dict[str, nn.Parameter]) -> dict[str, int]:
    """The same checksum of each whole parameter, equal for any number of ranks."""
    if not parameters:
        return {}
    sums = checksums(list(parameters.values()))
    mesh = _sharded(next(iter(parameters.values()))).device_mesh
    sums = reduce.sum_over_ranks(sums.to(mesh.device_type), mesh.get_group("dp_shard")).cpu()
    return dict(zip(parameters, sums.tolist(), strict=True))


def _sharded(parameter: nn.Parameter) -> DTensor:
    assert isinstance(parameter, DTensor), "every parameter belongs to an FSDP unit"
    return parameter


@torch.no_grad()
def prove(module: nn.Module, trainable: set[str], storage: dict[str, torch.dtype]) -> None:
    """Proves that every value was set, every dtype is the planned one, and the same parameters are still trainable."""
    mine = [name for name, p in module.named_parameters() if torch.isnan(_sharded(p).to_local()).any()]
    # A small parameter is on one rank only, and all ranks must stop.
    unset = sorted(set[str]().union(*reduce.gather_objects(mine)))
    if unset:
        raise CheckpointError(
            f"After loading, values of {counted(len(unset), 'parameter')} are missing or NaN, first {unset[0]}. "
            "The stored weights are damaged, or the model leaves these parameters uninitialised."
        )
    for name, parameter in module.named_parameters():
        assert parameter.dtype == storage[name], f"{name} is stored in {parameter.dtype}, the plan says {storage[name]}"
    now = {name for name, p in module.named_parameters() if p.requires_grad}
    assert now == trainable, f"sharding changed what is trainable: {sorted(now ^ trainable)[:3]}"
