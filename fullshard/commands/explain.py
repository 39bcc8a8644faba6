"""`fullshard explain`: an error message, log or run folder in, an explanation out.

Must not import torch, and must not know how an error is recognised.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from fullshard.errors import SetupError
from fullshard.explain import crash
from fullshard.explain.match import Match
from fullshard.explain.match import explain as find
from fullshard.explain.record import entries
from fullshard.explain.render import answer, as_data, listing, section

_LOOKS_LIKE_A_FILE = (".txt", ".log", ".out", ".err", ".json", ".jsonl")


def explain(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TEXT|FILE|RUN|NAME",
            help="An error message, a log file, - for standard input, a run or crash folder, or the name of an entry.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Explain an error: why it happens, and what to do.

    Also names the recipe keys that matter. Without an argument, lists the known errors. Exit code 1: no known error in
    the text.
    """
    if not words:
        _list(as_json)
        return
    if len(words) == 1 and (known := [entry for entry in entries() if entry.name == words[0]]):
        shown = json.dumps(known[0].model_dump(mode="json"), indent=2)
        typer.echo(shown if as_json else section(known[0], width=_width()))
        return
    matches = find(_text(words))
    if as_json:
        typer.echo(json.dumps({"matches": [as_data(match) for match in matches]}, indent=2))
    elif matches:
        typer.echo(_headed(matches))
    else:
        typer.echo(
            "No known error in this text. Give the whole traceback or log of the first rank that failed;\n"
            "`fullshard explain` alone lists the known errors, and `fullshard check RECIPE` checks the setup."
        )
    if not matches:
        raise typer.Exit(1)


def _text(words: list[str]) -> str:
    """The text to explain: standard input, the end of a file, what a crashed rank wrote, or the words themselves."""
    if words == ["-"]:
        return sys.stdin.read()
    if len(words) > 1 or len(words[0]) > 1000 or "\n" in words[0]:
        return " ".join(words)
    # os.path, because Path raises on a text that is too long for a file name.
    path = Path(os.path.expanduser(words[0]))
    if os.path.isdir(path):
        return _crash_text(path)
    if os.path.exists(path):
        try:
            return crash.tail(path)
        except OSError as error:
            raise SetupError(f"{path} cannot be read: {error.strerror}. Name a text file.") from None
    if " " not in words[0] and (path.suffix in _LOOKS_LIKE_A_FILE or os.sep in words[0]):
        raise SetupError(f"{path} does not exist. Name a log file or a run folder, or put an error text in quotes.")
    return words[0]


def _crash_text(folder: Path) -> str:
    newest = folder if (folder / "start.txt").exists() else crash.newest(folder)
    said = crash.left_behind(newest) if newest is not None else {}
    if said:
        return said[crash.culprit(said, otherwise=next(iter(said)))].text
    if (folder / "log.txt").exists():
        return crash.tail(folder / "log.txt")
    raise SetupError(f"{folder} holds neither a crash folder nor a log.txt. Name a run folder, or give the error text.")


def _headed(matches: list[Match]) -> str:
    """The answer with its title in bold; without a terminal typer drops the style."""
    title, _, rest = answer(matches, width=_width()).partition("\n")
    return f"{typer.style(title, bold=True)}\n{rest}"


def _list(as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([entry.model_dump(mode="json") for entry in entries()], indent=2))
        return
    typer.echo(listing(width=_width()))
    typer.echo('\nAsk about one:   fullshard explain NAME\nAbout an error:  fullshard explain "TEXT", FILE, RUN or -')


def _width() -> int:
    return min(max(shutil.get_terminal_size((100, 24)).columns, 60), 120)
