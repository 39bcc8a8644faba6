"""`fullshard generate`: texts that a trained language model makes of prompts. Starts its own ranks, or joins.

Must not import torch before it is called, nor know how a model is loaded or a text is continued.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullshard.errors import SetupError

if TYPE_CHECKING:
    from fullshard.contracts.model import Continuation
    from fullshard.dist.world import World
    from fullshard.evaluate.source import EvaluateOptions
    from fullshard.generate.prompts import Prompt
    from fullshard.generate.source import Speaker
    from fullshard.log.console import Console


def generate(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN|MODEL", help="A run folder, one of its checkpoints (RUN/last), a model's folder or hub name."
        ),
    ],
    prompt: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="What to go on from; may be repeated.")
    ] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="A prompt a line; .jsonl with prompt, text or messages in each."),
    ] = None,
    messages: Annotated[
        list[str] | None, typer.Option(metavar="JSON|FILE", help="A conversation to answer; may be repeated.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="The longest continuation.")] = 128,
    temperature: Annotated[
        float, typer.Option(min=0, metavar="X", help="0 always takes the most likely token; 1 draws by likelihood.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, metavar="X", help="Draw from the likeliest tokens of this share.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Decides what is drawn.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Take prompts as plain text, without the chat template.")] = False,
    batch_size: Annotated[
        int, typer.Option(min=1, metavar="N", help="Prompts that each rank continues at once, padded to the longest.")
    ] = 1,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="STEP|best|latest", help="Which weights; else the best, or the latest.")
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(metavar="ema|model", help="Averaged or trained weights; averaged where the run kept an average."),
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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a prompt, for machines.")] = False,
) -> None:
    """Continue prompts with the language model of RUN, or with MODEL.

    A prompt is laid out as the data of the run was: as plain text, or as a message of the user where the run was
    trained on conversations. A text ends at a stop token of the model. Without a temperature the output is that of
    Transformers' greedy generate on the exported model. Ranks share the prompts and run in step.

    Exit codes: 0 done; 2 a mistake in the options or the run.
    """
    from fullshard.commands.options import one_of

    one_of("--weights", weights, (None, "ema", "model"))
    if top_p <= 0:
        raise SetupError(f"--top-p {top_p}: no token is left to draw. Give a share above 0; 1 takes all.")
    words = [word for text in prompt or () for word in ("--prompt", text)]
    words += [word for name in prompts or () for word in ("--prompts", name)]
    words += [word for text in messages or () for word in ("--messages", text)]
    chosen: dict[str, Any] = {"--max-new-tokens": max_new_tokens, "--temperature": temperature, "--top-p": top_p}
    chosen |= {"--seed": seed, "--batch-size": batch_size, "--weights": weights, "--base": base}
    words += [str(word) for pair in chosen.items() if pair[1] is not None for word in pair]
    flags = {"--raw": raw, "--trust-remote-code": trust_remote_code, "--json": as_json}
    words += [flag for flag, on in flags.items() if on]
    from fullshard.evaluate.source import EvaluateOptions
    from fullshard.generate.prompts import gathered

    asked = gathered(prompt or [], prompts or [], messages or [])
    options = EvaluateOptions(None, checkpoint, weights, devices, (), base, trust_remote_code)
    ask = _Ask(asked, raw, max_new_tokens, temperature, top_p, seed, batch_size)
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        records = _generate(target, options, ask, words, say=not as_json)
    for record in records:
        typer.echo(json.dumps(record, ensure_ascii=False))


@dataclass(frozen=True)
class _Ask:
    """What to generate, and how."""

    prompts: list[Prompt]
    raw: bool
    tokens: int
    temperature: float
    top_p: float
    seed: int
    batch_size: int


def _generate(target: str, options: EvaluateOptions, ask: _Ask, words: list[str], *, say: bool) -> list[dict[str, Any]]:
    """This rank's part, from loading to the last line; gives what is left to print, on rank 0."""
    from fullshard.dist import env
    from fullshard.generate.source import speaker_of
    from fullshard.log import libraries
    from fullshard.log.console import Console
    from fullshard.setup.on_ranks import as_rank, start_own

    launch = env.detect(os.environ)
    with libraries.route(Console(silent=launch.rank != 0)):
        speaker = speaker_of(target, options, nodes=launch.num_nodes)
    topology = speaker.reading.recipe.topology
    if (code := start_own(["generate", speaker.name, *words], topology)) is not None:
        raise typer.Exit(code)
    with as_rank(topology) as (console, meet):
        rows, way = _laid_out(speaker, ask)
        world = meet()
        _announce(console, speaker, ask, way, world)
        made = _make(speaker, rows, way, world, console, batch_size=ask.batch_size)
        records = [_record(speaker, *each, way) for each in zip(ask.prompts, rows, made, strict=True)]
        if say:
            _say(console, records)
    return records if world.is_main and not say else []


