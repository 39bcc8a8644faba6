"""Section 1 of a check: whether this machine has what the recipe needs, and which parts of it the run will use.

Facts come as a Machine, so that tests can describe any hardware; nothing is started and no GPU is touched.
Must not know how parts work, nor data.
"""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from packaging.version import Version

from fullshard.check import remote_store
from fullshard.check.capacity import nearest_existing
from fullshard.check.findings import Finding, error, of, ok, warning
from fullshard.check.kernels import attention, compiler
from fullshard.check.machine import Gpu, Machine, inspect
from fullshard.contracts.launcher import Ranks
from fullshard.dist.env import ranks_for
from fullshard.dist.precision import ResolvedPrecision, resolve_for
from fullshard.errors import RecipeError, SetupError
from fullshard.faults.micro_batch import USUAL, usual
from fullshard.formatting.plural import counted
from fullshard.formatting.readable import size
from fullshard.kernels import float8
from fullshard.recipe import Recipe
from fullshard.setup.run_inputs import cache_folder

OLDEST_PYTHON = (3, 11)
TORCH = (Version("2.11"), Version("2.16"))
"""From the first up to, but not including, the second; as in the package's requirements."""
FEW_FILES = 1024
"""Loader processes and checkpoints keep files open; below this limit they may run out."""
SMALL_CACHE = 2**28
"""Warn when fewer bytes are free for tokenised data."""

