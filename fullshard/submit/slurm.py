"""Slurm: a batch file, and sbatch."""

from __future__ import annotations

from pathlib import Path

from fullshard.errors import SetupError
from fullshard.submit.engine import Engine, Job, Request, Submitted


class Slurm(Engine):
    """A batch job of Slurm."""

    time: str | None = None
    """The time limit: 4:00:00, or 2-00:00:00 for two days."""

    def job(self, request: Request) -> Job:
        raise SetupError("--on slurm does not write a job yet.")

    def submit(self, job: Job, folder: Path) -> Submitted:
        raise SetupError("--on slurm does not submit yet.")


__all__ = ["Slurm"]
