"""Options that several commands take, and what their values may be.

Must not know what any of them does.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer

from fullshard.errors import RecipeError, SetupError

RunOrModel = Annotated[
    str,
    typer.Argument(
        metavar="RUN|MODEL", help="A run folder, one of its checkpoints (RUN/last), a model's folder or hub name."
    ),
]
WhichCheckpoint = Annotated[
    str | None,
    typer.Option(metavar="STEP|best|latest", help="Which weights to use; by default the best, or else the latest."),
]
WhichWeights = Annotated[
    str | None,
    typer.Option(metavar="ema|model", help="Averaged or trained weights; averaged if the run kept an average."),
]
Devices = Annotated[
    str | None, typer.Option(metavar="N|0,1|auto", help="Ranks: a number, GPU ids, or auto; by default as in training.")
]
Base = Annotated[str | None, typer.Option(metavar="PATH", help="Where the run's base model is now, if it has moved.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
]


def check_weights(value: str | None) -> None:
    """Refuses a `--weights` that is neither ema nor model."""
    one_of("--weights", value, (None, "ema", "model"))


def as_words(options: Mapping[str, Any]) -> list[str]:
    """Options as command-line words: None and False are left out, True is the option alone, a list repeats it."""
    words: list[str] = []
    for option, value in options.items():
        for each in value if isinstance(value, list) else [value]:
            if each is True:
                words.append(option)
            elif each is not None and each is not False:
                words += [option, str(each)]
    return words


@contextlib.contextmanager
def json_alone(as_json: bool) -> Iterator[None]:
    """With `--json`, standard output holds only the JSON: everything else goes to standard error."""
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield


def one_of(option: str, value: str | None, allowed: Sequence[str | None]) -> None:
    """Refuses any other value; None among the allowed ones means that the option may be left out."""
    if value not in allowed:
        from fullshard.config.part import did_you_mean

        known = [word for word in allowed if word]
        raise SetupError(f"{option} {value}: allowed are {', '.join(known)}{did_you_mean(str(value), known)}.")


def overrides(target: str, words: Sequence[str], *, command: str, options: Sequence[str]) -> list[str]:
    """The settings after the run, each as `key=value`."""
    from fullshard.dialects.command_line import to_overrides
    from fullshard.recipes.read import Recipe

    if target.startswith("-"):
        raise RecipeError(f"{target}: a run is expected first. Write: fullshard {command} RUN {target} ...")
    return to_overrides(words, sections=list(Recipe.model_fields), options=options)
