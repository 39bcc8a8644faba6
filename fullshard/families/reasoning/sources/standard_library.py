"""Questions about functions of Python's standard library, with answers, or with reasoning and answers.

The source files are parsed, not imported; every CPython has them. Must not know tokens or ranks.
"""

from __future__ import annotations

import ast
import hashlib
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal

from fullshard.contracts.data import Records, Source
from fullshard.data.records import Listed, combine
from fullshard.errors import DataError

HELD_OUT = 8
"""One in this many functions is held out."""
SHORTEST, LONGEST = 20, 160
"""Characters of a description."""
Entry = tuple[str, str, str, str]
"""Module, function, arguments and description."""


class StandardLibrary(Source):
    """Records about documented functions: {question, answer}, or {question, reasoning, answer}."""

    form: Literal["answers", "reasoning"] = "answers"
    """answers: what a function does; reasoning: which function fits a description, and why."""
    part: Literal["train", "held_out", "all"] = "all"
    """held_out: one function in eight; train: the others."""

    def open(self) -> Records:
        chosen = [entry for entry in _entries() if self.part in ("all", _part_of(entry))]
        if not chosen:
            raise DataError(
                "Python's standard library has no source files here, so there is nothing to ask about. Use a Python "
                "that has them, or name other data in data.train."
            )
        rows = [_reasoned(entry) if self.form == "reasoning" else _answered(entry) for entry in chosen]
        return Listed(
            rows,
            where=lambda index: f"{chosen[index][0]}.{chosen[index][1]}",
            fingerprint=lambda: combine("standard_library", *(str(sorted(row.items())) for row in rows)),
        )


def _answered(entry: Entry) -> dict[str, str]:
    module, name, _, description = entry
    return {"question": f"What does {module}.{name} do?", "answer": description}


def _reasoned(entry: Entry) -> dict[str, str]:
    module, name, arguments, description = entry
    takes = f"It takes {arguments}" if arguments else "It takes no arguments"
    return {
        "question": f"Which function of {module} is this? {description}",
        "reasoning": f"The description fits {name}. {takes}.",
        "answer": f"{module}.{name}({arguments})",
    }


def _part_of(entry: Entry) -> str:
    number = int.from_bytes(hashlib.blake2b(".".join(entry[:2]).encode(), digest_size=8).digest(), "big")
    return "train" if number % HELD_OUT else "held_out"


@cache
def _entries() -> tuple[Entry, ...]:
    """Documented public functions of public modules at the top, by module and line; each description once."""
    found: dict[str, Entry] = {}
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if path.stem in sys.stdlib_module_names and not path.stem.startswith("_"):
            for entry in _documented(path):
                found.setdefault(entry[3], entry)
    return tuple(found.values())


def _documented(path: Path) -> Iterator[Entry]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escapes in old string literals
        tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            description = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
            if SHORTEST <= len(description) <= LONGEST:
                arguments = [each.arg for each in (*node.args.posonlyargs, *node.args.args) if each.arg != "self"]
                yield path.stem, node.name, ", ".join(arguments), description


__all__ = ["StandardLibrary"]
