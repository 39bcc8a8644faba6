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
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

from fullshard.contracts.launcher import Topology
from fullshard.dist import env
from fullshard.errors import EXIT_DONE, FullshardError, RecipeError
from fullshard.stages.in_turn import Stage, named, stages_of, train_in_turn
from fullshard.stages.stand_in import ProcessorOf, stand_ins

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
        with tempfile.TemporaryDirectory(prefix="fullshard-") as folder, _connected(reading.recipe.topology):
            _each(asked, reading, command, given, Path(folder), processor_of)
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
        trained = train_in_turn(reading.recipe, run, resume=given["resume"], only=only, command=again, say=_say)
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


def _each(
    asked: Any, reading: Any, command: Command, given: Mapping[str, Any], folder: Path, processor_of: ProcessorOf
) -> None:
    """Looks at every stage, at one that cannot start yet by the structure of the stage before it."""
    every = stages_of(reading.recipe)
    one = named(reading.recipe, asked.stage).place.name if asked.stage else None
    instead = stand_ins([stage.recipe for stage in every], folder, processor_of=processor_of)
    codes, reports, steps = [], {}, {}
    for stage, recipe in zip(every, instead, strict=True):
        if one in (None, stage.place.name):
            if not given.get("as_json"):
                _title(stage, new=recipe is not stage.recipe, dry=bool(given.get("dry_run")))
            with _captured(given) as text:
                looked = dataclasses.replace(stage, recipe=recipe)
                codes.append(_code(lambda looked=looked: command(_chosen(asked, looked), **given)))  # type: ignore[misc]
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


@contextlib.contextmanager
def _captured(given: Mapping[str, Any]) -> Iterator[io.StringIO]:
    """What a command prints, if it is needed as a whole; a dry run is printed as well."""
    text = io.StringIO()
    if not given.get("as_json") and not given.get("dry_run"):
        yield text
        return
    with contextlib.redirect_stdout(text):
        yield text
    if not given.get("as_json"):
        typer.echo(text.getvalue(), nl=False)


def _title(stage: Stage, *, new: bool, dry: bool) -> None:
    place, source = stage.place, stage.recipe.start
    earlier = str(source.source).rpartition("/")[2] if source else ""
    why = f" ({earlier} has not been trained: its structure and tokenizer stand in for it)" if new else ""
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
