"""`fullshard generate`: continue prompts with a trained language model. Starts its own ranks, or joins.

Must not import torch before it is called, nor know how a model is loaded or a text is continued.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullshard.commands.options import (
    Base,
    Devices,
    RunOrModel,
    TrustRemoteCode,
    WhichCheckpoint,
    WhichWeights,
    as_words,
    check_weights,
    json_alone,
)
from fullshard.errors import SetupError
from fullshard.formatting.plural import counted

if TYPE_CHECKING:
    from fullshard.contracts.model import Continuation
    from fullshard.contracts.world import World
    from fullshard.evaluate.source import EvaluateOptions
    from fullshard.generate.prompts import Prompt
    from fullshard.generate.source import GeneratingModel
    from fullshard.log.console import Console
    from fullshard.multimodal.prompts import Files, Row

Conversations = Annotated[
    list[str] | None, typer.Option(metavar="JSON|FILE", help="A conversation to answer; may be repeated.")
]
Images = Annotated[
    list[str] | None, typer.Option(metavar="FILE", help="An image that each prompt is about; may be repeated.")
]

Clips = Annotated[
    list[str] | None, typer.Option(metavar="FILE", help="A clip of audio that each prompt is about; may be repeated.")
]


def generate(
    target: RunOrModel,
    prompt: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="A text to continue; may be repeated.")
    ] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="One prompt per line; .jsonl: prompt, text or messages in each line."),
    ] = None,
    messages: Conversations = None,
    image: Images = None,
    audio: Clips = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="The longest continuation.")] = 128,
    temperature: Annotated[
        float, typer.Option(min=0, metavar="X", help="0 always takes the most likely token; 1 samples by likelihood.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, metavar="X", help="Sample from the likeliest tokens of this share.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="The seed of sampling.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Take prompts as plain text, without the chat template.")] = False,
    batch_size: Annotated[
        int, typer.Option(min=1, metavar="N", help="Prompts that each rank continues at once, padded to the longest.")
    ] = 1,
    checkpoint: WhichCheckpoint = None,
    weights: WhichWeights = None,
    devices: Devices = None,
    base: Base = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per prompt, for machines.")] = False,
) -> None:
    """Continue prompts with the language model of RUN, or with MODEL.

    Prompts are laid out as the run's data was: as plain text, or as a user's message where the run was trained on
    conversations. Images and clips come before the prompt, or where it says <image> or <audio>. A text ends at a stop
    token of the model. Without a temperature the output equals Transformers' greedy generate on the exported model.
    Ranks share the prompts and run in step.

    Exit codes: 0 done; 2 a mistake in the options or the run.
    """
    check_weights(weights)
    if top_p <= 0:
        raise SetupError(f"--top-p {top_p}: no token is left to sample. Give a share above 0; 1 takes all.")
    from fullshard.contracts.model import Continuation
    from fullshard.evaluate.source import EvaluateOptions
    from fullshard.generate.prompts import gathered

    texts = {"--prompt": prompt, "--prompts": prompts, "--messages": messages, "--image": image, "--audio": audio}
    drawing = {"--max-new-tokens": max_new_tokens, "--temperature": temperature, "--top-p": top_p, "--seed": seed}
    flags = {"--raw": raw, "--base": base, "--trust-remote-code": trust_remote_code, "--json": as_json}
    words = as_words({**texts, **drawing, "--batch-size": batch_size, "--weights": weights, **flags})
    asked = gathered(prompt or [], prompts or [], messages or [], spoken=bool(audio))
    files = {"image": image or [], "audio": audio or []}
    options = EvaluateOptions(None, checkpoint, weights, devices, (), base, trust_remote_code)
    way = Continuation(max_new_tokens, temperature, top_p, seed, frozenset())
    with json_alone(as_json):
        records = _generate(target, options, asked, files, way, words, raw=raw, batch_size=batch_size, say=not as_json)
    for record in records:
        typer.echo(json.dumps(record, ensure_ascii=False))


def _generate(
    target: str,
    options: EvaluateOptions,
    prompts: list[Prompt],
    files: Files,
    way: Continuation,
    words: list[str],
    *,
    raw: bool,
    batch_size: int,
    say: bool,
) -> list[dict[str, Any]]:
    """This rank's part, from loading to the last line; returns what is left to print, on rank 0."""
    from fullshard.commands.own_ranks import start_own
    from fullshard.dist import env
    from fullshard.generate.source import find_model
    from fullshard.log import libraries
    from fullshard.log.console import Console
    from fullshard.multimodal.prompts import described
    from fullshard.setup.on_ranks import as_rank

    launch = env.detect(os.environ)
    with libraries.route(Console(silent=launch.rank != 0)):
        model = find_model(target, options, nodes=launch.num_nodes)
    topology = model.reading.recipe.topology
    if (code := start_own(["generate", model.name, *words], topology)) is not None:
        raise typer.Exit(code)
    with as_rank(topology) as (console, meet):
        chat = model.chat and not raw
        rows, way = _laid_out(model, prompts, files, way, chat=chat)
        world = meet()
        layout = f"{counted(len(prompts), 'prompt')}, as {'user messages' if chat else 'plain text'}{described(files)}"
        _announce(console, model, layout, way, world)
        made = _make(model, rows, way, world, console, batch_size=batch_size)
        records = [_record(model, *each, way) for each in zip(prompts, rows, made, strict=True)]
        if say:
            _say(console, records)
    return records if world.is_main and not say else []


