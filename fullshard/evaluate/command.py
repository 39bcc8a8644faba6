"""`fullshard evaluate`: validation numbers of a checkpoint or a model, on all ranks. Starts its own ranks, or joins.

Must not import torch before it is called, nor know how a model is loaded or measured.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullshard.commands.options import (
    Base,
    Devices,
    RunOrModel,
    TrustRemoteCode,
    WhichCheckpoint,
    as_words,
    check_weights,
    json_alone,
    overrides,
)

if TYPE_CHECKING:
    from fullshard.contracts.evaluation import Findings
    from fullshard.contracts.world import World
    from fullshard.evaluate.source import EvaluateOptions, EvaluationTarget
    from fullshard.log.console import Console
    from fullshard.setup.inputs import RunInputs

OPTIONS = ("--data", "--checkpoint", "--weights", "--devices", "--base", "--trust-remote-code", "--json")


def evaluate(
    target: RunOrModel,
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings over those of the run's recipe.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="FILE", help="Validation data, as data.validation takes it; else the run's.")
    ] = None,
    checkpoint: WhichCheckpoint = None,
    weights: Annotated[
        str | None, typer.Option(metavar="ema|model", help="Averaged or trained weights; else those of training.")
    ] = None,
    devices: Devices = None,
    base: Base = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for machines.")] = False,
) -> None:
    """Evaluate a checkpoint of RUN, or MODEL, on validation data.

    Runs every evaluation of the run's recipe and prints the numbers: those that training finds at that step, bit for
    bit on as many ranks. A MODEL needs --data, and is measured as its kind usually is: a language model by loss,
    accuracy and perplexity, an embedding model by loss and retrieval. Writes nothing.

    Exit codes: 0 done; 2 a mistake in the options, the data or the run.
    """
    from fullshard.commands.own_ranks import start_own
    from fullshard.dist import env
    from fullshard.evaluate.source import EvaluateOptions, find_target

    check_weights(weights)
    given = overrides(target, settings or [], command="evaluate", options=OPTIONS)
    options = EvaluateOptions(data, checkpoint, weights, devices, given, base, trust_remote_code)
    with json_alone(as_json):
        found = find_target(target, options, nodes=env.detect(os.environ).num_nodes)
    if (code := start_own(_words(found, options, as_json=as_json), found.reading.recipe.topology)) is not None:
        raise typer.Exit(code)
    with json_alone(as_json):
        world, findings = _evaluate(found, options)
    if as_json and world.is_main:
        typer.echo(json.dumps(_record(found, options, world, findings)))


def _evaluate(target: EvaluationTarget, options: EvaluateOptions) -> tuple[World, Findings]:
    """This rank's part."""
    from fullshard.evaluate.measure import measure
    from fullshard.setup.on_ranks import as_rank

    worlds: list[World] = []
    with as_rank(target.reading.recipe.topology) as (console, meet):

        def announce(inputs: RunInputs, world: World) -> None:
            worlds.append(world)
            _announce(console, target, options, inputs, world)

        findings = measure(target, options.weights, console=console, meet=meet, announce=announce)
        _say(console, findings)
    return worlds[0], findings


def _words(target: EvaluationTarget, options: EvaluateOptions, *, as_json: bool) -> list[str]:
    """The command for each rank; all evaluate the same checkpoint."""
    given = {"--data": options.data, "--weights": options.weights, "--base": options.base}
    flags = {"--trust-remote-code": options.trust_remote_code, "--json": as_json}
    return ["evaluate", target.name, *options.settings, *as_words(given | flags)]


def _announce(
    console: Console, target: EvaluationTarget, options: EvaluateOptions, inputs: RunInputs, world: World
) -> None:
    held = [line for line in inputs.data.report if line.startswith("validation: ")]
    lines = [
        ("weights", f"{target.name} ({target.why}{f', {options.weights}' if options.weights else ''})"),
        ("data", options.data or "the run's own validation data"),
        *(("", line.removeprefix("validation: ")) for line in held),
        ("world", world.describe()),
    ]
    console.header(f"fullshard evaluate: {target.reading.recipe.name}", lines)


def _say(console: Console, found: Findings) -> None:
    from fullshard.formatting import readable

    wide = max(map(len, found.numbers), default=0)
    for name, value in found.numbers.items():
        console.say(f"  {name:<{wide}}  {readable.precise(value)}")
    for text in found.texts:
        console.say(text)


def _record(target: EvaluationTarget, options: EvaluateOptions, world: World, found: Findings) -> dict[str, Any]:
    return {
        "target": target.name,
        "step": target.step,
        "weights": options.weights,
        "data": options.data,
        "ranks": world.size,
        "numbers": found.numbers,
        "texts": found.texts,
    }
