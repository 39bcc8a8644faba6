"""From a recipe to a finished run: start the ranks, or be one of them.

`train` is what the command calls; `execute` is what a started rank does. Must not know how parts work.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullshard.checkpoint import folder as files
from fullshard.checkpoint import integrity, paths
from fullshard.checkpoint.folder import write_json
from fullshard.commands import rerun
from fullshard.config.part import plain
from fullshard.contracts.caller import NOBODY, Caller
from fullshard.contracts.launcher import Ranks, Restarts
from fullshard.contracts.progress import Progress, Result
from fullshard.control.resume import candidates, choose
from fullshard.dialects.kubeflow_progress import Status, told
from fullshard.dist import env
from fullshard.errors import EXIT_DONE, EXIT_PREEMPTED, CheckpointError, FullshardError, NumericalError
from fullshard.explain import crash
from fullshard.explain.error_file import REPORTED_BY_LAUNCHER
from fullshard.explain.host_memory import reported_if_killed
from fullshard.faults import restarts, resume_again, watchdog
from fullshard.formatting.plural import counted
from fullshard.launch import signals
from fullshard.profile.recorder import profiled
from fullshard.recipe import Recipe
from fullshard.recipes.read import Reading, hand_on, run_facts, save_resolved

if TYPE_CHECKING:
    from fullshard.contracts.world import World
    from fullshard.log.console import Console
    from fullshard.setup.inputs import RunInputs


def train(reading: Reading, *, resume: str, ranks: Ranks, anyway: bool = False) -> int:
    """Runs the recipe on these ranks; returns the exit code. A single rank that is not restarted needs no launcher."""
    batch, most = reading.recipe.batch, restarts.allowed(reading.recipe.topology.restarts)
    if ranks.per_node * ranks.nodes == 1 and not most:
        if ranks.device_ids:
            os.environ["CUDA_VISIBLE_DEVICES"] = str(ranks.device_ids[0])
        return join(reading, resume=resume, anyway=anyway)
    with signals.temporary_folder() as folder:
        # The ranks read the recipe as it was merged here, so that all of them and we mean the same.
        merged = folder / f"{reading.recipe.name}.yaml"
        hand_on(reading, merged)
        command = [sys.executable, "-m", "fullshard", "train", str(merged), "--resume", resume]
        command += ["--resume-anyway"] if anyway else []
        again = Restarts(most, batch.per_device, batch.global_size)
        return reading.recipe.topology.launcher.start(command, replace(ranks, restarts=again))


def join(reading: Reading, *, resume: str, anyway: bool = False) -> int:
    """Runs this process's rank of the recipe; returns the exit code."""
    alone = REPORTED_BY_LAUNCHER not in os.environ  # no launcher of ours says how this process was killed
    with reported_if_killed(int(os.environ.get("RANK", 0))) if alone else contextlib.nullcontext():
        result = execute(reading, resume=resume, anyway=anyway)
    return EXIT_PREEMPTED if result.stopped == "signal" else EXIT_DONE


def execute(reading: Reading, *, resume: str, anyway: bool = False, caller: Caller = NOBODY) -> Result:
    """One rank of the run, from the environment check to the last line."""
    from fullshard.log.libraries import write_nccl_log
    from fullshard.setup.rank_of_run import as_rank

    def preflight(inputs: RunInputs, launch: env.Launch, console: Console) -> None:
        from fullshard.check.preflight import before_ranks_meet

        before_ranks_meet(reading, inputs, Ranks(launch.local_world, launch.num_nodes), console=console)

    recipe = reading.recipe
    try:
        if recipe.log.debug:
            write_nccl_log(recipe.folder, env.detect(os.environ).rank, trace=recipe.log.debug == "trace")
        options = {"--resume": resume, "--resume-anyway": str(anyway)}
        with (
            as_rank(reading, preflight=preflight, options=options) as (inputs, world, console),
            _claimed(recipe, world, console=console),
        ):
            return _run(reading, inputs, world, resume=resume, anyway=anyway, caller=caller, console=console)
    except BaseException as error:  # torch's CheckpointException is not an Exception
        rank, size = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
        crash.report(error, folder=recipe.folder, rank=rank, world=size)
        raise


