"""`train`, `check` and `prove` for a recipe with stages: the command once for each stage, and one outcome.

A command is handed in as a function and ends by raising typer.Exit, as it does for a recipe without stages.
Must not know what the commands do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

from fullshard.config.part import plain
from fullshard.contracts.launcher import Topology
from fullshard.dist import env
from fullshard.errors import EXIT_DONE, FullshardError, RecipeError
from fullshard.formatting.yaml_text import render
from fullshard.recipe import Recipe
from fullshard.stages.hand_over import from_proof
from fullshard.stages.in_turn import Stage, named, stages_of, train_in_turn
from fullshard.stages.stand_in import ProcessorOf, stand_ins
from fullshard.stages.start import checkpoint_of

Command = Callable[..., None]
"""`train`, `check` or `prove`, with its arguments as one object that has `read`, and its own options."""


def run_stages(asked: Any, command: Command, given: Mapping[str, Any], *, processor_of: ProcessorOf) -> bool:
    """Runs a command for every stage of the recipe, or for the one of `--stage`; False for a recipe without stages."""
    try:
        # What a user's module prints when it is imported is not part of a JSON report.
        with contextlib.redirect_stdout(sys.stderr if given.get("as_json") else sys.stdout):
            reading = asked.read()
    except FullshardError:
        return False  # the command reads it again and reports the error in its own way
    if not reading.recipe.stages:
        if asked.stage is not None:
            raise RecipeError(f"--stage {asked.stage}: {asked.recipe} has no stages. Leave the option out.")
        return False
    if command.__name__ == "submit":
        return False  # one job trains them all
    if command.__name__ == "train" and not given.get("dry_run"):
        _train(asked, reading, command, given)
    else:
        proving = _proofs(reading.recipe) if command.__name__ == "prove" else contextlib.nullcontext()
        with (
            tempfile.TemporaryDirectory(prefix="fullshard-") as folder,
            _connected(reading.recipe.topology),
            proving as proofs,
        ):
            _each(asked, reading, command, given, Path(folder), processor_of, proofs)
    return True


def _train(asked: Any, reading: Any, command: Command, given: Mapping[str, Any]) -> None:
    def run(stage: Stage, resume: str) -> None:
        if stage.place.number > 1:
            _say("")
        code = _code(lambda: command(_chosen(asked, stage), **{**given, "resume": resume}))
        if code != EXIT_DONE:
            raise typer.Exit(code)

    only = named(reading.recipe, asked.stage).place.name if asked.stage else None
    again = _again(reading.typed)
    with _connected(reading.recipe.topology):
        how = {"resume": given["resume"], "anyway": given["resume_anyway"], "only": only}
        trained = train_in_turn(reading.recipe, run, command=again, say=_say, **how)
    if not trained:
        _say(f"Every stage is finished. Start over (the stages are moved aside, not deleted):\n  {again(None)}")
    raise typer.Exit(EXIT_DONE)


@contextlib.contextmanager
def _connected(topology: Topology) -> Iterator[None]:
    """The ranks of a launcher meet once, for all stages. Ranks that fullshard starts meet anew for each."""
    launch = env.detect(os.environ)
    if launch.world == 1:
        yield
        return
    from fullshard.dist import world

    env.export(launch)
    world.join(device=topology.device, backend=topology.backend, timeout_s=topology.timeout_s)
    try:
        yield
    finally:
        world.leave(at_exit=True)


def _again(typed: Any) -> Callable[[str | None], str]:
    """The command that trains one stage, or all of them from the start."""
    words = list(typed.command)
    if "--stage" in words:
        del words[words.index("--stage") : words.index("--stage") + 2]

    def command(stage: str | None) -> str:
        more = ("--stage", stage) if stage else ("--resume", "never")
        return str(dataclasses.replace(typed, command=(*words, *more)).again())

    return command


def _chosen(asked: Any, stage: Stage) -> Any:
    """The arguments of a command as those of one stage."""

    def pick(reading: Any) -> Any:
        notes = tuple(reading.notes.get(stage.place.name, ()))
        return dataclasses.replace(reading, recipe=stage.recipe, place=stage.place, overridden=notes)

    return dataclasses.replace(asked, pick=pick)


@contextlib.contextmanager
def _proofs(recipe: Recipe) -> Iterator[Path]:
    """A folder for the runs that later stages start from, on the disk of the run; removed at the end, with parents that
    did not exist before."""
    output = Path(tempfile.gettempdir()) if "://" in str(recipe.output) else recipe.output.absolute()
    new = [path for path in (output, *output.parents) if not path.exists()]
    folder = output / f".prove-{recipe.name}-{os.getpid()}"
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for path in new:
            with contextlib.suppress(OSError):
                path.rmdir()


def _each(
    asked: Any,
    reading: Any,
    command: Command,
    given: Mapping[str, Any],
    folder: Path,
    processor_of: ProcessorOf,
    proofs: Path | None,
) -> None:
    """Looks at every stage, at one that cannot start yet by the structure of the stage before it. A proof starts it
    from the proof of that stage."""
    every = stages_of(reading.recipe)
    one = named(reading.recipe, asked.stage).place.name if asked.stage else None
    instead = stand_ins([stage.recipe for stage in every], folder, processor_of=processor_of)
    codes, reports, steps = [], {}, {}
    for stage, recipe in zip(every, instead, strict=True):
        if one in (None, stage.place.name):
            if recipe is not stage.recipe and (run := _run_before(stage.recipe, proofs)):
                recipe = from_proof(stage.recipe, run)
            if not given.get("as_json"):
                _title(stage, recipe, dry=bool(given.get("dry_run")))
            looked = dataclasses.replace(stage, recipe=recipe)
            with _captured(given, stage.recipe, instead=recipe) as text:
                words = dataclasses.replace(_chosen(asked, looked), proven=_kept(proofs, stage, given))
                codes.append(_code(lambda words=words: command(words, **given)))  # type: ignore[misc]
            reports[stage.place.name] = text.getvalue()
            if counted := re.search(r"^# steps: ([\d,]+)", text.getvalue(), re.MULTILINE):
                steps[stage.place.name] = counted[1]
    if given.get("as_json"):
        found = {name: json.loads(text) for name, text in reports.items() if text.strip()}
        typer.echo(json.dumps({"correct": not any(codes), "stages": found}, indent=1))
    elif given.get("dry_run") and len(steps) > 1:
        total = sum(int(n.replace(",", "")) for n in steps.values())
        _say(f"# all stages: {total:,} steps = " + " + ".join(f"{n} ({name})" for name, n in steps.items()))
    raise typer.Exit(max(codes, default=EXIT_DONE))


def _run_before(recipe: Recipe, proofs: Path | None) -> Path | None:
    """What the proof of the stage that this one starts from has left."""
    if proofs is None or recipe.start is None:
        return None
    run = proofs / str(recipe.start.source).rpartition("/")[2]
    return run if run.exists() else None


def _kept(proofs: Path | None, stage: Stage, given: Mapping[str, Any]) -> Callable[[Path], Any]:
    """Keeps the straight run of a proof for the stages after it."""

    def keep(run: Path) -> None:
        if proofs is not None and not stage.place.is_last:
            proofs.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if given.get("keep") else shutil.move)(str(run), str(proofs / stage.place.name))

    return keep


@contextlib.contextmanager
def _captured(given: Mapping[str, Any], recipe: Recipe, *, instead: Recipe) -> Iterator[io.StringIO]:
    """What a command prints, if it is needed as a whole; a dry run is printed as well, with the settings of the stage
    itself, not with those of its stand-in."""
    text = io.StringIO()
    if not given.get("as_json") and not given.get("dry_run"):
        yield text
        return
    with contextlib.redirect_stdout(text):
        yield text
    if not given.get("as_json"):
        own, other = (render(plain(each)) for each in (recipe, instead))
        typer.echo(text.getvalue().replace(other, own), nl=False)


def _title(stage: Stage, recipe: Recipe, *, dry: bool) -> None:
    new, place, start = recipe is not stage.recipe, stage.place, stage.recipe.start
    earlier = str(start.source).rpartition("/")[2] if start else ""
    why = ""
    if new and recipe.start:
        why = f" (starts from the proof of {earlier})"
    elif new and start:
        why = f" (starts from {checkpoint_of(start)}; {earlier} has not been trained: its structure stands in for it)"
    _say(f"{'# ' if dry else chr(10)}Stage {place.number} of {place.of}: {place.name}{why}")


def _code(run: Callable[[], None]) -> int:
    """The exit code that a command ends with."""
    try:
        run()
    except typer.Exit as ended:
        return ended.exit_code
    return EXIT_DONE


def _say(text: str) -> None:
    if env.detect(os.environ).rank == 0:
        typer.echo(text)
