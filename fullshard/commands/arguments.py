"""Command-line arguments as settings: `key=value`, `--key=value`, `--key value`, `--flag`, `--no-flag`.

Hyphens and underscores are the same. Must not know what any key means, beyond the two short flags for precision.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from difflib import get_close_matches

from fullshard.dialects import foreign_keys
from fullshard.errors import RecipeError
from fullshard.formatting.yaml_text import parse_value

_SETTING = re.compile(r"^[A-Za-z_][\w.\-\[\]]*=")
_KEY = re.compile(r"^--[A-Za-z_][\w.\-\[\]]*$")
_FALSE = ("false", "no", "off", "0")


def to_overrides(words: Sequence[str], *, sections: Sequence[str], options: Sequence[str]) -> list[str]:
    """The settings in `words`, each as `key=value`; `sections` are the recipe's keys, `options` the command's own."""
    overrides: list[str] = []
    rest = deque(words)
    while rest:
        word = rest.popleft()
        if word.startswith("--"):
            name, given, value = word[2:].partition("=")
            if not given and rest and not _is_setting(rest[0]):
                value, given = rest.popleft(), "="
            word = _flag(name, value if given else None, sections, options)
        elif not _SETTING.match(word):
            raise RecipeError(
                f"{word!r} on the command line is not a setting. Settings follow the recipe and look like "
                "optimizer.lr=3e-4."
            )
        overrides.append(word)
    return overrides


def _is_setting(word: str) -> bool:
    return bool(_SETTING.match(word) or _KEY.match(word.partition("=")[0]))


def _flag(name: str, value: str | None, sections: Sequence[str], options: Sequence[str]) -> str:
    """`--name value`, `--name` (true) or `--no-name` (false) as `key=value`."""
    key = name.replace("-", "_")
    if key.removeprefix("no_") in ("fp16", "bf16"):
        wanted = (value or "true").lower() not in _FALSE and not key.startswith("no_")
        return f"precision={key.removeprefix('no_') if wanted else 'fp32'}"
    top = re.split(r"[.\[]", key)[0]
    if top.startswith("no_") and top not in sections and value is None:
        key, top, value = key.removeprefix("no_"), top.removeprefix("no_"), "false"
    if top not in sections:
        known = [*options, *(f"--{section}." for section in sections)]
        # A typo in one of our names, rather than another trainer's name.
        slip = get_close_matches(f"--{name}", known, n=1, cutoff=0.85) or get_close_matches(top, sections, cutoff=0.85)
        theirs = foreign_keys.of_key(key, parse_value(value, where=key) if value is not None else True)
        if theirs and not slip:
            raise RecipeError(f"--{name} is neither an option nor a key of the recipe. {theirs}")
        near = get_close_matches(f"--{name}", known, n=1, cutoff=0.6)
        meant = f" Did you mean {near[0]}{'KEY' if near[0].endswith('.') else ''}?" if near else ""
        raise RecipeError(
            f"--{name} is neither an option nor a key of the recipe.{meant} Options: {', '.join(options)}. "
            f"Keys start with: {', '.join(sections)}."
        )
    return f"{key}={'true' if value is None else value}"
