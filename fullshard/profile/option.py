"""`--profile [STEPS]` on the command line: an option whose value may be left out. Must not know what it does."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from typer.core import TyperCommand

from fullshard.profile.recorder import STEPS, VARIABLE

NAME = "--profile"


class WithProfile(TyperCommand):
    """A command with `--profile`, alone or followed by a number."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, with_steps(args))


def with_steps(words: Sequence[str]) -> list[str]:
    """The words with the number of steps written out where `--profile` stands alone."""
    after = [*words[1:], ""]
    return [
        f"{NAME}={STEPS}" if word == NAME and not after[index].isdigit() else word for index, word in enumerate(words)
    ]


@contextlib.contextmanager
def passed_on(steps: int | None) -> Iterator[None]:
    """Tells this process, and the ranks that it starts, how many steps to profile."""
    if steps is None:
        yield
        return
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(steps)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it announces itself on standard error
    try:
        yield
    finally:
        os.environ.pop(VARIABLE)
        os.environ |= {VARIABLE: before} if before is not None else {}
