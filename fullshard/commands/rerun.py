"""Commands that a run prints for pasting: the run again with other settings, and the line that loads its model.

Commands are quoted for a shell; lines of Python include their imports. Must not run anything, nor know ranks.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from fullshard.card.load_code import importing
from fullshard.checkpoint import folder as files
from fullshard.contracts.progress import Result
from fullshard.recipes.read import Reading

RESOLVED = "recipe.resolved.yaml"


def command(reading: Reading, *changes: str, resume: str | None = None) -> str:
    """The command that runs the recipe again with other settings, started the same way."""
    if reading.typed is not None:
        changes = reading.place.settings(changes) if reading.place else changes
        return reading.typed.again(*changes, resume=resume)
    # A recipe made in Python has no file, but its resolved form does.
    words = ", ".join(repr(word) for word in (str(reading.recipe.folder / RESOLVED), *changes))
    return f"import fullshard; fullshard.train(fullshard.read({words}){f', resume={resume!r}' if resume else ''})"


def go_on(reading: Reading, *, out_of_patience: bool) -> str:
    """The command that continues a finished run: twice as long, or without patience."""
    duration = reading.recipe.duration
    unit, amount = ("epochs", duration.epochs) if duration.epochs else ("steps", duration.steps)
    more = "evaluate.patience=null" if out_of_patience else f"duration.{unit}={2 * (amount or 1):g}"
    return again(reading, more)


def again(reading: Reading, *changes: str) -> str:
    """The command that continues the run. A recipe made in Python is the caller's: its resolved form is another."""
    given = ", ".join(["recipe", *map(repr, changes)])
    return command(reading, *changes) if reading.typed is not None else f"fullshard.train({given})"


def next_steps(reading: Reading, result: Result) -> list[str]:
    """The three things to try next."""
    recipe, folder = reading.recipe, shlex.quote(result.folder)
    curves = f"See the numbers:   {folder}/metrics.jsonl"
    viewers = [viewer for sink in recipe.log.sinks if (viewer := sink.viewer(Path(result.folder)))]
    if viewers:
        curves = f"See the curves:    {viewers[0]}"
    run = reading.place.run if reading.place else recipe.name
    changes = f"optimizer.lr={recipe.optimizer.lr / 2:g}", f"name={run}-2"
    return [
        _use(reading, result)
        if recipe.checkpoint.at_end
        else f"Keep the model:    {command(reading, 'checkpoint.at_end=true')}",
        curves,
        f"Change a setting:  {command(reading, *changes)}",
    ]


def _use(reading: Reading, result: Result) -> str:
    recipe = reading.recipe
    place = recipe.checkpoints / "model"
    if files.is_remote(place):
        line = recipe.model.load_with("model", adapter=result.adapted)
        return f"Use the model:     copy {place} to this folder" + (f", then: {importing(line)}" if line else "")
    # Absolute, so that the line works in any folder.
    model = str(Path(result.folder).resolve() / "model")
    if line := recipe.model.load_with(model, adapter=result.adapted):
        return f"Use the model:     {importing(line)}"
    if result.adapted:
        return f"Use the model:     fullshard export {shlex.quote(result.folder)} OUT --as merged"
    return f"Use the model:     it is in {model}, written by model.kind {recipe.model.kind()}"
