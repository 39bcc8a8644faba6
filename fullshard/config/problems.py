"""Pydantic's errors as messages for the user: the key as a recipe writes it, what was found, what is allowed.

Nothing of Python or pydantic reaches the user. Must not know what any section or part means.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from fullshard.dialects import foreign_keys
from fullshard.formatting.plural import counted
from fullshard.formatting.yaml_text import shown

_NEEDED = {
    "int_parsing_size": "a whole number of at most 18 digits",
    "string_type": "text (put it in quotes)",
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "bool": "true or false",
    **dict.fromkeys(("list", "tuple", "set_type"), "a list such as [a, b]"),
    **dict.fromkeys(("dict", "mapping", "model"), "a mapping of keys"),
    "path": "a path",
    "none": "null",
}
"""What a key needs, by the type of pydantic's error or the first word of it."""
_BOUNDS = {
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "multiple_of": "a multiple of {multiple_of}",
}
_PATTERNS = {
    r"^[A-Za-z0-9][A-Za-z0-9._-]*$": "letters, digits, dots, hyphens and underscores, beginning with a letter or digit",
}
_TYPES = {"str", "int", "float", "bool", "list", "dict", "none", "tuple", "Path"}
"""Pydantic adds the names of union members to a key's path; these are types, not keys."""


def explain(entries: Sequence[Any], where: str) -> list[str]:
    """A line for each key with a problem; a value that fits no member of a union is one problem, not one per member."""
    found: dict[str, list[Any]] = {}
    for entry in entries:
        found.setdefault(_path(entry["loc"], where), []).append(entry)
    return [_problem(path, same) for path, same in found.items()]


def _problem(path: str, entries: Sequence[Any]) -> str:
    first = entries[0]
    if first["type"] == "missing":
        if isinstance(first["loc"][-1], int):
            return f"{path} is missing: the list is too short."
        return f"{path} is missing. Add it to the recipe."
    if first["type"] == "exclusive":
        keys = " and ".join(join(path, key) for key in first["ctx"]["keys"])
        return f"{keys} exclude each other. Give one of them."
    nouns = [noun for entry in entries if (noun := _noun(entry, path))]
    if len(nouns) == len(entries):
        return f"{path} = {found(first['input'])}: it must be {' or '.join(dict.fromkeys(nouns))}."
    message = next(e for e in entries if not _noun(e, path))["msg"].rstrip(".")
    for prefix in ("Value error, ", "Assertion failed, "):
        message = message.removeprefix(prefix)
    if path and message.startswith(path):
        return f"{message}."
    message = f"it must {message.removeprefix('Input should ')}" if message.startswith("Input should ") else message
    name = f"{path} = {found(first['input'])}" if path and not isinstance(first["input"], Mapping) else path or "recipe"
    return f"{name}: {message[:1].lower()}{message[1:]}."


def _noun(entry: Any, path: str) -> str | None:
    """What a value must be, or None for an error that is a whole sentence."""
    kind, context = entry["type"], entry.get("ctx", {})
    if kind in _BOUNDS:
        return _BOUNDS[kind].format(**{name: f"{bound:g}" for name, bound in context.items()})
    if kind.endswith(("too_short", "too_long")):
        bound, words = ("min_length", "at least") if kind.endswith("short") else ("max_length", "at most")
        what, unit = ("text", "character") if kind.startswith("string") else ("a list", "entry")
        return f"{what} of {words} {counted(context[bound], unit)}"
    if kind == "string_pattern_mismatch":
        return _PATTERNS.get(str(context["pattern"]), "text in the form that this key needs")
    if kind != "literal_error":
        return _NEEDED.get(kind, _NEEDED.get(kind.partition("_")[0]))
    return _one_of(path, entry["input"], str(context["expected"]).replace(" or ", ", ").replace("'", "").split(", "))


def not_one_of(path: str, value: Any, allowed: Sequence[str]) -> str:
    """The message for a value that is not one of the allowed words."""
    return f"{path} = {found(value)}: it must be {_one_of(path, value, allowed)}."


def _one_of(path: str, value: Any, allowed: Sequence[str]) -> str:
    ours = foreign_keys.of_value(path, value)
    hint = f" (here {shown(value)} is {ours})" if ours else did_you_mean(str(value), allowed)
    return f"{'one of ' if len(allowed) > 1 else ''}{', '.join(map(_allowed, allowed))}{hint}"


def _allowed(word: str) -> str:
    return {"None": "null", "True": "true", "False": "false"}.get(word, word)


def _path(steps: Sequence[Any], where: str) -> str:
    path = where
    for step in steps:
        if isinstance(step, int):
            path = f"{path}[{step}]"
        elif step.isidentifier() and step not in _TYPES:
            path = join(path, _allowed(step))
    return path


def join(where: str, key: str) -> str:
    """A key path with one more key."""
    return f"{where}.{key}" if where else key


def found(value: Any) -> str:
    """A value as YAML writes it; text in quotes, long values shortened."""
    if hasattr(value, "kind"):
        return str(value.kind())  # a part, made already
    text = f"'{value}'" if isinstance(value, str) else shown(value)
    return text if len(text) <= 60 else text[:57] + "..."


def sort_of(value: Any) -> str:
    """The type of a value, in JSON's terms."""
    names = {list: "a list", dict: "an object", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """` (did you mean 'x'?)`, or nothing if no known word is close."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if not near and word:
        # `rank` for `r`, `accum` for `accumulate`; several such words give no hint.
        begins = [name for name in known if name and (name.startswith(word) or word.startswith(name))]
        near = begins if len(begins) == 1 else []
    return f" (did you mean '{near[0]}'?)" if near else ""


def unknown_key(where: str, key: str, value: Any, known: Sequence[str]) -> list[str]:
    """The message for an unknown key: what we call it if another trainer has it, else the nearest key."""
    path, near = join(where, key), did_you_mean(key, known)
    nested = [f"{inner} is not a known key. {words}" for inner, words in foreign_keys.inside(path, value)]
    if nested and not near:
        return nested
    theirs = None if nested else foreign_keys.of_key(path, value)
    # Inside a section the nearest key of that section is meant, unless the other name belongs there too.
    if theirs and (not where or not near or f"Here it is {where}." in theirs):
        return [f"{path} is not a known key. {theirs}"]
    return [f"{path} is not a known key{near}. Known here: {', '.join(known) or 'no key'}."]
