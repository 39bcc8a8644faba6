"""All sinks of a run behind one `write`: one that cannot open stops the run, one that fails later is dropped.

Rank 0 only. Must not know any concrete sink, and must not call collectives.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fullshard.contracts.sink import OpenSink, Sink
from fullshard.errors import FullshardError, SetupError, one_line


class Sinks:
    """The open sinks. Open them after metrics.jsonl is truncated to the step that the run resumes from."""

    def __init__(
        self, sinks: Sequence[Sink], folder: Path, *, name: str, recipe: dict[str, Any], warn: Callable[[str], None]
    ) -> None:
        self._warn = warn
        self._open: list[tuple[str, OpenSink]] = []
        for index, sink in enumerate(sinks):
            where = f"log.sinks[{index}] ({sink.kind()})"
            for note in sink.notes():
                warn(f"{where}: {note}.")
            try:
                self._open.append((where, sink.open(folder, name=name, recipe=recipe)))
            except Exception as error:
                self.close()
                raise _cannot_open(sink, where, error) from error

    def write(self, record: dict[str, Any]) -> None:
        """Hands one record to every sink that still works."""
        for where, sink in list(self._open):
            try:
                sink.write(record)
            except Exception as error:
                self._open.remove((where, sink))
                self._warn(
                    f"{where} failed at step {record.get('step')} and is dropped: {one_line(error)}. "
                    "The run continues; metrics.jsonl has every number."
                )
                self._close(where, sink, quietly=True)

    def close(self) -> None:
        """Closes every sink; one that fails is named in a warning."""
        while self._open:
            self._close(*self._open.pop())

    def _close(self, where: str, sink: OpenSink, *, quietly: bool = False) -> None:
        try:
            sink.close()
        except Exception as error:
            if not quietly:
                self._warn(f"{where} could not be closed: {one_line(error)}. Its last numbers may be missing.")


def _cannot_open(sink: Sink, where: str, error: Exception) -> FullshardError:
    if isinstance(error, FullshardError):
        return error
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        install = shlex.quote(sink.packages().get(package, package))
        return SetupError(
            f"{where} needs the package {error.name}, which is not installed. Install it with: pip install {install}"
        )
    return SetupError(f"{where} cannot be opened: {one_line(error)}. Fix it, or remove it from log.sinks.")
