"""How the ranks of one node ended: which one was the first, what it said, and the exit code that follows.

Must not know recipes, nor how ranks are started.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fullshard.errors import EXIT_NUMERICAL, EXIT_PREEMPTED, EXIT_USER
from fullshard.explain import ended
from fullshard.explain.crash import closing, culprit, is_victim
from fullshard.explain.error_file import LastWords
from fullshard.explain.match import explain
from fullshard.explain.render import answer
from fullshard.faults.words import HANG, waited_for_in

TRACEBACK = "Traceback (most recent call last)"


@dataclass(frozen=True)
class Failure:
    """A rank that failed, as its launcher saw it."""

    code: int
    """Its exit code; negative: the signal that ended it."""
    process: int
    time: float
    words: LastWords = LastWords()


class End:
    """How a run ended in which ranks failed: which rank was the first, what it said, and the run's exit code."""

    def __init__(self, failures: Mapping[int, Failure]) -> None:
        """`failures` by rank, in the order in which the launcher saw them."""
        self._failures = failures
        self._said = {rank: failure.words for rank, failure in failures.items()}
        self._victims = {rank for rank, words in self._said.items() if is_victim(words.text)}
        self.rank = self._first()
        self._code = failures[self.rank].code
        self._has_meaning = self._code in (EXIT_PREEMPTED, EXIT_USER, EXIT_NUMERICAL)

    @property
    def exit_code(self) -> int:
        """The exit code of the run: the first rank's, if it has a meaning."""
        return self._code if self._has_meaning else 1

    @property
    def cause(self) -> int:
        """The rank to blame. One that was killed leaves no message, and is the cause."""
        if self._code < 0 or self._has_meaning:
            return self.rank
        if self._hang and (waited_for := waited_for_in(self._hang)) in self._failures:
            return waited_for
        return culprit(self._said, otherwise=self.rank)

    @property
    def _hang(self) -> str | None:
        """The words about a hang, if there was one."""
        return next((said.message for said in self._said.values() if said.message.startswith(HANG)), None)

    @property
    def only_victims(self) -> bool:
        """Whether the ranks of this node only lost others."""
        return self.cause in self._victims

    def why(self, out_of_memory: str | None = None) -> str:
        """What happened to the cause, in a few words, to follow "rank 1 "."""
        failure, words = self._failures[self.cause], self._said[self.cause]
        if self._hang and waited_for_in(self._hang) == self.cause:
            return f"kept the others waiting ({self._hang.splitlines()[0].partition(': ')[2].rstrip('.')})"
        if failure.code < 0 or self.only_victims:
            killed = f" ({out_of_memory})" if out_of_memory and failure.code == -signal.SIGKILL else ""
            return ended.how(failure.code, victim=self.only_victims).partition(":")[0] + killed
        said = words.message.strip().splitlines()
        return f"ended with exit code {failure.code}" + (f" ({said[0].rstrip('.')})" if said else "")

    def follows(self, number: int, *, at_once: bool) -> bool:
        """Whether the signal that the launcher passed on ended the ranks, before they could react."""
        ended_by_it = at_once or self.rank in self._victims or -self._code in (number, signal.SIGTERM)
        return ended_by_it and not self._has_meaning

    def report(self, *, killed: str) -> Iterator[str]:
        """The launcher's last lines, unless the rank printed them itself. `killed` is the reason, if it was SIGKILL."""
        message = self._said[self.rank].message
        if self._hang:
            yield self._hang
        elif self._code == EXIT_PREEMPTED:
            if message:
                yield message
        elif self._has_meaning:
            if self.rank != 0 and message and message != self._said.get(0, LastWords()).message:
                yield f"Error: rank {self.rank}: {message}"
        else:
            rank = self.cause
            failure, traced = self._failures[rank], TRACEBACK in self._said[rank].text
            how = ended.how(failure.code, traced=traced, victim=rank in self._victims, killed=killed)
            line = f"Rank {rank} (process {failure.process}) {how}."
            yield f"{line} The other ranks were stopped." if len(self._failures) > 1 else line
            if explanation := explained(self._said, rank=rank, line=line):
                yield explanation

    def _first(self) -> int:
        """The rank that failed first.

        The launcher looks ten times a second, so a rank that lost a peer may be seen before that peer. Among those that
        ended within two seconds, a rank that was killed, or that said why it stopped, goes first, and the victims
        last. The launcher ended the later ones."""
        start = min(failure.time for failure in self._failures.values())

        def order(rank: int) -> int:
            code = self._failures[rank].code
            if code < 0 and code != -signal.SIGTERM:
                return 0
            if code in (EXIT_USER, EXIT_NUMERICAL):
                return 1
            return 3 if rank in self._victims else 2

        near = [rank for rank, failure in self._failures.items() if failure.time <= start + 2]
        return min(near, key=order)  # of equals the one seen first


def explained(said: Mapping[int, LastWords], *, rank: int, line: str) -> str:
    """The launcher's last lines: the explanation of `rank`'s end, and the crash folder. `line` is what the launcher
    knows; it goes into the crash folder for a rank that could write nothing, such as one that was killed."""
    crash = next((words.folder for words in said.values() if words.folder), None)
    words = said.get(rank, LastWords())
    if crash is not None and not words.text:
        with contextlib.suppress(OSError), (crash / f"rank-{rank}.txt").open("x", encoding="utf-8") as file:
            file.write(line + "\n")
    if words.text and (TRACEBACK in words.text or explain(words.text)):
        return closing(explain(words.text), crash)
    # No rank survived to write one, or its message says all.
    place = f"\nCrash folder: {crash}" if crash else ""
    matches = explain(line)
    return f"\n{answer(matches)}{place and chr(10)}{place}" if matches else place
