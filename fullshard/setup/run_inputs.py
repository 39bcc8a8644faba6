"""The inputs of a run, prepared before its ranks connect: processor, empty model, encoded data, number of steps.

Every rank prepares its own, so no collective waits while data is encoded. Must not know sharding, optimizers or
losses.
"""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from fullshard.config.part import decode, flat, plain
from fullshard.contracts.data import Encoder, Records, Source
from fullshard.contracts.evaluation import refuse_same_name
from fullshard.contracts.objective import Objective
from fullshard.control.best import BestRule, best_rule, gives_numbers
from fullshard.control.resume import ResumePoint, resume_point
from fullshard.data.loader import Loader
from fullshard.data.prepare import Prepared, prepare, texts
from fullshard.errors import DataError, RecipeError
from fullshard.faults.micro_batch import refuse
from fullshard.log.console import Console
from fullshard.multimodal.balance import chosen
from fullshard.proofs.same_data import inventory
from fullshard.recipe import Recipe
from fullshard.setup.inputs import RunInputs
from fullshard.setup.step_plan import plan_steps
from fullshard.step import refuse_logged
from fullshard.text.tokens import tokenizer_of


class OpenSources:
    """The sources of a run. Each is opened once, at its first use."""

    def __init__(self, recipe: Recipe) -> None:
        self._data, self._encoder = recipe.data, encoder_of(recipe)

    @cached_property
    def train(self) -> Records:
        return self._open(self._data.train)

    @cached_property
    def validation(self) -> Records | None:
        return None if self._data.validation is None else self._open(self._data.validation)

    def _open(self, source: Source) -> Records:
        records = source.open()
        return self._encoder.arranged(records) if self._encoder else records

    @cached_property
    def train_fingerprint(self) -> str:
        return self.train.fingerprint()


def resume_run(recipe: Recipe, inputs: RunInputs, checkpoint: Path | None, *, anyway: bool) -> ResumePoint:
    """Where this run resumes from the checkpoint; an error if the checkpoint belongs to another run."""
    return resume_point(
        checkpoint,
        identity=inputs.identity,
        recipe=plain(recipe),
        content=inputs.content,
        steps_per_epoch=inputs.plan.steps_per_epoch,
        anyway=anyway,
    )


def prepare_inputs(recipe: Recipe, *, world_size: int, console: Console) -> RunInputs:
    """Fetches, builds and encodes. Caches are locked, so that each node does the work once."""
    refuse(recipe)
    sources = OpenSources(recipe)
    processor = find_processor(recipe, sources)
    # Before the data: a wrong model is found in seconds, encoding may take an hour.
    module = build_module(recipe, processor)
    find_best(recipe, module)
    return prepare_data(recipe, sources, processor, module, world_size=world_size, console=console)


def find_processor(recipe: Recipe, sources: OpenSources) -> Any:
    """Fetches the model, or trains its tokenizer; returns the tokenizer or processor, if it has one."""
    cache, fingerprint = cache_folder(recipe), sources.train_fingerprint
    recipe.model.prepare(texts(sources.train, encoder_of(recipe)), cache=cache, fingerprint=fingerprint)
    processor, encoder = recipe.model.processor(cache=cache, fingerprint=fingerprint), encoder_of(recipe)
    if encoder is not None and (tokens := encoder.added_tokens()):
        tokenizer_of(processor, needed_by=encoder.kind()).add_tokens(tokens, special_tokens=True)
    return processor


def encoder_of(recipe: Recipe) -> Encoder | None:
    """The encoder that the recipe or its objective names; None: chosen by the first record."""
    usual = recipe.objective.encoder
    return recipe.data.encode or (decode(Encoder, {"kind": usual}, where="data.encode") if usual else None)


def build_module(recipe: Recipe, processor: Any) -> nn.Module:
    """The empty model, with its edits."""
    module = recipe.model.build(processor=processor)
    recipe.objective.extend(module)
    recipe.optimizer.freeze(module)
    _check_model(recipe, module)
    return module


def _check_model(recipe: Recipe, module: nn.Module) -> None:
    """Raises if there is nothing to train, or if the model has too few positions for the longest sample."""
    if not any(p.requires_grad for p in module.parameters()):
        names = [name for name, _ in module.named_parameters()]
        raise RecipeError(
            f"The model has no trainable parameter: model.freeze freezes all of its {len(names)} parameters. "
            f"Freeze less; names look like: {', '.join(names[:3])} ... {names[-1] if names else ''}."
        )
    longest = recipe.model.longest(module)
    if longest is not None and recipe.data.sequence_length > longest:
        raise RecipeError(
            f"data.sequence_length = {recipe.data.sequence_length}, and the model has {longest} positions. "
            f"{more_positions(recipe, module)}"
        )