SLOWING = {
    "CUDA_LAUNCH_BLOCKING": ("1", "every kernel waits for the previous one, which is for debugging"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("1", "every tensor asks the driver for memory"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "every collective is checked over all ranks"),
    "NCCL_P2P_DISABLE": ("1", "GPUs of one machine do not talk to each other directly, not even over NVLink"),
    "NCCL_IB_DISABLE": ("1", "nodes talk over plain sockets, not over InfiniBand"),
    "TORCHDYNAMO_DISABLE": ("1", "nothing is compiled, whatever sharding.compile says"),
}
"""Variables with the value that costs speed, and why."""


def look(
    recipe: Recipe, ranks: Ranks | None, *, machine: Machine | None = None, environ: Mapping[str, str] = os.environ
) -> Iterator[Finding]:
    """The findings about this machine, before the ranks meet. `ranks` is None if the devices that the recipe asks for
    do not exist: that becomes a finding."""
    machine = machine or inspect()
    topology = recipe.topology
    on_gpu = bool(machine.gpus) and topology.device != "cpu"
    yield from _software(machine)
    if ranks is None:
        # Only before the launch: a rank sees just the GPUs it was given, numbered from 0 again.
        try:
            ranks = ranks_for(topology.model_copy(update={"nodes": 1}), num_gpus=len(machine.gpus))
        except SetupError as mistake:
            yield error("devices", str(mistake), _visibility_hint(environ))
            ranks = Ranks(per_node=max(len(machine.gpus), 1))
    gpus = machine.used(ranks) if on_gpu else []
    if on_gpu:
        yield from _gpus(machine, gpus, ranks, backend=topology.backend)
    elif topology.device != "cuda":
        yield from _cpu(machine, ranks, topology.device, environ)
    if gpus or not on_gpu and topology.device != "cuda":
        yield from _computing(recipe, machine, gpus)
    yield from _packages(recipe, machine)
    yield from _variables(environ, gpus=len(gpus), nodes=ranks.nodes, compiled=recipe.sharding.compile)
    yield from _hub(recipe, environ)
    yield from _folders(recipe)
    yield from remote_store.look(recipe, num_ranks=ranks.per_node * ranks.nodes)
    yield from _limits(recipe, machine, ranks, on_gpu=on_gpu)


def _computing(recipe: Recipe, machine: Machine, gpus: list[Gpu]) -> Iterator[Finding]:
    """Precision and kernels."""
    found, precision = _precision(recipe.precision, gpus)
    yield found
    kernel = recipe.model.attention_kernel()
    if precision is not None and kernel is not None:
        yield from attention(kernel, packed=recipe.data.pack, gpus=gpus, precision=precision, machine=machine)
    yield from compiler(recipe, machine, on_gpu=bool(gpus))


def _software(machine: Machine) -> Iterator[Finding]:
    found = ".".join(map(str, machine.python))
    if machine.python < OLDEST_PYTHON:
        wanted = ".".join(map(str, OLDEST_PYTHON))
        text = f"Python {found}; {wanted} or newer is required."
        yield error("Python", text, f"Create an environment with Python {wanted}.")
    else:
        yield ok("Python", found)
    release = Version(Version(machine.torch).base_version)
    if not TORCH[0] <= release < TORCH[1]:
        text = f"torch {machine.torch}; fullshard is tested with {TORCH[0]} up to, but not including, {TORCH[1]}."
        yield warning("torch", text, f"Install a tested version: pip install 'torch>={TORCH[0]},<{TORCH[1]}'")
    else:
        yield ok("torch", machine.torch)


def _visibility_hint(environ: Mapping[str, str]) -> str:
    if (visible := environ.get("CUDA_VISIBLE_DEVICES")) is None:
        return "List the GPUs of this machine with nvidia-smi."
    return f"CUDA_VISIBLE_DEVICES={visible or repr('')} decides which GPUs torch sees: change or unset it."


def _cpu(machine: Machine, ranks: Ranks, device: str, environ: Mapping[str, str]) -> Iterator[Finding]:
    if machine.gpus:
        idle = counted(len(machine.gpus), "GPU")
        yield ok("devices", f"training on CPU, gloo, as topology.device says; {idle} not used")
    elif machine.driver and device == "auto":
        if machine.cuda is None:
            why, remedy = "this torch was built without CUDA", "Install a CUDA build of torch: https://pytorch.org"
        elif "CUDA_VISIBLE_DEVICES" in environ:
            why, remedy = "they may be hidden", _visibility_hint(environ)
        else:
            why = f"the driver may be too old for CUDA {machine.cuda}, or the container has no access to the GPUs"
            remedy = "Check with nvidia-smi, and update the driver."
        text = f"the NVIDIA driver {machine.driver} is installed, but torch sees no GPU ({why}): training on CPU, gloo."
        yield warning("devices", text, f"{remedy} To train on the CPU anyway, set topology.device=cpu.")
    else:
        yield ok("devices", "no GPU: training on CPU, gloo")
    if ranks.per_node > machine.cores:
        text = f"{counted(ranks.per_node, 'rank')} on {counted(machine.cores, 'core')}: they wait for each other."
        yield warning("cores", text, f"Use --devices {machine.cores} at most; batch.global keeps the step the same.")
    else:
        yield ok("cores", f"{counted(machine.cores, 'core')} for {counted(ranks.per_node, 'rank')}")


def _gpus(machine: Machine, gpus: list[Gpu], ranks: Ranks, *, backend: str) -> Iterator[Finding]:
    nccl = f", NCCL {machine.nccl or 'unknown'}" if backend != "gloo" else ", gloo"
    yield ok("CUDA", f"CUDA {machine.cuda or 'unknown'}, driver {machine.driver or 'unknown'}{nccl}")
    kinds = {gpu.describe(): gpu for gpu in gpus}
    if len({(gpu.name, gpu.capability) for gpu in gpus}) > 1:
        remedy = "All ranks wait for the slowest, and the smallest memory decides the batch. Choose GPUs of one kind "
        remedy += "with --gpus, such as --gpus 0,1."
        yield warning("GPUs", f"the GPUs are not of one kind: {'; '.join(kinds)}.", remedy)
    else:
        shared = (
            f", shared by {counted(ranks.per_node, 'rank')}" if backend == "gloo" and ranks.per_node > len(gpus) else ""
        )
        yield ok("GPUs", f"{len(gpus)} of {len(machine.gpus)}: {next(iter(kinds))}{shared}")
    if len(gpus) > 1:
        yield _links(machine, ranks.device_ids or range(len(gpus)))


def _links(machine: Machine, numbers: range | tuple[int, ...]) -> Finding:
    pairs = [(min(a, b), max(a, b)) for i, a in enumerate(numbers) for b in numbers[i + 1 :]]
    found = [machine.links.get(pair) if machine.links else None for pair in pairs]
    if None in found:
        return ok("GPU links", "unknown: nvidia-smi does not say how the GPUs are connected")
    kinds = ", ".join(sorted({str(link) for link in found}))
    joined = sum(str(link).startswith("NV") for link in found)
    if joined == len(pairs):
        return ok("GPU links", f"NVLink between all GPUs ({kinds})")
    if joined == 0:
        return ok("GPU links", f"no NVLink: the GPUs talk over PCIe ({kinds})")
    return ok("GPU links", f"NVLink between {joined} of {counted(len(pairs), 'pair')}, the others over PCIe ({kinds})")


def _precision(word: str, gpus: list[Gpu]) -> tuple[Finding, ResolvedPrecision | None]:
    """The finding, and the precision if it resolves to the same one on all GPUs."""
    resolved: dict[str, tuple[ResolvedPrecision, str]] = {}
    places: list[tuple[tuple[int, int] | None, str]] = [(gpu.capability, gpu.name) for gpu in gpus]
    for capability, name in places or [(None, "the CPU")]:
        try:
            found = resolve_for(word, capability=capability, name=name)
        except SetupError as mistake:
            return of("precision", mistake), None
        resolved.setdefault(found.word, (found, name))
    if len(resolved) > 1:
        became = ", ".join(f"{became} on {name}" for became, (_, name) in resolved.items())
        text = f"precision = {word} means different things on these GPUs: {became}. All ranks need the same one."
        return error("precision", text, "Set precision: fp16 or fp32, or choose GPUs of one kind with --gpus."), None
    precision, _ = next(iter(resolved.values()))
    if precision.word == "bf16-pure":
        remedy = "Use precision: bf16 unless you run out of memory."
        return warning("precision", str(precision.warning()), remedy), precision
    return ok("precision", precision.describe()), precision


def _packages(recipe: Recipe, machine: Machine) -> Iterator[Finding]:
    for unmet in machine.unmet_requirements:
        yield error("packages", f"{unmet}.", "Install the required versions: pip install --upgrade fullshard")
    optimizer, sinks = recipe.optimizer, recipe.log.sinks
    needed = [(f"optimizer.kind = {optimizer.kind()}", *package) for package in optimizer.packages.items()]
    needed += [(f"precision = {recipe.precision}", *package) for package in float8.packages(recipe.precision).items()]
    needed += [(f"log.sinks: {sink.kind()}", *package) for sink in sinks for package in sink.packages().items()]
    missing = [wanted for wanted in needed if not machine.has(wanted[1])]
    for part, package, name in missing:
        text = f"{part} needs the package {package}, which is not installed."
        yield error("packages", text, f"Install it with: pip install {shlex.quote(name)}")
    if not missing and not machine.unmet_requirements:
        optional = "".join(f", {package} for {part}" for part, package, _ in needed)
        yield ok("packages", f"everything that the recipe needs{optional}")


def _variables(environ: Mapping[str, str], *, gpus: int, nodes: int, compiled: bool | None) -> Iterator[Finding]:
    matters = {
        "CUDA_LAUNCH_BLOCKING": gpus > 0,
        "PYTORCH_NO_CUDA_MEMORY_CACHING": gpus > 0,
        "NCCL_P2P_DISABLE": gpus > 1,
        "NCCL_IB_DISABLE": gpus > 0 and nodes > 1,
        "TORCHDYNAMO_DISABLE": gpus > 0 if compiled is None else compiled,
    }
    slowing = [
        (name, value, why)
        for name, (value, why) in SLOWING.items()
        if environ.get(name, "").upper() == value and matters.get(name, True)
    ]
    for name, value, why in slowing:
        yield warning("variables", f"{name}={value}: {why}.", f"Unless you need it: unset {name}")
    if not slowing:
        yield ok("variables", "none that slow down training")


def _hub(recipe: Recipe, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Without network access, a hub name must be in the hub's cache."""
    from fullshard.hf.hub import local_folder

    switches = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    offline = [name for name in switches if environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")]
    for where, (name, revision) in recipe.model.hub_names().items():
        if not offline or Path(name).expanduser().is_dir():
            continue
        try:
            local_folder(name, revision=revision, where=where)
        except SetupError as mistake:
            yield error("hub", f"{offline[0]} is set, and {mistake}", f"Or allow the download: unset {offline[0]}")
        except RecipeError:
            continue  # a path, not a hub name: the model section reports it
        else:
            yield ok("hub", f"{name} is in the hub's cache")


def _folders(recipe: Recipe) -> Iterator[Finding]:
    """Whether the run folder (or its parent) and the data cache can be written."""
    run = recipe.folder
    if run.exists() and not run.is_dir():
        text = f"{run} is a file where the run folder must be: output = {str(recipe.output)!r}, name = {recipe.name!r}."
        yield error("output", text, "Choose another name=NAME or output=DIR, or move the file.")
        run = recipe.output
    for check, key, folder in (
        ("output", f"output = {str(recipe.output)!r}", run if run.exists() else recipe.output),
        ("data cache", f"data.cache = {str(cache_folder(recipe))!r}", cache_folder(recipe)),
    ):
        existing = nearest_existing(folder)
        try:
            with tempfile.TemporaryFile(dir=existing) as file:
                file.write(b"fullshard")
                file.flush()
        except OSError as problem:
            remedy = f"Choose a folder that you may write to: {'output' if check == 'output' else 'data.cache'}=DIR."
            yield error(check, f"{key}: {existing} cannot be written ({problem.strerror or problem}).", remedy)
            continue
        free = shutil.disk_usage(existing).free
        if check == "data cache" and free < SMALL_CACHE:
            text = f"{key}: {size(free)} free, and tokenised data takes about twice the size of its text."
            yield warning(check, text, "Free some space, or set data.cache to a folder on another disk.")
        else:
            yield ok(check, f"{folder} can be written, {size(free)} free")


def _limits(recipe: Recipe, machine: Machine, ranks: Ranks, *, on_gpu: bool) -> Iterator[Finding]:
    workers = recipe.data.workers if recipe.data.workers is not None else (2 if on_gpu else 0)
    if workers and machine.shm_bytes is not None:
        # A worker keeps two batches ready; a batch has at least three arrays of 8-byte numbers.
        batch = 3 * 8 * usual(recipe.batch.per_device, USUAL) * recipe.data.sequence_length
        needed = ranks.per_node * workers * 2 * batch
        text = f"{size(machine.shm_bytes)} free in /dev/shm, {size(needed)} needed for the batches of {workers} workers"
        if needed > machine.shm_bytes:
            remedy = "Start the container with more (--shm-size=8g or --ipc=host), or set data.workers=0."
            yield error("shared memory", f"{text} of {counted(ranks.per_node, 'rank')}.", remedy)
        else:
            yield ok("shared memory", text)
    if machine.open_files < FEW_FILES:
        problem = f"a process may open {counted(machine.open_files, 'file')}; at least {FEW_FILES} are recommended."
        yield warning("open files", problem, "Raise the limit before starting: ulimit -n 65536")
