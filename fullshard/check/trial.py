"""Section 5 of a check, on every rank: the real model trains on the longest batch, then a checkpoint is saved and read.

Everything is as in training, except the run folder: a hidden one beside it, removed at the end.
Every rank runs the same collectives. Must not know how findings are shown.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from fullshard import build
from fullshard.check.agreement import among_ranks
from fullshard.check.data import longest_batch
from fullshard.check.findings import Finding, error, ok, warning
from fullshard.checkpoint import folder as files
from fullshard.checkpoint import paths
from fullshard.contracts.objective import Batch
from fullshard.contracts.progress import Progress
from fullshard.contracts.world import World
from fullshard.dist import reduce
from fullshard.dist.gather import gather_tensor
from fullshard.dist.values import checksums
from fullshard.dist.world import peak_memory
from fullshard.errors import NumericalError
from fullshard.faults.out_of_memory import Stop
from fullshard.formatting.plural import counted
from fullshard.formatting.readable import duration, size
from fullshard.log.report import Report
from fullshard.recipe import Recipe
from fullshard.recipes.read import Reading
from fullshard.setup.built import Built
from fullshard.setup.inputs import RunInputs
from fullshard.setup.rank_of_run import as_rank, compared
from fullshard.step import seed_everything, train_step

MOST_OVERFLOWS = 20
"""fp16 starts with a loss scale of 65,536; after more halvings than this nothing is left of it."""
FULL = 0.92
"""Warn when the trial needs more than this share of a GPU: the allocator needs some slack."""
PROBE_BYTES = {"cuda": 64 * 2**20, "cpu": 4 * 2**20}
_ROUNDS = 3


def folder_of(recipe: Recipe) -> Path:
    """The run folder of the trial, on the same disk as the real one."""
    return recipe.output / f".check-{recipe.name}"


def clear(recipe: Recipe, made: Iterable[Path] = ()) -> None:
    """Removes what a trial left behind, in a remote store too, and the folders it made if they are empty."""
    folder = folder_of(recipe)
    shutil.rmtree(folder, ignore_errors=True)
    if recipe.checkpoint.store is not None:
        with contextlib.suppress(Exception):  # a store that fails has already failed the trial
            paths.remove(recipe.model_copy(update={"name": folder.name}).checkpoints)
    for path in made:
        with contextlib.suppress(OSError):
            path.rmdir()


def run_trial(reading: Reading) -> list[Finding]:
    """The findings of all ranks; the same list on every rank."""
    with as_rank(reading, silent=True) as (inputs, world, console):
        found = among_ranks(reading.recipe, world, compared(reading.recipe, inputs, world, {}))
        if any(finding.level == "error" for finding in found):
            return found
        with _hidden_folder(reading.recipe, world) as recipe:
            begun = time.perf_counter()
            report = Report(console, lambda record: None, world)
            built = build.build(recipe, inputs, world, checkpoint=None, progress=Progress(), report=report)
            found.append(ok("model in place", f"built, sharded and initialised in {time.perf_counter() - begun:.1f} s"))
            found += [ok("proven", proof) for proof in built.proofs]
            seconds, step = _step(recipe, inputs, world, built)
            found += step
            found += _memory(world)
            found += _exchange(world, built, seconds)
            found += _round_trip(world, built)
        agreed: list[Finding] = reduce.from_main(found)
        return agreed


@contextlib.contextmanager
def _hidden_folder(recipe: Recipe, world: World) -> Iterator[Recipe]:
    folder = folder_of(recipe)
    made = [path for path in (recipe.output, *recipe.output.parents) if not path.exists()] if world.is_main else []
    if world.is_main:
        clear(recipe)
        folder.mkdir(parents=True)
    reduce.any_rank(False, world.device)  # all ranks meet
    hidden = recipe.model_copy(update={"name": folder.name})
    try:
        yield hidden
    finally:
        if world.is_main:
            clear(recipe, made)


def _step(recipe: Recipe, inputs: RunInputs, world: World, built: Built) -> tuple[float, list[Finding]]:
    """Two full steps on the longest batch: the first is reported, the second is timed."""
    parts, batch = built.parts, longest_batch(inputs.data, per_device=built.plan.per_device)
    learner, results = replace(parts.learner, memory=Stop()), list[tuple[float, float]]()  # what does not fit is said
    overflows, seconds = 0, 0.0
    while len(results) < 2:
        seed_everything(recipe.seed, len(results), world.rank)
        begun = time.perf_counter()
        result = train_step(learner, [batch], lr_factor=parts.lr_factor(0, parts.total_steps))
        norm, loss = float(result.grad_norm), float(result.sums["loss"][0] / result.sums["loss"][1].clamp(min=1))
        seconds = time.perf_counter() - begun
        if result.skipped and (overflows := overflows + 1) <= MOST_OVERFLOWS:
            continue
        if not torch.isfinite(torch.tensor([norm, loss])).all():
            raise NumericalError(
                f"On the longest batch of data.train the loss is {loss} and the gradient norm {norm}; both must be "
                "finite. Inspect the longest records, lower optimizer.lr, or try precision: fp32."
            )
        results.append((loss, norm))
    text = f"{_shape(batch)} forward, backward and update on every rank: loss {results[0][0]:.4f}"
    text += f", gradient norm {results[0][1]:.3g}; every trained parameter has a finite gradient, weights moved"
    found = [ok("longest batch", text)]
    if (scaler := parts.learner.scaler) is not None:
        found.append(ok("loss scale", f"{scaler.get_scale():g} after {counted(overflows, 'overflow')}"))
    whole = seconds * built.plan.accumulate * inputs.plan.total_steps
    per_step = f"at most {seconds * built.plan.accumulate:.2f} s per step"
    found.append(ok("time", f"{per_step}, {duration(whole)} for all {counted(inputs.plan.total_steps, 'step')}"))
    return seconds, found


def _shape(batch: Batch) -> str:
    if "input_ids" in batch:
        return f"{' x '.join(map(str, batch['input_ids'].shape))} tokens"
    return f"{len(batch['sample_ids'])} samples"


def _memory(world: World) -> list[Finding]:
    peaks = reduce.gather_objects(peak_memory(world.device))
    highest = max(range(len(peaks)), key=peaks.__getitem__)
    where = f", on rank {highest}" if len(peaks) > 1 else ""
    if world.device.type != "cuda":
        return [ok("memory", f"process memory peaks at {size(peaks[highest])}{where}")]
    total = torch.cuda.get_device_properties(world.device).total_memory
    text = f"peak {size(peaks[highest])} of {size(total)}{where}"
    if peaks[highest] <= FULL * total:
        return [ok("memory", text)]
    advice = "Lower batch.per_device and raise batch.accumulate, or set sharding.activation_checkpointing: full."
    return [warning("memory", f"{text}: more than {FULL:.0%}; a longer run may run out of memory.", advice)]


def _exchange(world: World, built: Built, seconds: float) -> list[Finding]:
    """The speed of an all-gather, and its share of a step."""
    if world.size == 1:
        return [ok("exchange", "one rank: nothing to exchange")]
    speed = _all_gather_speed(world, num_bytes=PROBE_BYTES[world.device.type])
    layout, units = built.model.plan.layout, built.model.units
    low = torch.finfo(built.model.precision.compute).bits // 8
    # Parameters are gathered in the compute dtype, once per pass; gradients are reduced in fp32.
    gathers = (2 if layout.reshard_after_forward else 1) * low * sum(unit.parameters for unit in units)
    share = (layout.shards - 1) / layout.shards if layout.shards > 1 else 1.0
    sent = share * (gathers * (layout.shards > 1) + 4 * sum(unit.trainable for unit in units))
    text = (
        f"{size(int(speed))}/s per rank ({world.backend}); a micro-batch moves {size(int(sent))}, about "
        f"{sent / speed:.2f} s of its {seconds:.2f} s"
    )
    if world.device.type == "cuda" and sent / speed > seconds:
        remedy = "Use sharding.strategy: hybrid (several nodes) or grad_op, a larger batch.per_device, or check the "
        remedy += "links between GPUs and nodes."
        return [warning("exchange", f"{text}: the network limits the speed.", remedy)]
    return [ok("exchange", text)]


def _all_gather_speed(world: World, *, num_bytes: int) -> float:
    """Bytes per second that the slowest rank receives in an all-gather of `num_bytes`; the best of a few.

    An all-gather, because FSDP sends most of its bytes that way."""
    device = world.device
    share = torch.zeros(max(num_bytes // world.size, 1), dtype=torch.uint8, device=device)
    whole = torch.empty(share.numel() * world.size, dtype=torch.uint8, device=device)
    best = float("inf")
    for _ in range(_ROUNDS + 1):  # the first one opens connections
        reduce.any_rank(False, device)  # all ranks meet
        begun = time.perf_counter()
        gather_tensor(whole, share)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        slowest = max(reduce.gather_objects(time.perf_counter() - begun))
        best = min(best, slowest)
    return share.numel() * (world.size - 1) / best


def _round_trip(world: World, built: Built) -> list[Finding]:
    """Saves, wipes, loads, compares."""
    saver = built.parts.saves.saver
    parameters = [p for name, p in built.model.module.named_parameters() if name not in saver.left_out]
    before = checksums(parameters)
    begun = time.perf_counter()
    saver.save(Progress(step=1), best=False, now=True)
    written = time.perf_counter() - begun
    with torch.no_grad():
        for parameter in parameters:
            parameter.zero_()
    begun = time.perf_counter()
    checkpoint = files.named(saver.target.run)
    saver.restore(checkpoint)
    read = time.perf_counter() - begun
    num_bytes = sum(int(entry["size_bytes"]) for entry in files.read_manifest(checkpoint)["files"].values())
    # The last collective: after it rank 0 deletes everything.
    equal = all(reduce.gather_objects(bool((checksums(parameters) == before).all())))
    where = saver.target.run.parent
    if not equal:
        remedy = "The storage corrupts data: check it, or choose another folder with output=DIR."
        return [error("checkpoint", f"A checkpoint written to {where} came back with different values.", remedy)]
    text = f"{size(num_bytes)} written to {where} in {written:.1f} s, read back in {read:.1f} s, all values equal"
    return [ok("checkpoint", text)]
