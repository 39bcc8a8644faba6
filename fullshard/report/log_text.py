"""What log.txt says: the header of the last start, proofs, warnings and times.

The console writes it (fullshard/log/console.py). Must not know what any line means beyond that.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cached_property

_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) rank (\d+) ? ?(.*)")
_ROW, _MORE = re.compile(r"  (\S.*?)\s{2,}(\S.*)"), re.compile(r"\s{6,}(\S.*)")
_WARNING, _HEADER, _PROVEN = "warning: ", "fullshard: ", "First update proven: "


class LogText:
    """The text of log.txt, in parts."""

    def __init__(self, text: str) -> None:
        found = [match.groups() for line in text.split("\n") if (match := _LINE.fullmatch(line))]
        self.lines = [(time, int(rank), words) for time, rank, words in found]

    @property
    def began(self) -> str | None:
        return self.lines[0][0] if self.lines else None

    @property
    def ended(self) -> str | None:
        return self.lines[-1][0] if self.lines else None

    @property
    def main(self) -> list[str]:
        """What rank 0 said."""
        return [words for _, rank, words in self.lines if rank == 0]

    @cached_property
    def header(self) -> list[tuple[str, str]]:
        """The rows of the last header."""
        said, rows = self.main, list[tuple[str, str]]()
        begin = max((i for i, words in enumerate(said) if words.startswith(_HEADER)), default=len(said))
        for words in said[begin + 1 :]:
            if row := _ROW.fullmatch(words):
                rows.append((row[1], row[2]))
            elif rows and (more := _MORE.fullmatch(words)):
                rows[-1] = rows[-1][0], f"{rows[-1][1]} {more[1]}"
            else:
                break
        return rows

    def said(self, key: str) -> str | None:
        """One row of the header."""
        return next((value for name, value in self.header if name == key), None)

    @property
    def proofs(self) -> list[str]:
        """What the run has proven before step 1 and at its first update."""
        first = [words.removeprefix(_PROVEN) for words in self.main if words.startswith(_PROVEN)]
        return [*(value for key, value in self.header if key == "proven"), *dict.fromkeys(first)]

    @property
    def warnings(self) -> list[tuple[str, int]]:
        """Each warning once, with how many times it was given, counted over ranks."""
        given = [words.removeprefix(_WARNING) for _, _, words in self.lines if words.startswith(_WARNING)]
        return list(Counter([*(value for key, value in self.header if key == "warning"), *given]).items())

    @property
    def total_steps(self) -> int | None:
        """How many steps the run is to have, by its header: `723 = 3 epochs x 241 per epoch`."""
        number = re.match(r"([\d,]+)\b", self.said("steps") or "")
        return int(number[1].replace(",", "")) if number and number[1].strip(",") else None
