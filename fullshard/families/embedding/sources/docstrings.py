"""Docstrings and signatures of Python's standard library: pairs for retrieval.

The source files are parsed, not imported. Every CPython has them, and each Python version gives the same pairs
everywhere. Must not know tokens or ranks.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from fullshard.contracts.data import Records, Source
from fullshard.data.records import Listed, combine
from fullshard.errors import DataError

SHORTEST, LONGEST = 20, 400
"""Characters of a description."""
HELD_OUT = 6
"""One in this many packages is held out."""

_LEFT_OUT = frozenset(
    {"antigravity", "encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "test", "tests", "this", "turtledemo"}
)
"""Tests, demonstrations, jokes and tables."""
_BLANK_LINE = re.compile(r"\n\s*\n")
_ATTRIBUTES = frozenset({"property", "cached_property"})


@dataclass(frozen=True)
class _Entry:
    """One documented name."""

    module: str
    place: str
    description: str
    signature: str


class Docstrings(Source):
    """Pairs of a docstring's first paragraph (`query`) and its signature (`positive`)."""

    part: Literal["train", "held_out", "all"] = "all"
    """held_out: about a sixth of the standard library's packages, whole; train: the others."""

    def open(self) -> Records:
        chosen = [entry for entry in _entries(_folder()) if self.part == "all" or self.part == _part_of(entry.module)]
        rows = [{"query": e.description, "positive": e.signature, "module": e.module} for e in chosen]
        return Listed(
            rows,
            where=lambda index: chosen[index].place,
            fingerprint=lambda: combine("docstrings", *(f"{e.description}\n{e.signature}" for e in chosen)),
        )


def _part_of(module: str) -> str:
    """A package is never split: its modules describe the same things in the same words."""
    package = module.partition(".")[0]
    number = int.from_bytes(hashlib.blake2b(package.encode(), digest_size=8).digest(), "big")
    return "train" if number % HELD_OUT else "held_out"


def _folder() -> Path:
    return Path(sysconfig.get_path("stdlib"))


@cache
def _entries(folder: Path) -> tuple[_Entry, ...]:
    """All pairs, by module and line; only the first of equal descriptions or signatures."""
    found = []
    descriptions: set[str] = set()
    signatures: set[str] = set()
    for module, path in sorted(_modules(folder)) if folder.is_dir() else []:
        for entry in _documented(_parsed(path).body, module, path=path, module=module):
            if entry.description not in descriptions and entry.signature not in signatures:
                found.append(entry)
            descriptions.add(entry.description)
            signatures.add(entry.signature)
    if not found:
        raise DataError(
            f"{folder}: no source files of Python's standard library are here, so there are no docstrings to learn "
            "from. Use a Python that has them, or name other data in data.train."
        )
    return tuple(found)


def _modules(folder: Path, *package: str) -> Iterator[tuple[str, Path]]:
    """The public modules under a folder, without folders such as site-packages that cannot be imported."""
    for path in folder.iterdir():
        if path.is_dir():
            if _is_public(path.name):
                yield from _modules(path, *package, path.name)
        elif path.suffix == ".py" and (_is_public(path.stem) or (package and path.stem == "__init__")):
            yield ".".join((*package, path.stem) if path.stem != "__init__" else package), path


def _is_public(name: str) -> bool:
    return name.isidentifier() and not name.startswith("_") and name not in _LEFT_OUT


def _parsed(path: Path) -> ast.Module:
    try:
        with warnings.catch_warnings():
            # Old escapes in the library's own strings are not the user's concern.
            warnings.simplefilter("ignore")
            return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"{path}: this file of Python's standard library cannot be read: {error}.") from error


def _documented(body: list[ast.stmt], prefix: str, *, path: Path, module: str) -> Iterator[_Entry]:
    """The public functions and classes of a body, also inside classes and conditions."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if node.name.startswith("_"):
                continue
            name = f"{prefix}.{node.name}"
            description = " ".join(_BLANK_LINE.split(ast.get_docstring(node) or "")[0].split())
            if SHORTEST <= len(description) <= LONGEST:
                signature = _signature(node, name, is_method=prefix != module)
                yield _Entry(module, f"{path}:{node.lineno}", description, signature)
            if isinstance(node, ast.ClassDef):
                yield from _documented(node.body, name, path=path, module=module)
        elif isinstance(node, (ast.If, ast.Try)):
            caught = [line for handler in getattr(node, "handlers", []) for line in handler.body]
            inside = [*node.body, *caught, *node.orelse, *getattr(node, "finalbody", [])]
            yield from _documented(inside, prefix, path=path, module=module)


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, name: str, *, is_method: bool) -> str:
    """`json.dumps(obj, *, skipkeys, ensure_ascii)`: without defaults and annotations."""
    if isinstance(node, ast.ClassDef):
        starts = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
        return _signature(starts[0], name, is_method=True) if starts else name
    decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
    if decorators & _ATTRIBUTES:
        return name
    arguments = node.args
    first, others = [a.arg for a in arguments.posonlyargs], [a.arg for a in arguments.args]
    if is_method and "staticmethod" not in decorators:
        del (first or others)[:1]
    words = first + ["/"] * bool(first) + others
    if arguments.vararg or arguments.kwonlyargs:
        words.append(f"*{arguments.vararg.arg if arguments.vararg else ''}")
    words += [a.arg for a in arguments.kwonlyargs]
    if arguments.kwarg:
        words.append(f"**{arguments.kwarg.arg}")
    return f"{name}({', '.join(words)})"


__all__ = ["Docstrings"]
