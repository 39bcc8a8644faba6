"""Hierarchical event tokens: one set of number tokens, `<0>` to `<255>`, for keys, flags, time and movement.

A signed number has a first digit of 0 or 1 and is counted modulo twice its range, as in two's complement: dx = -3 is
`<1><19><9><7>`. The digits of a pair alternate: dx, dy, dx, dy. Time repeats every 16 s.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from fullshard.families.vision.desktop.token_format import Reader, TokenFormat


class Hierarchical(TokenFormat):
    """The smallest vocabulary; what a number means depends on its place."""

    time_bases = (16, 10, 10)
    move_bases = (20, 10, 10)
    place_bases = (100, 100, 10)
    digits = keys = tuple(f"<{number}>" for number in range(256))
    flags = digits[:16]

    def _number(self, value: int, bases: Sequence[int]) -> list[str]:
        return self._digits(value % (2 * prod(bases)), (2, *bases))

    def _read(self, tokens: Reader, bases: Sequence[int]) -> int:
        return self._signed(self._value(tokens, (2, *bases)), bases)

    def _pair(self, first: int, second: int, bases: Sequence[int]) -> list[str]:
        both = zip(self._number(first, bases), self._number(second, bases), strict=True)
        return [digit for pair in both for digit in pair]

    def _read_pair(self, tokens: Reader, bases: Sequence[int]) -> tuple[int, int]:
        values = [0, 0]
        for base in (2, *bases):
            values = [value * base + tokens.one_of(self.digits[:base]) for value in values]
        return self._signed(values[0], bases), self._signed(values[1], bases)

    def _signed(self, value: int, bases: Sequence[int]) -> int:
        return value - 2 * prod(bases) if value >= prod(bases) else value
