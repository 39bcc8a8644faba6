"""The composition root: recipe → parts. The one file that sees everything; whatever is "auto" is resolved here.

`lay_ground` does what needs no other rank (downloads, tokenisation, arithmetic); `build` does the rest, on all ranks.
Must not loop, log metrics or compute losses.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.arithmetic import StepPlan, plan_steps
from fullshard.checkpoint import folder as files
from fullshard.checkpoint.saver import Saver
from fullshard.data.loader import Loader
from fullshard.data.prepare import Prepared, prepare
from fullshard.dist import reduce
from fullshard.dist.mesh import Layout, choose_layout, make_mesh
from fullshard.dist.shard import ShardPlan, Unit, reshard, shard
from fullshard.dist.world import World
from fullshard.dist.wrap import find_blocks
from fullshard.errors import CheckpointError, DataError, RecipeError
from fullshard.evaluate.base import EvaluationInputs
from fullshard.log.console import Console
from fullshard.log.meters import Meters
from fullshard.log.peaks import peak_flops
from fullshard.loop import BestRule, Due, Parts
from fullshard.precision import ResolvedPrecision, resolve_precision
from fullshard.recipe import Recipe
from fullshard.state import Progress
from fullshard.step import to_device


@dataclass(frozen=True)
class Ground:
    """What a run stands on before its ranks meet."""

    processor: Any
    data: Prepared
    plan: StepPlan
    validation_per_device: int
    identity: dict[str, Any]
    """What must not change between a checkpoint and its resume: the meaning of "step N" in the data."""


def lay_ground(recipe: Recipe, *, world_size: int, console: Console) -> Ground:
    """Fetches, tokenises and counts. Every rank does this by itself; caches and locks make the work happen once a node."""
    cache = recipe.data.cache or Path(os.environ.get("FULLSHARD_CACHE", Path.home() / ".cache" / "fullshard"))
    recipe.model.prepare(_texts(recipe), cache=cache)
    processor = recipe.model.processor(cache=cache)
    data = prepare(
        train=recipe.data.train,
        validation=recipe.data.validation,
        encode=recipe.data.encode,
        processor=processor,
        length=recipe.data.sequence_length,
        pack=recipe.data.pack,
        holdout=recipe.data.holdout,
        seed=recipe.seed,
        cache=cache,
        say=console.note,
    )
    plan = plan_steps(
        num_samples=len(data.train),
        per_device=recipe.batch.per_device,
        accumulate=recipe.batch.accumulate,
        global_size=recipe.batch.global_size,
        world=world_size,
        epochs=recipe.duration.epochs,
        steps=recipe.duration.steps,
    )
    identity = {
        "seed": recipe.seed,
        "samples": len(data.train),
        "samples per step": plan.global_size,
        "sequence length": recipe.data.sequence_length,
        "packed": recipe.data.pack,
        "shuffled": recipe.data.shuffle,
    }
    return Ground(processor, data, plan, recipe.evaluate.per_device or recipe.batch.per_device, identity)


def _texts(recipe: Recipe) -> Iterator[str]:
    """The training texts, for a family that trains its tokenizer on them."""
    records = recipe.data.train.open()
    for index in range(len(records)):
        record = records[index]
        texts = [value for value in record.values() if isinstance(value, str)]
        texts += [m["content"] for m in record.get("messages", []) if isinstance(m.get("content"), str)]
        yield "\n".join(texts)


def find_progress(checkpoint: Path | None, ground: Ground) -> Progress:
    """Where the run stands; an error with the differences when the checkpoint counts its steps another way."""
    if checkpoint is None:
        return Progress()
    state = files.read_state(checkpoint)
    differences = [
        f"{key}: {state['identity'].get(key)} then, {value} now"
        for key, value in ground.identity.items()
        if state["identity"].get(key) != value
    ]
    if differences:
        raise CheckpointError(
            f"{checkpoint} cannot be resumed with this recipe, its steps mean other samples: {'; '.join(differences)}. "
            "Go back to those settings (batch.global keeps the step the same for any number of ranks), or start over "
            "with --resume never."
        )
    return Progress.from_dict(state["progress"])


@dataclass(frozen=True)
class Built:
    """The parts, and the facts that the run header states."""

    parts: Parts
    units: list[Unit]
    layout: Layout
    precision: ResolvedPrecision
    wrap_reason: str
    kernels: str
    compiled: bool
    proofs: list[str]
    resolved: Recipe


def build(
    recipe: Recipe,
    ground: Ground,
    world: World,
    *,
    checkpoint: Path | None,
    progress: Progress,
    console: Console,
    write: Callable[[dict[str, Any]], None],
) -> Built:
    """Makes the sharded model, its optimizer and everything around them; loads the checkpoint to go on from."""
    precision = resolve_precision(recipe.precision, world.device)
    module = recipe.model.build(processor=ground.processor)
    if recipe.sharding.sync_batchnorm:
        module = _sync_batchnorm(module, world, console)
    _require_trainable(module)
    plan, wrap_reason = _shard_plan(recipe, module, world, precision)
    compiled = plan.compile
    kernels = recipe.model.choose_kernels(
        module, device=world.device.type, compute=precision.compute, packed=recipe.data.pack
    )
    flops = recipe.model.flops_per_token(module, length=recipe.data.sequence_length)
    units = shard(
        module,
        plan,
        make_mesh(plan.layout, world),
        family=recipe.model,
        weights=recipe.model.weights(module),
        device=world.device,
        seed=recipe.seed,
    )
    optimizer = recipe.optimizer.open(module.named_parameters())
    scaler = torch.amp.GradScaler(world.device.type) if precision.scaler else None
    saver = Saver(
        recipe.folder,
        recipe.checkpoint.keep,
        module,
        optimizer,
        scaler,
        ground.identity,
        recipe.model,
        ground.processor,
        world,
        console,
    )
    if checkpoint is not None:
        saver.restore(checkpoint)
    workers = recipe.data.workers if recipe.data.workers is not None else (2 if world.device.type == "cuda" else 0)
    train, validation = _loaders(recipe, ground, world, workers=workers)
    proofs = _check_first_batch(recipe, module, train, world)
    resolved = recipe.model_copy(
        update={
            "precision": precision.word,
            "sharding": recipe.sharding.model_copy(update={"strategy": plan.layout.strategy, "compile": compiled}),
            "data": recipe.data.model_copy(update={"encode": ground.data.encoder, "workers": workers}),
            "batch": recipe.batch.model_copy(update={"accumulate": ground.plan.accumulate, "global_size": None}),
            "topology": recipe.topology.model_copy(update={"device": world.device.type, "devices": world.local_size}),
        }
    )
    parts = Parts(
        model=module,
        objective=recipe.objective,
        aux={},
        optimizer=optimizer,
        scaler=scaler,
        schedule=recipe.schedule,
        base_lr=recipe.optimizer.lr,
        clip=recipe.optimizer.clip,
        windows=train.windows,
        steps_per_epoch=ground.plan.steps_per_epoch,
        total_steps=ground.plan.total_steps,
        epochs=ground.plan.epochs,
        evaluations=recipe.evaluate.parts,
        evaluation_inputs=_evaluation_inputs(recipe, ground, module, validation, world, console),
        evaluate_due=Due(recipe.evaluate.every_steps, recipe.evaluate.every_epochs),
        save_due=Due(recipe.checkpoint.every_steps, recipe.checkpoint.every_epochs),
        save_at_end=recipe.checkpoint.at_end,
        log_every=recipe.log.every_steps,
        log_sample_ids=recipe.log.sample_ids,
        best=BestRule(recipe.checkpoint.best.metric, recipe.checkpoint.best.mode) if recipe.checkpoint.best else None,
        patience=recipe.evaluate.patience,
        save=saver.save,
        export=saver.export,
        write=write,
        console=console,
        meters=_meters(flops, world, progress),
        progress=progress,
        device=world.device,
        rank=world.rank,
        seed=recipe.seed,
        workers=workers,
        folder=recipe.folder,
    )
    return Built(parts, units, plan.layout, precision, wrap_reason, kernels, compiled, proofs, resolved)


def _sync_batchnorm(module: nn.Module, world: World, console: Console) -> nn.Module:
    if not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules()):
        console.note("sharding.sync_batchnorm has no effect: the model has no batch norm.")
        return module
    if world.device.type != "cuda" and world.size > 1:
        raise RecipeError(
            "sharding.sync_batchnorm = true needs GPUs: torch shares batch-norm statistics only there. Set it to false."
        )
    return nn.SyncBatchNorm.convert_sync_batchnorm(module) if world.size > 1 else module


def _require_trainable(module: nn.Module) -> None:
    if not any(p.requires_grad for p in module.parameters()):
        raise RecipeError("The model has no trainable parameter: model.freeze or model.lora leaves nothing to train.")


def _shard_plan(
    recipe: Recipe, module: nn.Module, world: World, precision: ResolvedPrecision
) -> tuple[ShardPlan, str]:
    sharding, asked = recipe.sharding, recipe.sharding.wrap
    wrap = find_blocks(
        module,
        classes=asked.classes if asked else None,
        min_params=asked.min_params if asked else None,
        whole=asked.whole if asked else False,
        hints=recipe.model.blocks(module),
    )
    trainable = sum(p.numel() for p in module.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in module.parameters()) - trainable
    layout = choose_layout(sharding.strategy, world, state_bytes=16 * trainable + 4 * frozen)
    plan = ShardPlan(
        wrap=wrap,
        layout=layout,
        compute=precision.compute,
        activation_checkpointing=sharding.activation_checkpointing,
        compile=world.device.type == "cuda" if sharding.compile is None else sharding.compile,
        cpu_offload=sharding.cpu_offload,
        forward_prefetch=sharding.forward_prefetch,
    )
    return plan, wrap.reason


def _loaders(recipe: Recipe, ground: Ground, world: World, *, workers: int) -> tuple[Loader, Loader | None]:
    def loader(samples: Any, per_device: int, global_size: int, shuffle: bool) -> Loader:
        return Loader(
            samples,
            ground.data.encoder,
            seed=recipe.seed,
            shuffle=shuffle,
            per_device=per_device,
            global_size=global_size,
            rank=world.rank,
            world=world.size,
            workers=workers,
            pin_memory=world.device.type == "cuda",
        )

    train = loader(ground.data.train, ground.plan.per_device, ground.plan.global_size, recipe.data.shuffle)
    if ground.data.validation is None:
        return train, None
    each = ground.validation_per_device
    return train, loader(ground.data.validation, each, each * world.size, False)


def _check_first_batch(recipe: Recipe, module: nn.Module, train: Loader, world: World) -> list[str]:
    """The batch has what the objective reads, and the objective's own proofs hold."""
    batch = train.first_batch()
    missing = [key for key in recipe.objective.needs if key not in batch]
    if missing:
        raise DataError(
            f"objective.kind = {recipe.objective.kind()} needs {', '.join(missing)} in a batch, and the encoder gives "
            f"{', '.join(batch)}. Choose another data.encode."
        )
    proofs = recipe.objective.check(module, to_device(batch, world.device))
    reshard(module)
    return proofs


def _evaluation_inputs(
    recipe: Recipe, ground: Ground, module: nn.Module, validation: Loader | None, world: World, console: Console
) -> EvaluationInputs:
    return EvaluationInputs(
        model=module,
        objective=recipe.objective,
        aux={},
        batches=validation.once if validation else (lambda: iter(())),
        num_batches=validation.num_batches if validation else 0,
        processor=ground.processor,
        sum_over_ranks=reduce.sum_over_ranks,
        device=world.device,
        bar=console.validation_bar,
    )


def _meters(flops: float, world: World, progress: Progress) -> Meters:
    peak = peak_flops(torch.cuda.get_device_name(world.device)) if world.device.type == "cuda" else None
    return Meters(
        flops_per_token=flops,
        peak_flops=peak,
        ranks=world.size,
        samples=progress.samples,
        tokens=progress.tokens,
        seconds=progress.seconds,
    )
