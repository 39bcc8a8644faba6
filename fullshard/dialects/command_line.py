"""Command-line arguments as settings: `key=value`, `--key=value`, `--key value`, `--flag`, `--no-flag`, and the flags
of other trainers' scripts.

Hyphens and underscores are the same. Must not know the recipe: it is given the names of its sections.
"""

from __future__ import annotations

import json
import os
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from fullshard.dialects import foreign_keys
from fullshard.dialects.kinds import SWITCH, BadValue, is_off
from fullshard.dialects.readers import EXCLUSIVE
from fullshard.dialects.rows import File, Outcome, Row
from fullshard.dialects.tables import dialects
from fullshard.dialects.translate import of_their_kind
from fullshard.errors import RecipeError
from fullshard.formatting.yaml_text import parse_value, shown

_SETTING = re.compile(r"^[A-Za-z_][\w.\-\[\]]*=")
_KEY = re.compile(r"^--[A-Za-z_][\w.\-\[\]]*$")


@dataclass(frozen=True)
class Typed:
    """A flag of another trainer's script."""

    typed: str
    """As on the command line."""
    key: str
    value: Any
    row: Row


@dataclass
class Given:
    """The settings of a command line: those in our words, and those that other trainers' flags stand for."""

    own: list[str] = field(default_factory=list)
    flags: dict[str, tuple[str, str]] = field(default_factory=dict)
    """By our key: the flag as typed, and our value as text."""
    notes: list[str] = field(default_factory=list)
    """A line for each flag without effect, or that a setting of ours overrides."""

    @property
    def settings(self) -> list[str]:
        """All settings as `key=value`. Ours win over a flag for the same key, or for one that it excludes."""
        keys = {setting.partition("=")[0].replace("-", "_") for setting in self.own}
        taken = keys | {key for group in EXCLUSIVE if keys & set(group) for key in group}
        kept = [f"{key}={value}" for key, (_, value) in self.flags.items() if not _is_taken(key, taken)]
        return [*kept, *self.own]

    def overridden(self) -> list[str]:
        """A line for each flag that a setting of ours overrides."""
        kept = set(self.settings)
        lost = {flag for key, (flag, value) in self.flags.items() if f"{key}={value}" not in kept and value != "null"}
        return [f"{flag} gives way to the settings that follow it" for flag in sorted(lost)]


def _is_taken(key: str, taken: set[str]) -> bool:
    return key in taken or any(key.startswith(f"{other}.") for other in taken)


def to_overrides(words: Sequence[str], *, sections: Sequence[str], options: Sequence[str]) -> list[str]:
    """The settings in `words`, each as `key=value`; `sections` are the recipe's keys, `options` the command's own."""
    return read_words(words, sections=sections, options=options).settings


def read_words(
    words: Sequence[str], *, sections: Sequence[str], options: Sequence[str], also: Sequence[str] = ()
) -> Given:
    """The settings and flags in `words`; `also` are options that a typo may mean, and too many to list."""
    given, flags = Given(), list[Typed]()
    rest = deque(words)
    while rest:
        word = rest.popleft()
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            if not equals and rest and not _is_setting(rest[0]):
                value, equals = rest.popleft(), "="
            if flag := _flag(given, name, value if equals else None, sections, (options, also)):
                flags.append(flag)
        elif not _SETTING.match(word):
            hint = f" A launcher's file is given as --config-file {word}." if os.path.isfile(word) else ""
            raise RecipeError(
                f"{word!r} on the command line is not a setting. Settings follow the recipe and look like "
                f"optimizer.lr=3e-4.{hint}"
            )
        else:
            given.own.append(word)
    together = File(of_their_kind(dialects()["flags"], {flag.key: flag.value for flag in flags}))
    for flag in flags:
        _take(given, flag, together)
    return given


def recipe_and_rest(recipe: str, words: Sequence[str]) -> tuple[str, list[str]]:
    """The recipe, also as `--config NAME` of scripts that take one, and the words without it."""
    first = [] if not recipe.startswith("-") else [recipe]
    rest, named = [*first, *words], ""
    for place, word in enumerate(rest):
        if word == "--config" and place + 1 < len(rest):
            named, rest = rest[place + 1], rest[:place] + rest[place + 2 :]
            break
        if word.startswith("--config="):
            named, rest = word.partition("=")[2], rest[:place] + rest[place + 1 :]
            break
    if not named:
        return recipe, list(words)
    if not first and recipe != named:
        raise RecipeError(f"{recipe} and --config {named} name two recipes. Give one of them.")
    return named, rest


