"""What a translation prints: the table of every key, its short form, the recipe as a file with comments.

Must not know the recipe.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fullshard.dialects.rows import UNSET, Dialect, Row, Said
from fullshard.dialects.translate import Translation
from fullshard.formatting.plural import counted
from fullshard.formatting.yaml_text import parse_value, render, shown

_WIDEST = 60
_WHOLE: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
_ORDER = (
    *("name", "output", "seed", "model", "objective", "data", "batch", "duration", "optimizer", "schedule"),
    *("precision", "sharding", "topology", "checkpoint", "evaluate", "log"),
)
"""The order of a recipe's sections; others follow."""


def table(done: Translation, *, columns: int = 0) -> str:
    """Every key of a file with its verdict, in columns; wrapped for a terminal with this many `columns`."""
    widest = max(24, min(_WIDEST, columns * 2 // 5)) if columns else _WIDEST
    rows = [_cells(said, widest) for said in done.said]
    verdict, theirs = (min(max((len(row[column]) for row in rows), default=0), widest) for column in (0, 1))
    lines = [f"{done.name} ({done.dialect.name})"]
    for row in rows:
        start = f"  {row[0]:<{verdict}}  {row[1]:<{theirs}}  "
        room = max(20, columns - len(start)) if columns else len(row[2]) + 1
        meaning = textwrap.wrap(row[2], room, **_WHOLE) or [""]
        lines += [(start if not place else " " * len(start)) + part for place, part in enumerate(meaning)]
    return "\n".join(line.rstrip() for line in lines)


def _cells(said: Said, widest: int) -> tuple[str, str, str]:
    settings = ", ".join(f"{key}: {shown(value)}" for key, value in said.settings.items())
    theirs = _cut(f"{said.key}: {_value(said)}", widest)
    if said.verdict == "default":
        theirs = _cut(f"{said.key} (left out: {_value(said)})", widest)
    arrow = f"→ {settings}" if settings else ""
    if said.verdict == "no effect" and not said.why:
        return said.verdict, theirs, "already the case"
    return said.verdict, theirs, " ".join(filter(None, (arrow, f"({said.why})" if settings and said.why else said.why)))


def _value(said: Said) -> str:
    """A value as a person writes it; a secret stays one."""
    return "(not shown)" if said.key.endswith(("_token", "api_key", "password", "secret")) else shown(said.value)


def _cut(text: str, widest: int) -> str:
    return text if len(text) <= widest else text[: widest - 3] + "..."


def short(done: Translation) -> list[str]:
    """A few lines for the header of a run."""
    lines = [f"{done.name} is read as a file of {done.dialect.name}; `fullshard import {done.name}` shows every key"]
    renamed = [said for said in done.said if said.settings and said.verdict != "default"]
    lines += [f"{said.key}: {_value(said)} → {_settings(said)}" for said in renamed if said.verdict == "renamed"]
    left_out = [said for said in done.said if said.verdict == "default" and said.settings]
    defaults = [_settings(said) + (f" ({said.why})" if said.why else "") for said in left_out]
    if defaults:
        lines.append(f"left out, and in force as {done.dialect.name} does it: {', '.join(defaults)}")
    lines += [
        f"{said.key}: {_value(said)} has no effect: {said.why}"
        for said in done.said
        if said.verdict == "no effect" and said.why
    ]
    return lines


def _settings(said: Said) -> str:
    return ", ".join(f"{key}: {shown(value)}" for key, value in said.settings.items())


def refusal(done: Translation) -> str:
    """The error for a file that cannot be trained as it is."""
    lines = [f"{done.name} ({done.dialect.name}), {said.key}: {_sentence(said.why)}" for said in done.refused]
    lines.append(
        f"`fullshard import {done.name} -o recipe.yaml` writes a recipe without {_these(len(done.refused))}, to read "
        "and train."
    )
    return "\n".join(lines)


def _sentence(why: str) -> str:
    return why if why.endswith((".", "?")) else f"{why}."


def _these(count: int) -> str:
    return "this key" if count == 1 else f"these {counted(count, 'key')}"


def recipe_text(done: Sequence[Translation], values: Mapping[str, Any]) -> str:
    """The recipe as a file: where it came from, each setting with the key it came from, and what was left out."""
    sources = " and ".join(f"{each.name} ({each.dialect.name})" for each in done)
    origin = {key: said for each in done for said in each.said for key in said.settings}
    lines = [f"# Imported from {sources}."]
    for verdict in ("no effect", "refused"):
        for each in done:
            left = [said for said in each.said if said.verdict == verdict and said.why]
            lines += [f"# {verdict}: {said.key}: {_value(said)}: {_sentence(said.why)}" for said in left]
    ordered = {key: values[key] for key in sorted(values, key=lambda key: _ORDER.index(key) if key in _ORDER else 99)}
    return "\n".join([*lines, *_commented(ordered, origin, "", 0)]) + "\n"


def _commented(values: Mapping[str, Any], origin: Mapping[str, Said], where: str, depth: int) -> Iterable[str]:
    for key, value in values.items():
        path, indent = f"{where}.{key}" if where else str(key), "  " * depth
        if key == "stages":
            yield from render({key: value}).splitlines()
            continue
        inner = any(other.startswith(f"{path}.") for other in origin)
        if isinstance(value, Mapping) and value and inner:
            yield f"{indent}{key}:"
            yield from _commented(value, origin, path, depth + 1)
            continue
        yield f"{indent}{key}: {_flow(value)}{_comment(origin.get(path))}"


def _comment(said: Said | None) -> str:
    if said is None:
        return ""
    return f"  # {said.key}, left out" if said.verdict == "default" else f"  # {said.key}"


def _flow(value: Any) -> str:
    """A value on one line, so that reading it gives the same value."""
    text = shown(value)
    if isinstance(value, str) and value and "#" not in value and parse_value(text, where="") == value:
        return text
    if isinstance(value, (int, float, type(None))):
        return text
    import json

    plain = isinstance(value, (list, Mapping)) and parse_value(text, where="") == value
    return text if plain and "#" not in text else json.dumps(value, ensure_ascii=False)


def aliases() -> str:
    """The flags of other trainers' scripts that the command line takes, under what each is here."""
    from fullshard.dialects.tables import dialects

    dialect = dialects()["flags"]
    lines = [
        "fullshard train takes these flags of other scripts. Hyphens and underscores are the same; a switch is a bare",
        "flag, --no-flag, or --flag True. Two flags that say different things are an error; a setting in our own words",
        "(optimizer.lr=3e-4) wins over a flag.",
        "",
    ]
    for row in dialect.rows:
        flags = " ".join(f"--{name.replace('_', '-')}" for name in row.theirs if "." not in name)
        lines += [_meaning(row), *textwrap.wrap(flags, 110, initial_indent="    ", subsequent_indent="    ", **_WHOLE)]
    return "\n".join(lines)


def _meaning(row: Row) -> str:
    if row.verdict in ("no effect", "refused"):
        return f"{row.verdict}: {row.why}"
    remark = f"({row.why})" if row.why and row.ours else row.why
    return " ".join(filter(None, (row.ours.replace("$", "VALUE"), remark)))


def markdown(dialect: Dialect, *, without: Sequence[Row] = ()) -> str:
    """The table of a dialect for the documentation, without rows that another table of the page has."""
    lines = ["| their key | here | |", "|---|---|---|"]
    for row in dialect.rows:
        if row in without:
            continue
        theirs = ", ".join(f"`{name}`" for name in row.theirs)
        ours = f"`{row.ours.replace('=', ': ', 1).replace('$', '...')}`" if row.ours else f"*{row.verdict}*"
        ours = "" if row.read_with else ours
        default = f"left out: `{shown(row.default)}`, as there" if row.default is not UNSET else ""
        remark = "; ".join(filter(None, (row.why, default)))
        lines.append(f"| {theirs} | {ours} | {remark.replace('|', chr(92) + '|')} |")
    return "\n".join(lines)
