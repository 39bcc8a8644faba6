"""Warnings and log records of other libraries: once each in log.txt; only errors are shown.

Libraries write to stderr with their own handlers, across a progress bar and on every rank. While a command runs
these are replaced, also those that a library adds when it is imported later. Warnings of the user's code are shown.
Must not import the libraries, and must not change their levels.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fullshard.log.console import Console

_add_handler = logging.Logger.addHandler
_NOT_THE_USERS = (Path(logging.__file__).parent.parent, Path(__file__).parent.parent)


class Libraries(logging.Handler):
    """Replaces the handlers that libraries have added."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._seen: set[str] = set()
        self._taken: list[tuple[logging.Logger, list[logging.Handler]]] = []

    def take(self) -> None:
        """Replaces every handler that writes to the screen; to be called again after more libraries are imported."""
        for logger in _loggers():
            if old := [h for h in logger.handlers if _to_screen(logger, h)]:
                place = logger.handlers.index(old[0])
                rest = [h for h in logger.handlers if h not in old and h is not self]
                logger.handlers[:] = [*rest[:place], self, *rest[place:]]
                self._taken.append((logger, old))
        _add_handler(logging.root, self)

    def give_back(self) -> None:
        """Puts everything back as it was found."""
        for logger, old in reversed(self._taken):
            place = logger.handlers.index(self) if self in logger.handlers else len(logger.handlers)
            logger.handlers[place:place] = old
        for logger in _loggers():
            logger.removeHandler(self)
        self._taken.clear()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
        except (TypeError, ValueError):
            # A library's broken format string must not stop a run.
            text = str(record.msg)
        origin = record.name.partition(".")[0]
        if record.levelno < logging.WARNING:
            self._console.debug(f"{record.name}: {text}")
        elif origin == "fullshard":
            self._console.warn(text)
        else:
            self.once(origin, text, shown=record.levelno >= logging.ERROR or _is_users(record.pathname))

    def once(self, origin: str, text: str, *, shown: bool) -> None:
        """Logs a text once, and prints it if `shown`."""
        if text not in self._seen:
            self._seen.add(text)
            self._console.library(origin, text, shown=shown)


@contextmanager
def route(console: Console) -> Iterator[Libraries]:
    """While it is open, warnings and log records go through the console; afterwards everything is as before."""
    libraries = Libraries(console)
    show = warnings.showwarning

    def showwarning(message: Warning | str, category: type[Warning], filename: str, *_: Any, **__: Any) -> None:
        libraries.once(_package(filename), f"{category.__name__}: {message}", shown=_is_users(filename))

    def add_handler(self: logging.Logger, hdlr: logging.Handler) -> None:
        _add_handler(self, hdlr)
        libraries.take()

    warnings.showwarning = showwarning
    logging.Logger.addHandler = add_handler  # type: ignore[method-assign]
    libraries.take()
    try:
        yield libraries
    finally:
        warnings.showwarning = show
        logging.Logger.addHandler = _add_handler  # type: ignore[method-assign]
        libraries.give_back()


def _loggers() -> list[logging.Logger]:
    known = [item for item in logging.root.manager.loggerDict.values() if isinstance(item, logging.Logger)]
    return [logging.root, *known]


def _to_screen(logger: logging.Logger, handler: logging.Handler) -> bool:
    if logger.name.partition(".")[0] == "torch" and "TORCH_LOGS" in os.environ:
        return False  # the user asked for it
    if not isinstance(handler, logging.StreamHandler):
        return False
    # By name too: a handler made while stderr was redirected holds another object for the same screen.
    stream = handler.stream
    return stream in (sys.stdout, sys.stderr) or getattr(stream, "name", None) in ("<stdout>", "<stderr>")


def _is_users(filename: str) -> bool:
    """Whether code is the user's: neither installed, nor Python's, nor fullshard's."""
    path = Path(filename).absolute()
    if not path.is_file() or {"site-packages", "dist-packages"} & set(path.parts):
        return False
    return not any(path.is_relative_to(folder) for folder in _NOT_THE_USERS)


def _package(filename: str) -> str:
    parts = Path(filename).parts
    for marker in ("site-packages", "dist-packages"):
        if marker in parts[:-1]:
            return Path(parts[parts.index(marker) + 1]).stem
    return Path(filename).stem


def write_nccl_log(folder: Path, rank: int, environ: MutableMapping[str, str] = os.environ, *, trace: bool) -> None:
    """NCCL writes what it does to a file per rank in the run folder; its own variables win. Called before ranks
    connect."""
    with suppress(OSError):  # the check before training says that the folder cannot be written
        folder.mkdir(parents=True, exist_ok=True)
    environ.setdefault("NCCL_DEBUG", "TRACE" if trace else "INFO")
    environ.setdefault("NCCL_DEBUG_FILE", str(folder.absolute() / f"nccl-rank-{rank}-%h-%p.txt"))
