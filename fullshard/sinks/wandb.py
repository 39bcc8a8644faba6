"""Weights & Biases. All its files stay in the run's folder `wandb/`; `wandb sync RUN/wandb/offline-run-*` sends an
offline run later.

Numbers are drawn over our own step, so a resumed run goes on in the same curves. Must not know what the numbers mean.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from fullshard.errors import SetupError, missing_package
from fullshard.log.metrics import FILE, last_step, scalars
from fullshard.sinks.base import OpenSink, Sink


class WeightsAndBiases(Sink):
    """Curves on a Weights & Biases server."""

    project: str = "fullshard"
    """The project that the run appears in."""
    entity: str | None = None
    """The user or team; null: the one that is logged in."""
    tags: list[str] = []
    """Words to find the run by."""
    mode: Literal["online", "offline", "disabled"] = "online"
    """offline keeps everything in the run folder; disabled does nothing."""
    run_name: str | None = None
    """The name shown for the run; null: the recipe's name."""

    def open(self, folder: Path, *, name: str, recipe: dict[str, Any]) -> OpenSink:
        if self.mode == "disabled":
            return _Disabled()
        try:
            import wandb
        except ImportError as error:
            raise missing_package("wandb", extra="wandb", needed_by="log.sinks: wandb") from error
        home = folder / "wandb"
        home.mkdir(parents=True, exist_ok=True)
        try:
            with _cache_in(home / "cache"):
                run = wandb.init(
                    project=self.project,
                    entity=self.entity,
                    tags=self.tags,
                    name=self.run_name or name,
                    mode=self.mode,
                    dir=str(folder),
                    config=recipe,
                    id=_run_id(home / "run-id", resumed=last_step(folder / FILE) is not None),
                    resume="allow" if self.mode == "online" else None,
                    # It must neither wrap stdout, which the progress bars own, nor wait for a key to be typed in.
                    settings=wandb.Settings(silent=True, console="off", login_timeout=30),
                )
        except Exception as error:
            raise SetupError(
                f"log.sinks: wandb cannot start a run (project {self.project}, mode {self.mode}): {error} "
                "Log in with `wandb login` or set WANDB_API_KEY; without a network use mode: offline."
            ) from error
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")
        return _Open(run)


class _Open(OpenSink):
    def __init__(self, run: Any) -> None:
        self._run = run

    def write(self, record: dict[str, Any]) -> None:
        if numbers := scalars(record):
            self._run.log({**numbers, "step": record["step"]})

    def close(self) -> None:
        self._run.finish()


class _Disabled(OpenSink):
    def write(self, record: dict[str, Any]) -> None:
        """Nothing is kept."""


def _run_id(path: Path, *, resumed: bool) -> str:
    if not (resumed and path.exists()):
        path.write_text(secrets.token_hex(4), encoding="utf-8")
    return path.read_text(encoding="utf-8")


@contextmanager
def _cache_in(folder: Path) -> Iterator[None]:
    """Keeps what the wandb service writes for itself out of the user's home, unless the user has chosen a place."""
    chosen = "WANDB_CACHE_DIR" in os.environ
    os.environ.setdefault("WANDB_CACHE_DIR", str(folder.absolute()))
    try:
        yield
    finally:
        if not chosen:
            del os.environ["WANDB_CACHE_DIR"]


__all__ = ["WeightsAndBiases"]