def more_positions(recipe: Recipe, module: nn.Module) -> str:
    """What to do if samples are longer than the model has positions; a table of learned ones has an end."""
    key = "max_position_embeddings"
    more = f", or give the model more: model.overrides.{key}={recipe.data.sequence_length}"
    return f"Shorten it{more if key in recipe.model.config_of(module) else ''}."


def prepare_data(
    recipe: Recipe, sources: OpenSources, processor: Any, module: nn.Module, *, world_size: int, console: Console
) -> RunInputs:
    """Encodes the data, plans the steps, and checks that model, objective and evaluations can use it."""
    _check_numbers(recipe, module)
    encode = encoder_of(recipe)
    if encode is not None:
        encode.check_model(module)
    data = prepare(
        train=sources.train,
        validation=sources.validation,
        encode=encode,
        processor=processor,
        length=recipe.data.sequence_length,
        pack=recipe.data.pack,
        holdout=recipe.data.holdout,
        seed=recipe.seed,
        cache=cache_folder(recipe),
        say=console.note,
    )
    # After encoding: the key of the cache includes the processor.
    data.encoder.annotate_processor()
    packed = data.train.fixed_length is not None
    plan = plan_steps(recipe.batch, recipe.duration, num_rows=len(data.train), world=world_size, packed=packed)
    check_batch(recipe.objective, data)
    for stored in (data.train_from, data.validation_from):
        if stored is not None:
            recipe.objective.check_data(stored, module=module, samples_per_step=plan.global_size)
    for evaluation in recipe.evaluate.parts:
        evaluation.check(recipe.objective, module, data.validation_from)
        evaluation.check_encoder(recipe.objective, module, data.encoder.settings)
    # Counts rows; checkpoints have these names.
    identity = {
        "samples": len(data.train),
        "samples per step": plan.global_size,
        "content of data.train": sources.train_fingerprint,
        **data.encoder.identity(data.train_from.store),
        **flat({"data": {"encode": plain(data.encoder.settings), "balance": chosen(recipe.data.balance, data)}}),
    }
    per_device = recipe.evaluate.per_device or plan.per_device
    return RunInputs(processor, module, data, plan, per_device, identity, inventory(sources.train))


def _check_numbers(recipe: Recipe, module: nn.Module) -> None:
    """Raises if an evaluation declares a number under a name that is taken; the loop checks the others."""
    owners: dict[str, str] = {}
    for index, part in enumerate(recipe.evaluate.parts):
        names = set(part.gives(recipe.objective, module) or ())
        refuse_logged(f"evaluate.parts: a number of {part.kind()}", names - {"loss"})
        refuse_same_name(owners, f"evaluate.parts[{index}] ({part.kind()})", sorted(names))


def check_batch(objective: Objective, data: Prepared) -> None:
    """Raises if a batch lacks something that the objective reads."""
    batch = Loader(data.train, data.collator, per_device=1).batch_of(np.zeros(1, dtype=np.int64))
    missing = [key for key in objective.needs if key not in batch]
    if missing:
        advice = f"data.encode={objective.encoder}" if objective.encoder else "another data.encode"
        raise DataError(
            f"objective.kind = {objective.kind()} needs {', '.join(missing)} in a batch, and the encoder "
            f"{data.encoder.settings.kind()} gives {', '.join(batch)}. Choose {advice}, or the objective of this data."
        )


def cache_folder(recipe: Recipe) -> Path:
    """The folder of encoded data and trained tokenizers."""
    return recipe.data.cache or Path(os.environ.get("FULLSHARD_CACHE", Path.home() / ".cache" / "fullshard"))


def find_best(recipe: Recipe, module: nn.Module) -> BestRule | None:
    """How the best model is chosen; raises if no evaluation finds that number."""
    return best_rule(recipe.checkpoint.best, recipe.evaluate.parts, recipe.objective, module, recipe.ema)


def effective_best(recipe: Recipe, inputs: RunInputs) -> BestRule | None:
    """The same; None if no evaluation finds a number."""
    parts, held_out = recipe.evaluate.parts, inputs.data.validation is not None
    acts = gives_numbers(parts, recipe.objective, inputs.module, held_out=held_out)
    return find_best(recipe, inputs.module) if acts else None