def _laid_out(
    model: GeneratingModel, prompts: list[Prompt], files: Files, way: Continuation, *, chat: bool
) -> tuple[list[Row], Continuation]:
    """The rows to continue, and where they end; refuses more tokens than the model has positions for."""
    from fullshard.multimodal.prompts import row_of
    from fullshard.text.tokens import inner_tokenizer

    if (tokenizer := inner_tokenizer(model.processor)) is None:
        raise SetupError(f"{model.name} has no tokenizer to read a prompt with. Export it with one.")
    said = [p.messages or ([{"role": "user", "content": p.text}] if chat else None) for p in prompts]
    rows = [row_of(p.text, m, files, model.family, model.processor) for p, m in zip(prompts, said, strict=True)]
    longest, most = model.family.longest(model.module), max(len(row.tokens) for row in rows)
    if longest is not None and most + way.tokens > longest:
        raise SetupError(
            f"--max-new-tokens {way.tokens}: with a prompt of {most:,} tokens that is more than the {longest:,} "
            f"positions of the model. Give at most {max(longest - most, 0):,}, or a shorter prompt."
        )
    ends = model.family.stop_tokens(model.module)
    ends |= {tokenizer.eos_token_id} - {None}
    return rows, replace(way, ends=frozenset(ends))


def _make(
    source: GeneratingModel,
    rows: list[Row],
    way: Continuation,
    world: World,
    console: Console,
    *,
    batch_size: int,
) -> list[list[int]]:
    from fullshard.dist.precision import resolve_precision
    from fullshard.generate.continue_rows import continue_rows, turns
    from fullshard.kernels.float8 import without
    from fullshard.log.bar import Pace
    from fullshard.log.console import Bar
    from fullshard.setup.sharded_model import sharded_model

    recipe = source.reading.recipe
    precision = resolve_precision(without(recipe.precision), world.device)
    model = sharded_model(recipe, source.module, world, precision, say=console.note, values=source.values)
    num_turns = len(turns(rows, 1 if way.temperature else batch_size, world.size))
    with Bar(console, "Generating", "", Pace(num_turns, clock=console.clock)) as bar:
        return continue_rows(
            rows,
            way,
            family=source.family,
            objective=recipe.objective,
            module=model.module.eval(),
            world=world,
            batch_size=batch_size,
            tick=bar.advance,
        )


def _announce(console: Console, model: GeneratingModel, layout: str, way: Continuation, world: World) -> None:
    drawn = f"temperature {way.temperature:g}, top-p {way.top_p:g}, seed {way.seed}" if way.temperature else "greedy"
    kept = model.family.keeps_cache
    cache = "keys and values are kept" if kept else "no keys and values are kept: every token runs its whole row again"
    if world.size > 1:
        cache += "; every token gathers the weights from all ranks"
    lines = [
        ("weights", f"{model.name} ({model.why})"),
        ("prompts", layout),
        ("decoding", f"{drawn}, at most {counted(way.tokens, 'token')}"),
        ("cache", cache),
        ("world", world.describe()),
    ]
    console.header(f"fullshard generate: {model.reading.recipe.name}", lines)


def _record(model: GeneratingModel, prompt: Prompt, row: Row, made: list[int], way: Continuation) -> dict[str, Any]:
    from fullshard.text.tokens import inner_tokenizer

    stopped = bool(made) and made[-1] in way.ends
    return {
        "prompt": prompt.text,
        "text": inner_tokenizer(model.processor).decode(made, skip_special_tokens=True),
        "prompt_tokens": len(row.tokens),
        "tokens": made,
        "stopped": "stop token" if stopped else "length",
    }


def _say(console: Console, records: list[dict[str, Any]]) -> None:
    for number, record in enumerate(records, start=1):
        end = "" if record["stopped"] == "stop token" else ", cut at --max-new-tokens"
        console.say(f"[{number}] {record['prompt']}".rstrip())
        console.say(record["text"].strip())
        console.say(f"    ({counted(len(record['tokens']), 'token')}{end})")
        console.say("")