def _run(
    reading: Reading, inputs: RunInputs, world: World, *, resume: str, anyway: bool, caller: Caller, console: Console
) -> Result:
    """Everything after the ranks have met."""
    from fullshard import build, loop
    from fullshard.check.gpu_use import gpu_use
    from fullshard.check.units import dtype_line
    from fullshard.log.report import Report
    from fullshard.plan.ahead import Ahead
    from fullshard.setup.run_inputs import resume_run
    from fullshard.setup.run_summary import header_rows, resolved

    recipe = reading.recipe
    checkpoint, exported = _start(reading, world, resume=resume, console=console)
    point = resume_run(recipe, inputs, checkpoint, anyway=anyway)
    for note in point.notes:
        console.note(note)
    progress = point.progress
    out_of_patience = progress.validations_without_gain >= (recipe.evaluate.patience or math.inf)
    if progress.finished and (progress.step >= inputs.plan.total_steps or out_of_patience):
        if exported or not recipe.checkpoint.at_end:
            return _say_finished(reading, progress, console, out_of_patience=out_of_patience)
        progress.settled = False  # ended between the last save and the export: do the end again
    progress.finished = False
    console.open_log(recipe.folder / "log.txt", rank=world.rank, debug=bool(recipe.log.debug))
    with contextlib.ExitStack() as ending:
        ending.enter_context(watchdog.watching(recipe.folder, world, ends=world.size > 1 or signals.in_command()))
        write = ending.enter_context(_writing(reading, world, progress, console, caller))
        stage = (reading.place.number, reading.place.of) if reading.place else (1, 1)
        status, listening = Status(inputs.plan.total_steps, stage=stage), os.environ if world.is_main else {}
        write = ending.enter_context(told(write, status, environ=listening, warn=console.warn))
        ahead = Ahead(recipe, inputs.module, world)
        write = ending.enter_context(ahead.beside(write, console.say))
        report = Report(console, write, world, gpu_use(world))
        built = build.build(recipe, inputs, world, checkpoint=checkpoint, progress=progress, report=report)
        saver, units = built.parts.saves.saver, built.model.units
        ending.callback(saver.close)
        built.parts.saves.asked = caller.save_asked
        watchdog.note(built.model.module)
        if world.is_main:
            in_force = resolved(recipe, inputs, world, built)
            save_resolved(in_force, recipe.folder / "recipe.resolved.yaml", facts=run_facts(reading))
            write_json(recipe.folder / "units.json", {"units": [unit.as_dict() for unit in units]})
        title = reading.place.title if reading.place else recipe.name
        console.header(f"fullshard: {title}", header_rows(recipe, inputs, world, built, checkpoint, ahead.of(built)))
        total, trainable = sum(unit.parameters for unit in units), sum(unit.trainable for unit in units)
        console.say(f"FSDP dtype check: {dtype_line(units)}")
        console.parameter_summary(total=total, trainable=trainable, frozen=total - trainable)
        try:
            with signals.StopSignals() as stop, profiled(built.parts, recipe.folder, world, console.say) as parts:
                result = loop.fit(parts, stop_asked=lambda: stop.heard is not None or caller.stop_asked())
                result = replace(result, adapted=bool(recipe.model.adapters(built.model.module)))
        except NumericalError as error:
            raise NumericalError(f"{error} {saver.newest()}") from error
        write({"kind": "event", "event": "finished", **asdict(result)})
        _say_next(reading, result, console)
        caller.keep(built.model.module)
    if world.is_main:
        paths.send_texts(recipe.folder, recipe.checkpoints, warn=console.warn)
    return result


