"""Section 3 of a check, on the meta device: what is trained, how it is wrapped and stored, where it starts from.

Nothing is loaded: a few rows of stored weights are read, and one norm of each class is run. Must not know the data
beyond a few texts, nor how ranks are started.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fullshard.check import tokenizer
from fullshard.check import weights as stored
from fullshard.check.findings import Finding, error, guarded, ok, warning
from fullshard.check.norms import low_precision_norms
from fullshard.check.settings import device_of
from fullshard.contracts.launcher import Ranks
from fullshard.contracts.world import World
from fullshard.dist.precision import ResolvedPrecision, resolve_for, resolve_precision
from fullshard.dist.shard import Unit, describe, store
from fullshard.dist.wrap import WrapPlan, tied_groups, unit_parameters
from fullshard.errors import SetupError
from fullshard.formatting.readable import short
from fullshard.hf.weights.safetensors_folder import open_folder
from fullshard.kernels.float8 import Float8, without
from fullshard.recipe import Recipe
from fullshard.setup.inputs import RunInputs
from fullshard.setup.run_inputs import more_positions
from fullshard.setup.sharded_model import shard_plan
from fullshard.text.tokens import inner_tokenizer

LARGE = 100_000_000
"""With fewer parameters it does not matter how they are divided into units."""
_TEXTS, _CHARACTERS = 64, 5_000


def look(
    recipe: Recipe, inputs: RunInputs | None, *, module: nn.Module, ranks: Ranks | None = None
) -> Iterator[Finding]:
    """The findings. Without `inputs` the tokenizer is not checked; without `ranks` one rank is assumed."""
    yield from parameters(module, adapters=bool(recipe.model.adapters(module)))
    yield from guarded("units", lambda: _units(recipe, module, ranks or Ranks(1)))
    yield from _batch_norm(recipe, module, ranks or Ranks(1))
    yield from guarded("norms", lambda: _norms(recipe, module))
    yield from weights(recipe, module)
    yield from shape(recipe, module)
    if inputs is not None:
        yield from guarded("tokenizer", lambda: _tokenizer(recipe, inputs, module))


def parameters(module: nn.Module, *, adapters: bool) -> Iterator[Finding]:
    """How many parameters there are, and how many are trained."""
    total = sum(p.numel() for p in module.parameters())
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    names = [name for name, _ in module.named_parameters()]
    if not trained:
        text = f"{type(module).__name__}: all {len(names)} parameters are frozen; model.freeze or model.lora "
        text += "leaves nothing to train."
        remedy = f"Freeze less. Names look like: {', '.join(names[:3])} ... {names[-1] if names else ''}."
        yield error("parameters", text, remedy)
    elif adapters and 2 * trained > total:
        text = f"model.lora: {trained:,} of {total:,} parameters are trained ({trained / total:.0%}); adapters are "
        text += "usually a few per cent, at most half."
        remedy = "Lower model.lora.r, name fewer model.lora.targets, or train the whole model without model.lora."
        yield warning("parameters", text, remedy)
    elif trained == total:
        yield ok("parameters", f"{total:,} ({short(total)}), all trained")
    else:
        yield ok("parameters", f"{total:,} ({short(total)}), {trained:,} of them trained ({trained / total:.2%})")


def planned_units(recipe: Recipe, module: nn.Module, ranks: Ranks) -> list[Unit]:
    """The units that the model will have on these ranks; the module is not changed."""
    plan = shard_plan(recipe, module, _world(recipe, ranks), _resolved(recipe))
    module = copy.deepcopy(module)
    store(module, plan, recipe.model)
    return describe(module, plan, tied_groups(module))


def _units(recipe: Recipe, module: nn.Module, ranks: Ranks) -> Iterator[Finding]:
    # Units do not depend on the precision.
    world = _world(recipe, ranks)
    plan = shard_plan(recipe, module, world, resolve_for("fp32", capability=None))
    yield from unit_sizes(module, plan.wrap)
    yield from ties(module, plan.wrap)
    if asked := Float8.of(recipe.precision):
        blocks, exact = plan.wrap.blocks, plan.wrap.exact
        yield from guarded("float8", lambda: [ok("float8", asked.describe(module, blocks, exact))])
    if recipe.sharding.strategy == "auto" and world.device.type == "cuda" and world.size > 1:
        yield ok("mesh", plan.layout.describe())


def _world(recipe: Recipe, ranks: Ranks) -> World:
    """The ranks as they will be; on the CPU if the requested GPUs are missing."""
    device = torch.device("cuda", 0) if device_of(recipe) == "cuda" and torch.cuda.is_available() else "cpu"
    size = ranks.per_node * ranks.nodes
    return World(0, size, 0, ranks.per_node, torch.device(device), recipe.topology.backend)


def unit_sizes(module: nn.Module, plan: WrapPlan) -> Iterator[Finding]:
    """How many units there are, and whether one is most of the model: each is gathered whole while it computes."""
    sizes = {name: p.numel() for name, p in module.named_parameters()}
    vocabulary = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    # An embedding tied to a head cannot be divided.
    embeddings = {name for name, p in module.named_parameters() if id(p) in vocabulary}
    units = {unit: members for unit, members in unit_parameters(module, plan).items() if members}
    weighed = {unit: sum(sizes[name] for name in members if name not in embeddings) for unit, members in units.items()}
    largest, total = max(weighed, key=weighed.__getitem__, default=""), sum(sizes.values())
    if total >= LARGE and 2 * weighed.get(largest, 0) > total:
        text = f"sharding.wrap: {largest or 'the root'} holds {weighed[largest]:,} of {total:,} parameters in one unit "
        text += f"({plan.reason}): every rank gathers it whole."
        remedy = "Leave sharding.wrap out, or name the classes of the repeated blocks in sharding.wrap.classes."
        yield warning("units", text, remedy)
    else:
        yield ok("units", f"{len(units)}: {plan.reason}")


def ties(module: nn.Module, plan: WrapPlan) -> Iterator[Finding]:
    """Tied parameters; FSDP needs both ends in one unit."""
    groups = tied_groups(module)
    for group in groups:
        owners = {max((u for u in plan.units if name.startswith(f"{u}.")), key=len, default="") for name in group}
        if len(owners) > 1:
            text = f"{' and '.join(group)} are one parameter, but belong to different units: "
            text += f"{', '.join(sorted(owner or 'the root' for owner in owners))}."
            remedy = "Leave sharding.wrap out, or name classes that hold both ends or neither."
            yield error("tied parameters", text, remedy)
            return
    yield ok("tied parameters", "; ".join(" = ".join(group) for group in groups) or "none")


def _batch_norm(recipe: Recipe, module: nn.Module, ranks: Ranks) -> Iterator[Finding]:
    if not recipe.sharding.sync_batchnorm:
        return
    if not any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules()):
        yield ok("batch norm", "the model has no batch norm, so sharding.sync_batchnorm has no effect")
    elif ranks.per_node * ranks.nodes > 1 and device_of(recipe) == "cpu":
        text = "sharding.sync_batchnorm = true on a CPU: torch synchronises batch-norm statistics between GPUs only."
        yield error("batch norm", text, "Set sharding.sync_batchnorm to false.")


def _resolved(recipe: Recipe) -> ResolvedPrecision:
    try:
        return resolve_precision(recipe.precision, _world(recipe, Ranks(1)).device)
    except SetupError:
        # The environment section reports what this device cannot do.
        return resolve_for(without(recipe.precision), capability=None)


def _norms(recipe: Recipe, module: nn.Module) -> Iterator[Finding]:
    compute = _resolved(recipe).compute
    remedy = "In its forward, use x.float() for mean and variance and cast the result back, or use precision: fp32."
    for low in low_precision_norms(module, compute=compute):
        text = f"{low.where}: {low.class_name} computes its statistics in {_word(compute)}: whole rows are "
        text += f"{low.apart:.1e} off; with statistics in float32 they are at most {low.allowed:.1e} off."
        yield warning("norms", text, remedy)


def weights(recipe: Recipe, module: nn.Module) -> Iterator[Finding]:
    """What the model starts from: files, values, names and shapes, dtypes."""
    folder = recipe.model.stored_in()
    if folder is not None:
        found = list(guarded("weight files", lambda: stored.look(folder)))
        yield from found
        if any(finding.level == "error" and finding.check == "weight files" for finding in found):
            return
    yield from guarded("weights", lambda: _weights_and_dtypes(recipe, module, folder))


def _weights_and_dtypes(recipe: Recipe, module: nn.Module, folder: Path | None) -> Iterator[Finding]:
    found = recipe.model.weights(module)
    if found is None:
        yield ok("weights", "from scratch")
    else:
        yield ok("weights", f"{len(found.names())} tensors fit the model, no name is missing or unexpected")
    precision = _resolved(recipe)
    frozen = {str(recipe.model.storage_dtype(name, p)) for name, p in module.named_parameters() if not p.requires_grad}
    kept = [f"{precision.storage} (trained)"] if any(p.requires_grad for p in module.parameters()) else []
    kept += [f"{' and '.join(sorted(frozen))} (frozen)"] if frozen else []
    begin = f"; the files hold {open_folder(folder).dtype()}" if folder is not None else ""
    yield ok("dtypes", f"{', '.join(kept)}; compute {precision.compute}, reduce torch.float32{begin}")


def shape(recipe: Recipe, module: nn.Module) -> Iterator[Finding]:
    """What would otherwise fail only in the first forward pass."""
    length, longest = recipe.data.sequence_length, recipe.model.longest(module)
    if longest is not None and length > longest:
        text = f"data.sequence_length = {length:,}, but the model has only {longest:,} positions."
        yield error("positions", text, more_positions(recipe, module))
    else:
        has = "any length" if longest is None else f"{longest:,} positions"
        yield ok("positions", f"data.sequence_length = {length:,}, the model has {has}")
    for problem in recipe.model.problems(module):
        yield error("config", *problem)


def _tokenizer(recipe: Recipe, inputs: RunInputs, module: nn.Module) -> Iterator[Finding]:
    rows = recipe.model.embedding_rows(module)
    if rows is None:
        return
    if inputs.processor is None:
        yield from tokenizer.token_ids(inputs.data.train, rows=rows, noun=inputs.plan.noun)
        return
    found = inner_tokenizer(inputs.processor)
    stored, config = recipe.model.stored_rows(), recipe.model.config_of(module)
    texts, writes = _texts(inputs), not inputs.data.encoder.settings.lays_out
    yield from tokenizer.look(found, rows=rows, texts=texts, config=config, writes=writes, stored=stored)
    yield from tokenizer.chat_template(inputs.data.encoder)


def _texts(inputs: RunInputs) -> list[str]:
    """A few texts, evenly spread over the training data."""
    records = inputs.data.train_from.records
    chosen = np.unique(np.linspace(0, len(records) - 1, min(len(records), _TEXTS)).astype(int))
    found = [text for index in chosen for text in inputs.data.encoder.settings.texts(records[int(index)])]
    return [text[:_CHARACTERS] for text in found if text.strip()]


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
