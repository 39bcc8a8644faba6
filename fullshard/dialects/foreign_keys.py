"""Another trainer's key in a recipe of ours: the error names our key and what to write, from the rows of all dialects.

Also the keys of FSDP1 that a recipe may keep, without effect. Must not know the recipe.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fullshard.dialects.kinds import is_off
from fullshard.dialects.rows import File, Row
from fullshard.dialects.words import nearest_word
from fullshard.formatting.yaml_text import shown


@dataclass(frozen=True)
class NoEffect:
    """A key that is accepted and does nothing."""

    allowed: tuple[str | bool, ...]
    help: str
    """The key's description for editors."""
    note: str
    """What happens instead; {value} is the value given."""
    as_always: tuple[str | bool, ...] = ()
    """Values that ask for what FSDP2 does anyway; they need no note."""

    def note_for(self, value: str | bool) -> str | None:
        return None if value in self.as_always else self.note.format(value=shown(value))


NO_EFFECT: dict[str, dict[str, NoEffect]] = {
    # By section. These were switches of FSDP1.
    "sharding": {
        "use_orig_params": NoEffect(
            (True, False),
            "Accepted without effect: FSDP2 always keeps the original parameters.",
            "sharding.use_orig_params has no effect: FSDP2 always keeps the original parameters.",
        ),
        "limit_all_gathers": NoEffect(
            (True, False),
            "Accepted without effect: FSDP2 needs no limit.",
            "sharding.limit_all_gathers has no effect: FSDP2 bounds the gathered memory by itself.",
        ),
        "backward_prefetch": NoEffect(
            ("BACKWARD_PRE", "BACKWARD_POST", "NONE"),
            "Accepted without effect: FSDP2 always gathers the next block early, as BACKWARD_PRE did.",
            "sharding.backward_prefetch = {value} is not available: "
            "FSDP2 always gathers the next block's parameters early, as BACKWARD_PRE did.",
            as_always=("BACKWARD_PRE",),
        ),
    },
}


@functools.cache
def spellings() -> dict[str, Row]:
    """Every spelling of every dialect with its row; of two dialects the first one's."""
    from fullshard.dialects.tables import dialects

    found: dict[str, Row] = {}
    for dialect in dialects().values():
        for spelling, row in dialect.spellings.items():
            if not row.ours.startswith(("--", "RECIPE")) and not row.read_with:
                found.setdefault(spelling, row)
    return found


def row_of(path: str) -> Row | None:
    """The row of another trainer's key; the longest ending of the path that is known wins."""
    steps = path.replace("-", "_").lower().split(".")
    endings = [".".join(steps[place:]) for place in range(len(steps))]
    return next((spellings()[ending] for ending in endings if ending in spellings()), None)


def of_key(path: str, value: Any) -> str | None:
    """Two sentences for a key that other trainers have, or None: what it is called here, and what to write."""
    row = row_of(path)
    if row is None or row.key == path:
        return None
    if row.verdict == "refused":
        return f"{row.why[:1].upper()}{row.why[1:]}."
    if row.verdict == "no effect":
        return f"It is not needed: {row.why}. Leave it out."
    if row.is_switch and is_off(value):
        return f"Here it is {row.key}, and if it is off, leave it out."
    if value is None or isinstance(value, Mapping):
        return f"Here it is {row.key}." if row.key else None
    outcome = row.read(value, File())
    if outcome.verdict == "refused":
        why = f"{outcome.why[:1].upper()}{outcome.why[1:].removesuffix('.')}."
        return f"{why} Here it is {row.key}." if row.key else why
    if row.key not in outcome.settings:
        return f"Here it is {row.key}." if row.key and not outcome.why else f"It is not needed: {outcome.why}."
    written = shown(outcome.settings[row.key])
    if (ours := nearest_word(row.key, value)) is not None:
        written = ours
    setting = _quoted(f"{row.key}={written}")
    return f"Here it is {row.key}: write {_nested(row.key, written)} in the recipe, or {setting} on the command line."


def inside(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """The foreign keys in a section that does not exist here, each with what to write."""
    for key, inner in value.items() if isinstance(value, Mapping) else ():
        where = f"{path}.{key}"
        if isinstance(inner, Mapping):
            yield from inside(where, inner)
        elif found := of_key(where, inner):
            yield where, found


def of_value(key: str, value: Any) -> str | None:
    """Our word for a foreign value of one of our keys, or None."""
    return nearest_word(key, value)


def _nested(key: str, written: str) -> str:
    """`optimizer: {lr: 3e-4}`."""
    *outer, last = key.split(".")
    text = f"{last}: {written}"
    for name in reversed(outer):
        text = f"{name}: {{{text}}}"
    return text


def _quoted(setting: str) -> str:
    return f"'{setting}'" if any(character in setting for character in " {}[]*") else setting