@contextlib.contextmanager
def _writing(
    reading: Reading, world: World, progress: Progress, console: Console, caller: Caller
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Writes records to metrics.jsonl and the sinks, on rank 0."""
    from fullshard.log.all_sinks import Sinks
    from fullshard.log.metrics import FILE, Metrics

    if not world.is_main:
        yield lambda record: None
        return
    recipe, place = reading.recipe, reading.place
    folder, name = recipe.folder, place.label if place else recipe.name
    with contextlib.ExitStack() as opened:

        def open_at(step: int) -> list[Callable[[dict[str, Any]], None]]:
            metrics = opened.enter_context(contextlib.closing(Metrics(folder / FILE, step=step)))
            sinks = Sinks(recipe.log.sinks, folder, name=name, recipe=plain(recipe), warn=console.warn)
            return [metrics.write, opened.enter_context(contextlib.closing(sinks)).write, caller.write]

        def write(record: dict[str, Any]) -> None:
            if record.get("event") == "rollback":  # as for a run that resumes there: no curve doubles back
                opened.close()
                writers[:] = open_at(record["step"])
            for each in writers:
                each(place.marked(record) if place else record)

        writers = open_at(progress.step)
        for found in restarts.records(folder / FILE):
            write({"step": progress.step, **found})
        yield write


@contextlib.contextmanager
def _claimed(recipe: Recipe, world: World, *, console: Console) -> Iterator[None]:
    """Keeps every other run out of the run folder; rank 0 holds the lock."""
    with contextlib.ExitStack() as held:
        _on_main(recipe, world, lambda: _lock(recipe, held, console=console))
        yield


def _lock(recipe: Recipe, held: contextlib.ExitStack, *, console: Console) -> None:
    recipe.output.mkdir(parents=True, exist_ok=True)
    try:
        held.enter_context(files.claim(recipe.folder))
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        console.warn(f"{recipe.output} has no file locks: make sure that no other run uses {recipe.folder}.")


def _on_main(recipe: Recipe, world: World, act: Callable[[], Any]) -> Any:
    """What `act` returns on rank 0, for every rank. Its error is raised on every rank."""
    from fullshard.dist import reduce

    found: Any = None
    problem: str | None = None
    if world.is_main:
        try:
            found = act()
        except FullshardError as error:
            problem = str(error)
        except OSError as error:
            problem = (
                f"output = {str(recipe.output)!r}: the run folder {recipe.folder} cannot be made or written there "
                f"({error.strerror or error}). Choose a folder that you may write to: output=DIR, or --output DIR."
            )
    found, problem = reduce.from_main((found, problem))
    if problem:
        raise CheckpointError(problem)
    return found


def _start(reading: Reading, world: World, *, resume: str, console: Console) -> tuple[Path | None, bool]:
    """The checkpoint to resume from, and whether a model was exported. Starting over moves an earlier run aside."""
    from fullshard.dist import reduce

    recipe, later = reading.recipe, reading.place.later if reading.place else ()
    found = _on_main(recipe, world, lambda: _earlier(recipe, later, resume=resume, console=console))
    among, exported, resume = found

    def problems(checkpoint: Path) -> list[str]:
        mine = integrity.problems(checkpoint, rank=world.rank, world=world.size)
        return sorted({line for lines in reduce.gather_objects(mine) for line in lines})

    checkpoint = choose(among, resume, problems=problems, warn=console.warn)
    if checkpoint is not None:
        console.say(f"Resuming from {checkpoint}, whose files are complete.")
    return checkpoint, exported


def _earlier(recipe: Recipe, later: Sequence[str], *, resume: str, console: Console) -> tuple[list[Path], bool, str]:
    """What an earlier run of this name left: its checkpoints, and whether it has exported a model. To start over moves
    `later` folders too. `resume` comes back as it is after a restart."""
    place = recipe.checkpoints
    last = functools.partial(files.pointed, place, "last")
    resume = resume_again.resume(resume, recipe.folder, last)
    if resume == "never":
        for old in dict.fromkeys((recipe.folder, place, *map(files.place, later))):
            if files.is_remote(old):
                console.note(f"Starting over: an earlier run in {old} is moved aside, which may take a while.")
            with paths.reaching(old):
                if aside := files.set_aside(old):
                    console.say(f"Starting over: the earlier run is kept in {aside}.")
    recipe.folder.mkdir(parents=True, exist_ok=True)
    with paths.reaching(place):
        paths.fetch_texts(recipe.folder, place)
        files.recover(place)
        among = candidates(place, resume)
        if resume == "auto" and not among and files.published(recipe.folder):
            here = shlex.quote(str(recipe.folder))
            raise CheckpointError(
                f"{recipe.folder} has checkpoints of an earlier run, but checkpoint.store = "
                f"{recipe.checkpoint.store} has no checkpoint. Continue from them with --resume {here}, or start over "
                "with --resume never, which moves them aside."
            )
        resume_again.mark(resume, recipe.folder, last)
        return among, paths.is_exported(place), resume


def _say_finished(reading: Reading, progress: Progress, console: Console, *, out_of_patience: bool) -> Result:
    recipe = reading.recipe
    why = "it stopped early, out of patience" if out_of_patience else "the recipe asks for no more"
    done = f"{counted(progress.step, 'step')} {'is' if progress.step == 1 else 'are'} done"
    console.say(f"{recipe.folder} is finished: {done}, and {why}.")
    console.whole("  Start over (the finished run is moved aside, not deleted):")
    console.whole(f"    {rerun.command(reading, resume='never')}")
    console.whole("  Continue:")
    console.whole(f"    {rerun.go_on(reading, out_of_patience=out_of_patience)}")
    with contextlib.suppress(CheckpointError, OSError):
        return read_result(recipe.folder)
    return progress.result(recipe.folder, validation={}, stopped="done")


def _say_next(reading: Reading, result: Result, console: Console) -> None:
    if result.stopped == "signal":
        console.say(f"Stopped by a signal at step {result.step}, and saved. Run the same command again to continue:")
        console.whole(f"  {rerun.again(reading)}")
    elif reading.place is None or reading.place.is_last:
        console.next_steps(rerun.next_steps(reading, result))


def read_result(folder: Path) -> Result:
    """The result of the run in `folder`, from its metrics."""
    from fullshard.log.metrics import FILE, read

    for record in reversed(read(folder / FILE)):
        if record.get("event") == "finished":
            return Result(**{key: record[key] for key in Result.__dataclass_fields__ if key in record})
    raise CheckpointError(f"{folder} has no finished run.")