def option_names(option: str) -> list[str]:
    """The flags of other scripts for an option of ours."""
    rows = [row for row in dialects()["flags"].rows if row.ours == option]
    return [f"--{name.replace('_', '-')}" for row in rows for name in row.theirs]


def _is_setting(word: str) -> bool:
    return bool(_SETTING.match(word) or _KEY.match(word.partition("=")[0]))


def _flag(
    given: Given, name: str, value: str | None, sections: Sequence[str], options: tuple[Sequence[str], Sequence[str]]
) -> Typed | None:
    """`--name value`, `--name` (true) or `--no-name` (false): a key of ours, or another trainer's flag."""
    key, typed = name.replace("-", "_"), f"--{name}" + (f" {value}" if value is not None else "")
    top = re.split(r"[.\[]", key)[0]
    flags = dialects()["flags"].spellings
    if top.startswith("no_") and top not in sections and key not in flags and value is None:
        key, top, value = key.removeprefix("no_"), top.removeprefix("no_"), "false"
    if key in ("fp16", "bf16"):
        given.own.append(f"precision={key if _is_on(typed, value) else 'fp32'}")
        return None
    if top in sections:
        given.own.append(f"{key}={'true' if value is None else value}")
        return None
    row = flags.get(key)
    if row is None or row.verdict == "refused" or row.ours.startswith("--"):
        raise _unknown(name, key, value, sections, *options)
    return Typed(typed, key, True if value is None else parse_value(value, where=f"--{name}"), row)


def _is_on(typed: str, value: str | None) -> bool:
    try:
        return bool(SWITCH.read(True if value is None else value))
    except BadValue as error:
        raise RecipeError(f"{typed}: {error}.") from None


def _take(given: Given, flag: Typed, together: File) -> None:
    """Another trainer's flag as settings of ours."""
    outcome = flag.row.read(flag.value, together)
    if flag.row.is_switch and flag.row.form == "true" and is_off(flag.value):
        outcome = Outcome({flag.row.key: False})  # over a recipe that has it on
    if outcome.verdict == "refused":
        raise RecipeError(f"{flag.typed}: {outcome.why}.")
    if outcome.why and not outcome.settings:
        given.notes.append(f"{flag.typed} has no effect: {outcome.why}")
    for key, ours in outcome.settings.items():
        text = as_text(ours)
        before = given.flags.setdefault(key, (flag.typed, text))
        if before[1] != text:
            raise RecipeError(f"{before[0]} and {flag.typed} on the command line both set {key}. Give one of them.")


def as_text(value: Any) -> str:
    """A value as `key=VALUE` takes it, so that it is read as the same value."""
    text = shown(value)
    return text if value is None or parse_value(text, where="") == value else json.dumps(value)


def _unknown(
    name: str, key: str, value: str | None, sections: Sequence[str], options: Sequence[str], also: Sequence[str]
) -> RecipeError:
    known = [*options, *also, *(f"--{section}." for section in sections)]
    top = re.split(r"[.\[]", key)[0]
    # A typo in one of our names, rather than another trainer's name.
    slip = get_close_matches(f"--{name}", known, n=1, cutoff=0.85) or get_close_matches(top, sections, cutoff=0.85)
    theirs = foreign_keys.of_key(key, parse_value(value, where=key) if value is not None else True)
    if theirs and not slip:
        return RecipeError(f"--{name} is neither an option nor a key of the recipe. {theirs}")
    near = get_close_matches(f"--{name}", known, n=1, cutoff=0.6)
    meant = f" Did you mean {near[0]}{'KEY' if near[0].endswith('.') else ''}?" if near else ""
    return RecipeError(
        f"--{name} is neither an option nor a key of the recipe.{meant} Options: {', '.join(options)}. "
        f"Keys start with: {', '.join(sections)}."
    )
