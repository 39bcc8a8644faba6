"""The package as the architecture tests see it: its files, their lines and their imports. Reads files, imports none."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import fullshard

PACKAGE = Path(fullshard.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

SERVING = (
    "families",
    # Tools: commands around a run, and the command line that lists them.
    "__main__",
    "check",
    "cli",
    "commands",
    "evaluate",
    "explain",
    "export",
    "generate",
    "prove",
    # What a run proves before step 1 and at its first update: it counts with `prove`.
    "proofs",
    # What families share: Transformers' formats, towers, texts, images and losses over embeddings.
    "hf",
    "images",
    "multimodal",
    "similarity",
    "text",
    # Products and attention that only some processors have; torch's own are used without them.
    "kernels",
    # Other tools' keys and files, translated or answered.
    "dialects",
    # Several runs in a row, and the library for those who keep their own loop: both call the engine.
    "stages",
    "own_loop",
    # Jobs for the engine that a user has; what watches a run for faults, and the command that explains a hang.
    "submit",
    "faults",
    "autopsy",
    # Faster ways to compute the same on one kind of device; the engine works without them.
    "fast",
    # Faults that happen on purpose.
    "drills",
    # The card of an exported model, the table of runs, and where the time of a run goes.
    "card",
    "runs",
    "profile",
    # One page about runs.
    "report",
    # Memory and time of a run before it starts.
    "plan",
)
"""What is not the engine. Everything else in the package is."""


def name_of(path: Path) -> str:
    """The module of a file: `fullshard.dist.shard`."""
    parts = ("fullshard", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in FILES}


def unit(module: str) -> str:
    """The package or top-level module that a module belongs to; empty for `fullshard` itself."""
    return module.partition(".")[2].partition(".")[0]


def family(module: str) -> str:
    """The family that a module belongs to; empty outside families."""
    parts = module.split(".")
    return parts[2] if parts[1:2] == ["families"] and len(parts) > 2 else ""


def in_engine(module: str) -> bool:
    """Whether a module counts as engine."""
    return unit(module) not in SERVING


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def functions(path: Path) -> list[tuple[str, int]]:
    """Every function of a file with its length in lines."""
    found = [node for node in ast.walk(tree(path)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return [(node.name, (node.end_lineno or 0) - node.lineno + 1) for node in found]


def names_imported(nodes: list[ast.stmt] | list[ast.AST]) -> set[str]:
    """Everything that import statements name, modules and what is taken from them alike."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@functools.cache
def imported(path: Path) -> frozenset[str]:
    """Every name that a file imports: at the top, inside functions and for the type checker."""
    return frozenset(names_imported(list(ast.walk(tree(path)))))


def modules_imported(path: Path) -> set[str]:
    """The modules of this package among them. `from fullshard.dist import shard` is the module, not its package."""
    names = imported(path) & MODULES.keys()
    packages = {name for name in names if any(other.startswith(f"{name}.") for other in names)}
    return set(names - packages - {name_of(path)})
