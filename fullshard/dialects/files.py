"""Recognises another trainer's file, and reads it as a recipe. The file itself is never changed.

Must not know the recipe beyond the two keys that every recipe of ours has.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fullshard.dialects import engine_nodes, launch_variables, report
from fullshard.dialects.rows import Dialect, File, nested
from fullshard.dialects.tables import dialects
from fullshard.dialects.translate import Translation, translate
from fullshard.errors import RecipeError
from fullshard.formatting.yaml_text import Document, parse, shown

_OURS = ("model", "data")
_UNMISTAKABLE = ("trainer", "training_stages", "training")
"""Sections that no recipe of ours has, in files that may have a model and data as well."""


def recognise(values: Mapping[str, Any]) -> Dialect | None:
    """Of the dialects that a file has a mark of, the one that knows most of its keys; None for a recipe of ours, and
    for what nobody recognises."""
    if "stages" in values or all(key in values for key in _OURS) and not any(key in values for key in _UNMISTAKABLE):
        return None
    file = File(values)
    marked = [dialect for dialect in dialects().values() if any(_has(file, mark) for mark in dialect.marks)]
    return max(marked, key=lambda dialect: (_known(dialect, values), _marks(dialect, file)), default=None)


def _marks(dialect: Dialect, file: File) -> int:
    return sum(_has(file, mark) for mark in dialect.marks)


def _known(dialect: Dialect, values: Mapping[str, Any], where: str = "") -> int:
    """How many keys of a file a dialect has rows for."""
    count = 0
    for key, value in values.items():
        path = f"{where}.{key}" if where else str(key)
        if path == dialect.stages_key or dialect.row(path) is not None:
            count += 1
        elif isinstance(value, Mapping):
            count += _known(dialect, value, path)
    return count


def _has(file: File, mark: str) -> bool:
    """Whether a key is there, also as null; `*.key` looks one level down, `key=word` at the value."""
    path, equals, word = mark.partition("=")
    if path.startswith("*."):
        return any(isinstance(inner, Mapping) and path[2:] in inner for inner in file.values.values())
    if equals:
        return str(file.get(path)) == word
    return path in file.values if "." not in path else file.get(path) is not None


def load(path: str | Path, text: str | None = None) -> Document:
    """The plain values of a YAML, JSON or TOML file."""
    name = str(path)
    text = read_text(Path(os.path.expanduser(path))) if text is None else text
    try:
        if name.endswith(".toml"):
            return Document(tomllib.loads(text), {})
        if name.endswith(".json"):
            values = json.loads(text)
            if isinstance(values, dict):
                return Document(values, {})
    except ValueError as error:
        raise RecipeError(f"{name} cannot be read: {error}.") from None
    return parse(text, name=name)


def read_text(path: Path) -> str:
    """The text of a file, or an error that says why not."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: byte {error.start} is not UTF-8 text. Save it in UTF-8.") from None
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror}. Check the name and its permissions.") from None


def translated(path: str | Path) -> Translation | None:
    """A file of another trainer in our words; None for a recipe of ours."""
    document = load(path)
    dialect = recognise(document.values)
    folder = Path(os.path.expanduser(path)).parent
    return None if dialect is None else translate(dialect, document.values, name=str(path), folder=folder)


def as_recipe(document: Document, *, name: str, path: Path) -> Document:
    """A document as a recipe of ours: as it is, or another trainer's in our words, with lines that say so."""
    dialect = recognise(document.values)
    if dialect is None:
        return document
    if dialect.launches:
        raise RecipeError(
            f"{name} is a file of {dialect.name}: it says how ranks start and shard, not what is trained. Give it "
            f"beside a recipe: fullshard train RECIPE --config-file {name}"
        )
    done = translate(dialect, document.values, name=name, folder=path.parent)
    if done.refused:
        raise RecipeError(report.refusal(done))
    lines = {key: document.lines[said.key] for said in done.said for key in said.settings if said.key in document.lines}
    return Document(nested(done.settings), lines, tuple(report.short(done)), done.left_out)


def launchers(path: str | None, environ: Mapping[str, str]) -> list[Translation]:
    """What starts the ranks, in our words: the engine that started this node, `accelerate launch`, and the file given
    beside the recipe."""
    given = translated(path) if path else None
    found = [engine_nodes.settings(environ), launch_variables.settings(environ), given]
    if path and given is None:
        raise RecipeError(f"--config-file {path} is not a file of accelerate or DeepSpeed. Give a recipe by itself.")
    for done in filter(None, found):
        if not done.dialect.launches:
            raise RecipeError(
                f"--config-file {done.name} is a file of {done.dialect.name}, which says what is trained: give it as "
                "the recipe. --config-file takes a file of accelerate or DeepSpeed."
            )
        if done.refused:
            raise RecipeError(report.refusal(done))
    return [done for done in found if done is not None]


def meeting(path: str | None, *, nodes: int, chosen: bool, timeout_s: float | None) -> tuple[int | None, str | None]:
    """The number of this machine and HOST:PORT of the first, as accelerate's file says them for several machines, or
    else the engine that started this node; `chosen`: the command line says how many `nodes`."""
    if not path:
        return engine_nodes.meeting(os.environ, nodes=nodes, chosen=chosen, timeout_s=timeout_s)
    done = translated(path)
    if done is None or done.file.get("num_machines", 1) < 2:
        return None, None
    host, port = done.file.get("main_process_ip"), done.file.get("main_process_port") or 29500
    return done.file.get("machine_rank"), f"{host}:{port}" if host else None


def notes_of(launchers: Sequence[Translation], replaced: Sequence[str]) -> list[str]:
    """Lines for the keys of launchers that have no effect, and what replaced what: a launcher's key only once."""
    unused = [
        f"{done.name}: {said.key}: {shown(said.value)} has no effect: {said.why}"
        for done in launchers
        for said in done.said
        if said.verdict == "no effect" and said.why
    ]
    last = {line.partition(":")[0]: line for line in replaced}
    names = [f"({done.name})" for done in launchers]
    return unused + [line for line in replaced if line in last.values() or not any(name in line for name in names)]
