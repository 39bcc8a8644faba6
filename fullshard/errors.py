"""The exception tree. A user's mistake is a FullshardError and prints without a traceback; anything else is a bug.

    FullshardError            exit code 2
    ├── RecipeError           a key, a value, or two keys that contradict each other
    ├── DataError             a file, a line, a record
    ├── SetupError            ranks, devices, addresses, packages
    │   └── AbsentError       exit code 1: nodes or ranks that did not come; trying again may help
    ├── CheckpointError       a folder that cannot be saved to, read or resumed from
    └── NumericalError        exit code 3: a guard stopped the run

Every message has three parts, in this order: where, what was found against what is allowed, what to do.
Must not know anything else of the package.
"""

from __future__ import annotations

EXIT_DONE = 0
EXIT_USER = 2
EXIT_NUMERICAL = 3
EXIT_PREEMPTED = 75


class FullshardError(Exception):
    """A mistake the user can fix; `str(error)` is the whole message."""

    exit_code = EXIT_USER


class RecipeError(FullshardError):
    """A recipe key, its value, or a contradiction between keys."""


class DataError(FullshardError):
    """A file, line or record that cannot be used."""


class SetupError(FullshardError):
    """Ranks, devices, addresses or packages that do not fit the run."""


class AbsentError(SetupError):
    """Nodes or ranks that did not come in time: nobody's mistake, so an engine may try again."""

    exit_code = 1


class CheckpointError(FullshardError):
    """A checkpoint that cannot be written, read or resumed from."""


class NumericalError(FullshardError):
    """A numerical guard stopped the run."""

    exit_code = EXIT_NUMERICAL


def missing_package(package: str, *, extra: str, needed_by: str) -> SetupError:
    """The error for an optional package that is not installed, with the line that installs it."""
    return SetupError(
        f"{needed_by} needs the package {package}, which is not installed. "
        f"Install it with: pip install 'fullshard[{extra}]'"
    )


def first_line(error: BaseException) -> str:
    """The first line of an error's text without its full stop; its class if it has no text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def one_line(error: BaseException) -> str:
    """The same with the class in front, unless the text is ours, the system's or missing."""
    is_clear = isinstance(error, FullshardError) or (isinstance(error, OSError) and error.errno) or not str(error)
    return first_line(error) if is_clear else f"{type(error).__name__}: {first_line(error)}"
