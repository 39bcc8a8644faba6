"""Factorized event tokens: separate tokens for each part of an event.

Keys are `<VK_0>` to `<VK_255>`, mouse flags three hexadecimal digits `<MB_0>` to `<MB_15>`, numbers a sign and decimal
digits `<0>` to `<9>`: dx = -64 is `<SIGN_MINUS><0><0><6><4>`. Time repeats every 10 s.
"""

from __future__ import annotations

from collections.abc import Sequence

from fullshard.families.vision.desktop.token_format import Reader, TokenFormat


class Factorized(TokenFormat):
    """Few tokens, each with one meaning."""

    time_bases = (10, 10, 10)
    move_bases = (2, 10, 10, 10)
    place_bases = (10, 10, 10, 10, 10)
    keys = tuple(f"<VK_{key}>" for key in range(256))
    flags = tuple(f"<MB_{value}>" for value in range(16))
    digits = tuple(f"<{digit}>" for digit in range(10))
    signs = ("<SIGN_PLUS>", "<SIGN_MINUS>")

    def _number(self, value: int, bases: Sequence[int]) -> list[str]:
        return [self.signs[value < 0], *self._digits(abs(value), bases)]

    def _read(self, tokens: Reader, bases: Sequence[int]) -> int:
        sign = 1 - 2 * tokens.one_of(self.signs)
        return sign * self._value(tokens, bases)
