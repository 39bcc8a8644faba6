"""Weights & Biases. All its files stay in the run's folder `wandb/`; `wandb sync RUN/wandb/offline-run-*` sends an
offline run later.

Wandb's own variables (WANDB_MODE, WANDB_PROJECT, WANDB_NAME, ...) apply where the recipe leaves a key out. The x axis
is our own step, so a resumed run continues the same curves. Must not know what the numbers mean.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from fullshard.contracts.sink import OpenSink, Sink
from fullshard.errors import SetupError
from fullshard.log.metrics import FILE, last_step, scalars


class WeightsAndBiases(Sink):
    """Curves on a Weights & Biases server."""

    project: str | None = None
    """The project that the run appears in; null: that of WANDB_PROJECT, or fullshard."""
    entity: str | None = None
    """The user or team; null: that of WANDB_ENTITY, or the one that is logged in."""
    tags: list[str] = []
    """Words to find the run by; empty: those of WANDB_TAGS."""
    mode: Literal["online", "offline", "disabled"] | None = None
    """offline keeps everything in the run folder; disabled does nothing; null: that of WANDB_MODE, or online."""
    run_name: str | None = None
    """The name shown for the run; null: that of WANDB_NAME, or the recipe's name."""

    @property
    def mode_in_force(self) -> str:
        disabled = os.environ.get("WANDB_DISABLED", "").lower() in ("true", "1", "yes")
        mode = "disabled" if disabled else os.environ.get("WANDB_MODE") or "online"
        return self.mode or {"dryrun": "offline", "run": "online"}.get(mode, mode)

    def packages(self) -> Mapping[str, str]:
        return {} if self.mode_in_force == "disabled" else {"wandb": "fullshard[wandb]"}

    def notes(self) -> list[str]:
        """The environment variables that the recipe overrides."""
        keys = {
            "mode": (self.mode, "WANDB_MODE"),
            "project": (self.project, "WANDB_PROJECT"),
            "entity": (self.entity, "WANDB_ENTITY"),
            "run_name": (self.run_name, "WANDB_NAME"),
            "tags": (",".join(self.tags) or None, "WANDB_TAGS"),
        }
        return [
            f"{key} = {value} overrides {variable}={os.environ[variable]}"
            for key, (value, variable) in keys.items()
            if value is not None and os.environ.get(variable, value) != value
        ]

    def open(self, folder: Path, *, name: str, recipe: dict[str, Any]) -> OpenSink:
        mode = self.mode_in_force
        if mode == "disabled":
            return _Disabled()
        import wandb

        home = folder / "wandb"
        home.mkdir(parents=True, exist_ok=True)
        project = self.project or os.environ.get("WANDB_PROJECT", "fullshard")
        resumed = last_step(folder / FILE) is not None
        try:
            with _cache_in(home / "cache"):
                # What is None here, wandb reads from its variables.
                run = wandb.init(
                    project=project,
                    entity=self.entity,
                    tags=self.tags or None,
                    name=self.run_name or _unless("WANDB_NAME", name),
                    mode=self.mode,
                    dir=_unless("WANDB_DIR", str(folder)),
                    config=recipe,
                    id=_unless("WANDB_RUN_ID", _run_id(home / "run-id", resumed=resumed)),
                    resume="allow" if mode == "online" and not os.environ.get("WANDB_RESUME") else None,
                    # It must not wrap stdout, which the progress bars use, nor wait for input.
                    settings=wandb.Settings(**_settings()),
                )
        except Exception as error:
            raise SetupError(
                f"log.sinks: wandb cannot start a run (project {project}, mode {mode}): {error} "
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


def _settings() -> dict[str, Any]:
    wanted = {"silent": True, "console": "off", "login_timeout": 30}
    return {name: value for name, value in wanted.items() if not os.environ.get(f"WANDB_{name.upper()}")}


def _unless(variable: str, value: str | None) -> str | None:
    return None if os.environ.get(variable) else value


def _run_id(path: Path, *, resumed: bool) -> str:
    if not (resumed and path.exists()):
        path.write_text(secrets.token_hex(4), encoding="utf-8")
    return path.read_text(encoding="utf-8")


@contextmanager
def _cache_in(folder: Path) -> Iterator[None]:
    """Keeps the wandb service's cache out of the user's home, unless the user has chosen a place."""
    chosen = "WANDB_CACHE_DIR" in os.environ
    os.environ.setdefault("WANDB_CACHE_DIR", str(folder.absolute()))
    try:
        yield
    finally:
        if not chosen:
            del os.environ["WANDB_CACHE_DIR"]


__all__ = ["WeightsAndBiases"]
