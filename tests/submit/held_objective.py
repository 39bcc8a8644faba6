"""An objective that holds a run in the middle of a step, so that a test can tell a cluster something, or that ends it.
A sink holds node 0 when the others are done."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from fullshard.contracts.objective import Terms
from fullshard.contracts.sink import OpenSink, Sink
from fullshard.errors import DataError, NumericalError
from fullshard.families.language.objectives.causal_lm import CausalLM


class Held(CausalLM):
    """The usual loss. After the steps of `hold`, rank 0 writes FOLDER/held-STEP and waits for FOLDER/go-STEP."""

    folder_of_test: str
    run: str
    hold: tuple[int, ...] = ()
    fail: int | None = None
    """The exit code to end with after step 1."""
    fail_on: int | None = None
    """The rank that ends with it; all of them."""

    def loss(self, model: Any, batch: Any, aux: Any) -> Terms:
        step = self._step()
        folder = Path(self.folder_of_test)
        rank = os.environ.get("RANK", "0")
        if step >= 1 and self.fail and self.fail_on in (None, int(rank)):
            raise NumericalError("stopped on purpose.") if self.fail == 3 else DataError("a mistake on purpose.")
        if step in self.hold and rank == "0":
            (folder / f"held-{step}").touch()
            while not (folder / f"go-{step}").exists():
                time.sleep(0.05)
        return super().loss(model, batch, aux)

    def _step(self) -> int:
        """The steps that are logged; every step is."""
        metrics = Path(self.run) / "metrics.jsonl"
        records = map(json.loads, metrics.read_text().splitlines()) if metrics.exists() else ()
        return max((record["step"] for record in records if record["kind"] == "train"), default=0)


class Late(Sink):
    """Nothing is written here. At its end rank 0 writes FOLDER/late and waits for FOLDER/go, as in a slow save."""

    folder_of_test: str

    def open(self, folder: Path, *, name: str, recipe: dict[str, Any]) -> OpenSink:
        return OpenLate(Path(self.folder_of_test))


class OpenLate(OpenSink):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, record: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        (self.folder / "late").touch()
        while not (self.folder / "go").exists():
            time.sleep(0.05)