def _laid_out(speaker: Speaker, ask: _Ask) -> tuple[list[list[int]], Continuation]:
    """The rows to continue, and how; refuses what the model has no positions for."""
    from fullshard.contracts.model import Continuation
    from fullshard.generate.prompts import tokens_of

    if speaker.processor is None:
        raise SetupError(f"{speaker.name} has no tokenizer, so a prompt means nothing to it. Export it with one.")
    tokenizer = getattr(speaker.processor, "tokenizer", speaker.processor)
    rows = [tokens_of(prompt, speaker.processor, chat=speaker.chat and not ask.raw) for prompt in ask.prompts]
    longest, most = speaker.family.longest(speaker.module), max(map(len, rows))
    if longest is not None and most + ask.tokens > longest:
        raise SetupError(
            f"--max-new-tokens {ask.tokens}: with a prompt of {most:,} tokens that is more than the {longest:,} "
            f"positions of the model. Give at most {max(longest - most, 0):,}, or a shorter prompt."
        )
    ends = speaker.family.stop_tokens(speaker.module)
    ends |= {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
    return rows, Continuation(ask.tokens, ask.temperature, ask.top_p, ask.seed, frozenset(ends))


def _make(
    speaker: Speaker, rows: list[list[int]], way: Continuation, world: World, console: Console, *, batch_size: int
) -> list[list[int]]:
    from fullshard.dist.precision import resolve_precision
    from fullshard.generate.continue_rows import continue_rows, num_turns
    from fullshard.log.bar import Pace
    from fullshard.log.console import Bar
    from fullshard.setup.sharded_model import sharded_model

    recipe = speaker.reading.recipe
    precision = resolve_precision(recipe.precision, world.device)
    model = sharded_model(recipe, speaker.module, world, precision, say=console.note, values=speaker.values)
    turns = num_turns(len(rows), 1 if way.temperature else batch_size, world.size)
    with Bar(console, "Generating", "", Pace(turns, clock=console.clock)) as bar:
        return continue_rows(
            rows,
            way,
            family=speaker.family,
            objective=recipe.objective,
            module=model.module.eval(),
            world=world,
            batch_size=batch_size,
            tick=bar.advance,
        )


def _announce(console: Console, speaker: Speaker, ask: _Ask, way: Continuation, world: World) -> None:
    from fullshard.formatting.plural import counted

    drawn = f"temperature {way.temperature:g}, top-p {way.top_p:g}, seed {way.seed}" if way.temperature else "greedy"
    kept = speaker.family.keeps_cache
    cache = "keys and values are kept" if kept else "no keys and values are kept: every token runs its whole row again"
    if world.size > 1:
        cache += "; every token gathers the weights from all ranks"
    layout = "messages of the user" if speaker.chat and not ask.raw else "plain text"
    lines = [
        ("weights", f"{speaker.name} ({speaker.why})"),
        ("prompts", f"{counted(len(ask.prompts), 'prompt')}, as {layout}"),
        ("way", f"{drawn}, at most {counted(way.tokens, 'token')}"),
        ("cache", cache),
        ("world", world.describe()),
    ]
    console.header(f"fullshard generate: {speaker.reading.recipe.name}", lines)


def _record(speaker: Speaker, prompt: Prompt, row: list[int], made: list[int], way: Continuation) -> dict[str, Any]:
    tokenizer = getattr(speaker.processor, "tokenizer", speaker.processor)
    stopped = bool(made) and made[-1] in way.ends
    return {
        "prompt": prompt.text,
        "text": tokenizer.decode(made, skip_special_tokens=True),
        "prompt_tokens": len(row),
        "tokens": made,
        "stopped": "stop token" if stopped else "length",
    }


def _say(console: Console, records: list[dict[str, Any]]) -> None:
    from fullshard.formatting.plural import counted

    for number, record in enumerate(records, start=1):
        end = "" if record["stopped"] == "stop token" else ", cut at --max-new-tokens"
        console.say(f"[{number}] {record['prompt']}")
        console.say(record["text"].strip())
        console.say(f"    ({counted(len(record['tokens']), 'token')}{end})")
        console.say("")


__all__ = ["generate"]
