"""The contract of an engine, which runs jobs on a cluster: Slurm, Kubernetes, Ray.

An engine is one file in this package, found by its name: `--on slurm` is `slurm.py`. Its fields are the options of the
command: `time: str` is `--time 4:00:00`. Must not know any engine, nor import torch.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from fullshard.config.part import Part
from fullshard.errors import SetupError

if TYPE_CHECKING:
    from fullshard.contracts.launcher import Topology
    from fullshard.recipes.read import Reading


@dataclass(frozen=True)
class Request:
    """What a job is to train."""

    reading: Reading
    """The recipe as it was read and checked; `reading.recipe.topology` has nodes and devices."""
    folder: Path
    """The folder of this job's files inside the run folder, absolute. It exists once the job is submitted."""
    recipe_text: str
    """Every value in force as a recipe, so that later edits of the user's file do not reach a waiting job."""
    stage: str | None = None
    """The one stage to train, of a recipe with stages."""

    @property
    def recipe_file(self) -> Path:
        """Where the recipe lies when the job starts."""
        return self.folder / "recipe.yaml"

    def train(self) -> list[str]:
        """The words after `fullshard` that train it; options of an engine's nodes follow."""
        return ["train", str(self.recipe_file), *(["--stage", self.stage] if self.stage else [])]


@dataclass(frozen=True)
class Job:
    """What is handed to the engine."""

    files: Mapping[str, str]
    """The files to write, by name inside the job's folder; `--dry-run` prints them."""
    submit: Sequence[str]
    """The command that submits them."""


@dataclass(frozen=True)
class Submitted:
    """A job that the engine has accepted."""

    id: str
    commands: Mapping[str, str] = field(default_factory=dict)
    """What the user can do next, by a short label: the command that shows it, the one that cancels it."""


class Engine(Part):
    """Runs jobs on a cluster."""

    folder: ClassVar[str] = "fullshard.submit"
    required: ClassVar[tuple[str, ...]] = ("job", "submit")
    own_options: ClassVar[Mapping[str, bool]] = {}
    """Options of the engine's own tool, and whether each takes a value. They are collected in the field `passed`."""
    instead: ClassVar[Mapping[str, str]] = {}
    """Options of that tool that cannot be given here, and what to do instead."""
    short: ClassVar[Mapping[str, str]] = {}
    """Options of that tool with one letter, such as -p, and the names to write instead."""
    sees_our_files: ClassVar[bool] = True
    """Whether its nodes have the paths of this machine: data and model are then checked before the job is submitted."""
    restarts_ranks: ClassVar[bool] = False
    """Whether the engine itself restarts ranks `topology.restarts` times: the ranks then read a recipe without it."""

    def worlds(self, topology: Topology) -> list[int]:
        """The numbers of ranks that the job may have; empty if only the cluster knows."""
        per_node = ranks_per_node(topology)
        return [] if per_node is None else [topology.nodes * per_node]

    def job(self, request: Request) -> Job:
        """The files and the command of a job; raises SetupError if the options do not fit the recipe."""
        raise NotImplementedError

    def submit(self, job: Job, folder: Path) -> Submitted:
        """Submits a job whose files lie in `folder`."""
        raise NotImplementedError


def ranks_per_node(topology: Topology) -> int | None:
    """The ranks of a node; None if that depends on its GPUs."""
    if isinstance(topology.devices, list):
        return len(topology.devices)
    if isinstance(topology.devices, int):
        return topology.devices
    return 1 if topology.device == "cpu" else None


def call(words: Sequence[str], *, needs: str, timeout_s: float = 120) -> str:
    """What a tool of the engine prints; SetupError with its own words if it fails. `needs` says where the tool is."""
    tool = Path(words[0]).name
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, check=False)
    except FileNotFoundError:
        raise SetupError(
            f"{tool} is not installed here. {needs} With --dry-run nothing is submitted, and the files are printed."
        ) from None
    except subprocess.TimeoutExpired:
        raise SetupError(f"{tool} gave no answer within {timeout_s:g} s. Is the engine running?") from None
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip()
        # Of a traceback only its last line is about the job.
        said = (said.splitlines()[-1] if "Traceback (most recent call last)" in said else said).rstrip(".")
        raise SetupError(f"{tool} refused the job: {said or f'exit code {done.returncode}'}.")
    return done.stdout.strip()
