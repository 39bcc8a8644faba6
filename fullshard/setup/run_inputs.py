"""What a run stands on before its ranks meet: downloads, the empty model, tokenised data, the step arithmetic.

Every rank lays the same inputs by itself; no collective is open while a tokenizer works for an hour.
Must not know sharding, optimizers or losses.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from fullshard.config.part import decode
from fullshard.contracts.data import Encoder
from fullshard.contracts.objective import Objective
from fullshard.control.best import BestRule
from fullshard.control.best_rule import best_rule, gives_numbers
from fullshard.data.inventory import Inventory, inventory
from fullshard.data.loader import Loader
from fullshard.data.prepare import Prepared, prepare, texts
from fullshard.errors import DataError
from fullshard.log.console import Console
from fullshard.recipe import Recipe
from fullshard.setup.shard_plan import check_model
from fullshard.setup.step_plan import StepPlan, plan_steps


@dataclass(frozen=True)
class RunInputs:
    """What a run stands on before its ranks meet."""

    processor: Any
    module: nn.Module
    """The model with its edits, parameters on meta; sharding turns this very object into the trained one."""
    data: Prepared
    plan: StepPlan
    validation_per_device: int
    identity: dict[str, Any]
    """The meaning of "step N" in the data: must not change between a checkpoint and its resume, beside the recipe."""
    content: Inventory
    """The files that `data.train` is made of, to tell what has changed of them."""


def prepare_inputs(recipe: Recipe, *, world_size: int, console: Console) -> RunInputs:
    """Fetches, tokenises and counts. Every rank does it by itself; locked caches let the work happen once a node."""
    processor = find_processor(recipe)
    # Before the data: a model that cannot be is found in seconds, encoding may take an hour.
    module = build_module(recipe, processor)
    find_best(recipe, module)
    return prepare_data(recipe, processor, module, world_size=world_size, console=console)


def find_processor(recipe: Recipe) -> Any:
    """Fetches the model, or trains its tokenizer; gives the tokenizer or processor, None without one."""
    cache = cache_folder(recipe)
    fingerprint = recipe.data.train.open().fingerprint()
    recipe.model.prepare(texts(recipe.data.train, encoder_of(recipe)), cache=cache, fingerprint=fingerprint)
    return recipe.model.processor(cache=cache, fingerprint=fingerprint)


def encoder_of(recipe: Recipe) -> Encoder | None:
    """The encoder that the recipe names, or the one that goes with its objective; None: to be chosen from the data."""
    usual = recipe.objective.encoder
    return recipe.data.encode or (decode(Encoder, {"kind": usual}, where="data.encode") if usual else None)


def build_module(recipe: Recipe, processor: Any) -> nn.Module:
    """The empty model, with its edits."""
    module = recipe.model.build(processor=processor)
    recipe.objective.extend(module)
    check_model(recipe, module)
    return module


def prepare_data(recipe: Recipe, processor: Any, module: nn.Module, *, world_size: int, console: Console) -> RunInputs:
    """Encoded data and the arithmetic of its steps, on top of the model."""
    encode = encoder_of(recipe)
    if encode is not None:
        encode.check_model(module)
    data = prepare(
        train=recipe.data.train,
        validation=recipe.data.validation,
        encode=encode,
        processor=processor,
        length=recipe.data.sequence_length,
        pack=recipe.data.pack,
        holdout=recipe.data.holdout,
        seed=recipe.seed,
        cache=cache_folder(recipe),
        say=console.note,
    )
    # After encoding: the cache knows the processor by what it was before.
    data.encoder.leave_on(processor, length=recipe.data.sequence_length)
    plan = plan_steps(
        num_rows=len(data.train),
        per_device=recipe.batch.per_device,
        accumulate=recipe.batch.accumulate,
        global_size=recipe.batch.global_size,
        world=world_size,
        epochs=recipe.duration.epochs,
        steps=recipe.duration.steps,
        packed=data.train.fixed_length is not None,
    )
    check_batch(recipe.objective, data)
    for stored in (data.train_from, data.validation_from):
        if stored is not None:
            recipe.objective.check_data(stored, module=module, samples_per_step=plan.global_size)
    for evaluation in recipe.evaluate.parts:
        evaluation.check(recipe.objective, module, data.validation_from)
        evaluation.check_encoder(recipe.objective, module, data.encoder)
    # Counted in rows; the names are those that checkpoints have.
    identity = {
        "samples": len(data.train),
        "samples per step": plan.global_size,
        "content of data.train": recipe.data.train.open().fingerprint(),
        **data.encoder.identity(data.train_from.store),
    }
    per_device = recipe.evaluate.per_device or recipe.batch.per_device
    return RunInputs(processor, module, data, plan, per_device, identity, inventory(data.train_from.records))


def check_batch(objective: Objective, data: Prepared) -> None:
    """A batch has what the objective reads. Before the objective looks at the data, which it knows by these names."""
    batch = Loader(data.train, data.encoder, per_device=1).batch_of(np.zeros(1, dtype=np.int64))
    missing = [key for key in objective.needs if key not in batch]
    if missing:
        advice = f"data.encode={objective.encoder}" if objective.encoder else "another data.encode"
        raise DataError(
            f"objective.kind = {objective.kind()} needs {', '.join(missing)} in a batch, and the encoder "
            f"{data.encoder.kind()} gives {', '.join(batch)}. Choose {advice}, or the objective of this data."
        )


def cache_folder(recipe: Recipe) -> Path:
    """Where tokenised data and trained tokenizers are kept."""
    return recipe.data.cache or Path(os.environ.get("FULLSHARD_CACHE", Path.home() / ".cache" / "fullshard"))


def find_best(recipe: Recipe, module: nn.Module) -> BestRule | None:
    """What decides the best model; an error where no validation will give that number."""
    return best_rule(recipe.checkpoint.best, recipe.evaluate.parts, recipe.objective, module, recipe.ema)


def effective_best(recipe: Recipe, inputs: RunInputs) -> BestRule | None:
    """The same, where a validation finds any number at all."""
    parts, held_out = recipe.evaluate.parts, inputs.data.validation is not None
    acts = gives_numbers(parts, recipe.objective, inputs.module, held_out=held_out)
    return find_best(recipe, inputs.module) if acts else None
