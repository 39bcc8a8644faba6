"""A known error for people: on a console, as plain data, and on the page that lists all of them.

Must not know how an error is recognised, nor where the text goes.
"""

from __future__ import annotations

import re
import textwrap
import typing
from collections.abc import Sequence
from typing import Any

from fullshard.explain.match import Match
from fullshard.explain.record import Group, KnownError, entries
from fullshard.formatting import readable

WIDTH = 100
_HEADINGS: dict[Group, str] = {
    "memory": "Memory",
    "precision": "Precision and gradients",
    "sharding": "Sharding",
    "ranks": "Ranks and the network",
    "model": "Models, weights and tokenizers",
    "data": "Data",
    "machine": "The machine",
}
_ROLES = {
    "consequence": "This is the consequence of an earlier failure; look for that first.",
    "remark": "This is only a remark; it does not stop the run.",
}


def section(entry: KnownError, *, found: str = "", width: int = WIDTH) -> str:
    """One entry for a console, without colours."""
    rows = [("found", found)] if found else []
    rows.append(("cause", entry.cause))
    rows += [("do" if i == 0 else "", f"{i + 1}. {step}") for i, step in enumerate(entry.remedy)]
    rows += [("avoid" if i == 0 else "", f"- {advice}") for i, advice in enumerate(entry.not_a_cure)]
    if entry.keys:
        rows.append(("keys", ", ".join(entry.keys)))
    lines = [left + right for left, right in readable.columns(rows, width=width)]
    return "\n".join([f"{entry.title} ({entry.name})", *lines])


def answer(matches: Sequence[Match], *, width: int = WIDTH) -> str:
    """The first match in full, the others by name."""
    first, *others = matches
    text = section(first.entry, found=first.found, width=width)
    if others:
        listed = [(match.entry.name, match.entry.title) for match in others]
        lines = [left + right for left, right in readable.columns(listed, width=width)]
        text += "\n\nAlso in this text (fullshard explain NAME):\n" + "\n".join(lines)
    return text


def listing(*, width: int = WIDTH) -> str:
    """The names and titles of all entries."""
    rows = [(entry.name, entry.title) for entry in entries()]
    return "\n".join((left + right).rstrip() for left, right in readable.columns(rows, width=width))


def as_data(match: Match) -> dict[str, Any]:
    """A match as plain data."""
    return {"found": match.found, **match.entry.model_dump(mode="json", exclude={"patterns"})}


def page() -> str:
    """docs/troubleshooting.md: every entry, by group."""
    parts = [_INTRODUCTION]
    for group in typing.get_args(Group):
        listed = "\n".join(f"- [{e.title}](#{e.name})" for e in entries() if e.group == group)
        parts.append(f"**{_HEADINGS[group]}**\n\n{listed}")
    for group in typing.get_args(Group):
        parts.append(f"## {_HEADINGS[group]}")
        parts += [_chapter(entry) for entry in entries() if entry.group == group]
    return "\n\n".join(parts) + "\n"


_INTRODUCTION = """\
# Troubleshooting

Every error that `fullshard explain` knows. Give it an error message, a log file or a run folder:

```bash
fullshard explain "ValueError: Attempting to unscale FP16 gradients."
fullshard explain runs/my-model/log.txt
fullshard explain runs/my-model
```

A run that crashes ends with the same explanation, and leaves a crash folder `crash-N` in its run folder: the
traceback of every rank, the resolved recipe, the environment, the last metrics and the end of the log.

This page is generated from the files in `fullshard/explain/entries`; `python -m fullshard.explain` updates it."""


def _chapter(entry: KnownError) -> str:
    seen = "\n".join(_readable(pattern) for pattern in entry.patterns)
    parts = [f'<a id="{entry.name}"></a>\n\n### {entry.title}', f"```text\n{seen}\n```"]
    if entry.role in _ROLES:
        parts.append(_ROLES[entry.role])
    parts += [f"**Why.** {entry.cause}", "**What to do.**"]
    parts.append("\n".join(_item(f"{i}. ", step) for i, step in enumerate(entry.remedy, 1)))
    if entry.not_a_cure:
        parts += ["**What does not help.**", "\n".join(_item("- ", advice) for advice in entry.not_a_cure)]
    if entry.keys:
        parts.append(f"**Recipe keys.** {', '.join(f'`{key}`' for key in entry.keys)}")
    return "\n\n".join(_wrapped(part) for part in parts)


def _readable(pattern: str) -> str:
    """A pattern as the text it finds: the first of alternatives, and ... for what varies."""
    text = re.sub(r"\(\?:([^|()]*)(?:\|[^()]*)?\)\??", r"\1", pattern)
    text = re.sub(r"(?:\[[^\]]*\]|\\[wdSs]|(?<!\\)\.)(?:[*+]|\{[\d,]+\})", "...", text)
    text = re.sub(r"\\s\?|-\?", "", text)
    return re.sub(r"\[(\w)\w\]", r"\1", re.sub(r"\\([^\w\s])", r"\1", text))


def _item(mark: str, text: str) -> str:
    return textwrap.fill(
        text,
        120,
        initial_indent=mark,
        subsequent_indent=" " * len(mark),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _wrapped(part: str) -> str:
    """Prose in lines of 120; lists, headings and patterns as they are."""
    prose = part.startswith("**") and "\n" not in part
    return textwrap.fill(part, 120, break_long_words=False, break_on_hyphens=False) if prose else part
