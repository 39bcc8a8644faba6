"""Which cases of a large matrix `make test` runs; `make test-slow` runs the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(number: int, cases: Iterable[Any]) -> list[Any]:
    """The cases for `parametrize`: the first and every `number`th after it are quick, the rest are marked slow."""
    found = []
    for index, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        found.append(pytest.param(*values, marks=() if index % number == 0 else pytest.mark.slow))
    return found


def only_first(cases: Iterable[Any]) -> list[Any]:
    """The first case is quick, the rest are marked slow."""
    every = list(cases)
    return one_in(max(1, len(every)), every)
