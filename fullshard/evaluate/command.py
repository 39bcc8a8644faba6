"""`fullshard evaluate`: validation numbers of a checkpoint or a model, on all ranks. Starts its own ranks, or joins.

Must not import torch before it is called, nor know how a model is loaded or measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from fullshard.dist.world import World
    from fullshard.evaluate.measure import Found
    from fullshard.evaluate.source import EvaluateOptions, Subject
    from fullshard.log.console import Console
    from fullshard.setup.run_inputs import RunInputs

OPTIONS = ("--data", "--checkpoint", "--weights", "--devices", "--base", "--trust-remote-code", "--json")


def evaluate(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN|MODEL", help="A run folder, one of its checkpoints (RUN/last), a model's folder or hub name."
        ),
    ],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings over those of the run's recipe.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="FILE", help="Validation data, as data.validation takes it; else the run's.")
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="STEP|best|latest", help="Which weights; else the best, or the latest.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(metavar="ema|model", help="Averaged or trained weights; else those of training.")
    ] = None,
    devices: Annotated[
        str | None, typer.Option(metavar="N|0,1|auto", help="Ranks: a number, GPU ids, or auto; else as in training.")
    ] = None,
    base: Annotated[
        str | None, typer.Option(metavar="PATH", help="Where the run's base model is now, if it has moved.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for machines.")] = False,
) -> None:
    """Evaluate a checkpoint of RUN, or MODEL, on validation data.

    Runs the evaluations of the run's recipe, every part of them, and prints their numbers: those that training finds at
    that step, bit for bit on as many ranks. A MODEL needs --data; a language model is measured by loss, accuracy and
    perplexity, an embedding model by loss and retrieval. Writes nothing.

    Exit codes: 0 done; 2 a mistake in the options, the data or the run.
    """
    from fullshard.commands.options import one_of, overrides
    from fullshard.dist import env
    from fullshard.evaluate.source import EvaluateOptions, subject_of
    from fullshard.setup.on_ranks import as_rank, start_own

    one_of("--weights", weights, (None, "ema", "model"))
    given = overrides(target, settings or [], command="evaluate", options=OPTIONS)
    options = EvaluateOptions(data, checkpoint, weights, devices, given, base, trust_remote_code)
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        subject = subject_of(target, options, nodes=env.detect(os.environ).num_nodes)
        topology = subject.reading.recipe.topology
    if (code := start_own(_words(subject, options, as_json=as_json), topology)) is not None:
        raise typer.Exit(code)
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        from fullshard.evaluate.measure import measure

        worlds: list[World] = []
        with as_rank(topology) as (console, meet):

            def announce(inputs: RunInputs, world: World) -> None:
                worlds.append(world)
                _announce(console, subject, options, inputs, world)

            found = measure(subject, weights, console=console, meet=meet, announce=announce)
            _say(console, found)
    if as_json and worlds[0].is_main:
        typer.echo(json.dumps(_record(subject, options, worlds[0], found)))


def _words(subject: Subject, options: EvaluateOptions, *, as_json: bool) -> list[str]:
    """The command for each rank, which all mean the same checkpoint."""
    given = {"--data": options.data, "--weights": options.weights, "--base": options.base}
    words = [word for option, value in given.items() if value is not None for word in (option, value)]
    words += [flag for flag, on in (("--trust-remote-code", options.trust_remote_code), ("--json", as_json)) if on]
    return ["evaluate", subject.name, *options.settings, *words]


def _announce(console: Console, subject: Subject, options: EvaluateOptions, inputs: RunInputs, world: World) -> None:
    held = [line for line in inputs.data.report if line.startswith("validation: ")]
    lines = [
        ("weights", f"{subject.name} ({subject.why}{f', {options.weights}' if options.weights else ''})"),
        ("data", options.data or "the run's own validation data"),
        *(("", line.removeprefix("validation: ")) for line in held),
        ("world", world.describe()),
    ]
    console.header(f"fullshard evaluate: {subject.reading.recipe.name}", lines)


def _say(console: Console, found: Found) -> None:
    from fullshard.formatting import readable

    wide = max(map(len, found.numbers), default=0)
    for name, value in found.numbers.items():
        console.say(f"  {name:<{wide}}  {readable.precise(value)}")
    for text in found.texts:
        console.say(text)


def _record(subject: Subject, options: EvaluateOptions, world: World, found: Found) -> dict[str, Any]:
    return {
        "target": subject.name,
        "step": subject.step,
        "weights": options.weights,
        "data": options.data,
        "ranks": world.size,
        "numbers": found.numbers,
        "texts": found.texts,
    }


__all__ = ["evaluate"]
