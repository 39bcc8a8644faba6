"""Who may import whom. Every import counts: at the top of a file, inside a function, and for the type checker."""

from __future__ import annotations

import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.arch.package import FILES, MODULES, PACKAGE, family, imported, modules_imported, name_of, unit

LAYERS = [
    "errors",
    "formatting",
    "dialects",
    "explain",
    "config",
    "contracts",
    "faults",
    "kernels",
    "launch",
    "dist",
    "fast",
    "profile",
    "log",
    "card",
    "checkpoint",
    "images",
    "data",
    "text",
    "optim",
    "schedules",
    "sinks",
    "similarity",
    "proofs",
    "step",
    "evaluations",
    "hf",
    "multimodal",
    "recipe",
    "stages",
    "recipes",
    "control",
    "loop",
    "setup",
    "commands",
    "export",
    "evaluate",
    "generate",
    "autopsy",
    "runs",
    "report",
    "build",
    "plan",
    "check",
    "run",
    "prove",
    "drills",
    "submit",
    "own_loop",
    "families",
    "cli",
    "__main__",
]
"""The packages and modules at the top, low to high. Each imports only from those before it."""
RANK = {name: rank for rank, name in enumerate(LAYERS)}


def test_every_package_has_its_layer() -> None:
    assert {unit(module) for module in MODULES} - {""} == set(LAYERS)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_go_down(path: Path) -> None:
    ours = unit(name_of(path))
    if ours:  # fullshard/__init__.py gives every public name, on first use
        for module in modules_imported(path) - {"fullshard"}:
            assert unit(module) == ours or RANK[unit(module)] < RANK[ours], f"{name_of(path)} imports {module}"


def test_packages_form_no_cycle() -> None:
    graph: dict[str, set[str]] = {name: set() for name in LAYERS}
    for name, path in MODULES.items():
        if unit(name):
            graph[unit(name)] |= {unit(module) for module in modules_imported(path)} - {"", unit(name)}
    assert len(list(TopologicalSorter(graph).static_order())) == len(LAYERS)


def test_nothing_outside_families_imports_a_family() -> None:
    """Outside its folder no family is imported: not by the engine, not by tools, not by another family."""
    for path in FILES:
        ours = family(name_of(path))
        others = {module for module in modules_imported(path) if family(module) not in ("", ours)}
        assert not others, f"{name_of(path)} imports {others}"


def test_collectives_are_in_dist_checkpoint_and_launch_only() -> None:
    for path in FILES:
        place = path.relative_to(PACKAGE)
        if place.parts[0] not in ("dist", "checkpoint", "launch"):
            used = {name for name in imported(path) if name.startswith("torch.distributed")}
            assert used <= {"torch.distributed.tensor", "torch.distributed.tensor.DTensor"}, path


def test_reading_recipes_and_help_needs_no_torch() -> None:
    modules = "fullshard, fullshard.cli, fullshard.recipes.read, fullshard.recipe"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
