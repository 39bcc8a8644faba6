"""Which hits of a query become its negatives, and why the others do not.

A query's own documents (its positives, and a document equal to the query) are not hits and have no rank.
Must not know models, files or where scores come from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from fullshard.formatting.plural import counted

Hit = tuple[int, float]
"""A document of the corpus by its number, and its score."""


@dataclass(frozen=True)
class Rules:
    """What a hit must be to become a negative. Ranks are counted from 1, both ends included."""

    number: int
    first: int
    last: int
    margin: float | None = None
    max_score: float | None = None
    min_score: float | None = None

    def refusal(self, score: float, positive: float) -> str | None:
        """The option that excludes a hit with this score; `positive` is the score of the positive."""
        if self.margin is not None and score > positive - self.margin:
            return "--margin"
        if self.max_score is not None and score > self.max_score:
            return "--max-score"
        if self.min_score is not None and score < self.min_score:
            return "--min-score"
        return None


@dataclass
class Tally:
    """What was found over all pairs."""

    mined: Counter[int] = field(default_factory=Counter)
    """Number of negatives -> number of pairs that got that many."""
    refused: Counter[str] = field(default_factory=Counter)
    """Why hits in the window of a pair with too few negatives were excluded."""
    at_end: int = 0
    """Pairs with too few negatives because the corpus ended inside their window."""
    positive_sum: float = 0.0
    negative_sum: float = 0.0

    @property
    def num_pairs(self) -> int:
        return self.mined.total()

    @property
    def num_negatives(self) -> int:
        return sum(number * pairs for number, pairs in self.mined.items())

    def why(self) -> str:
        """Why some pairs got fewer negatives than requested."""
        said = [
            f"{counted(number, 'hit')} in their windows {'was' if number == 1 else 'were'} excluded by {option}"
            for option, number in sorted(self.refused.items())
        ]
        if self.at_end:
            said.append(f"the corpus ended inside the window of {counted(self.at_end, 'pair')}")
        return "; ".join(said)


def window(hits: Sequence[Hit], own: Collection[int], rules: Rules) -> list[Hit]:
    """The hits between the two ranks, best first; equal scores are in the order of the corpus."""
    ranked = sorted((hit for hit in hits if hit[0] not in own), key=lambda hit: (-hit[1], hit[0]))
    return ranked[rules.first - 1 : rules.last]


def choose(found: Sequence[Hit], kept: Collection[int], positive: float, rules: Rules, tally: Tally) -> list[int]:
    """The documents that become negatives of one pair, the hardest of its window; `kept` are negatives already."""
    chosen: list[Hit] = []
    refused: Counter[str] = Counter()
    for document, score in found:
        reason = rules.refusal(score, positive) or ("being a negative already" if document in kept else None)
        if reason is None:
            chosen.append((document, score))
            if len(chosen) == rules.number:
                break
        else:
            refused[reason] += 1
    tally.mined[len(chosen)] += 1
    tally.positive_sum += positive
    tally.negative_sum += sum(score for _, score in chosen)
    if len(chosen) < rules.number:
        tally.refused += refused
        tally.at_end += len(found) < rules.last - rules.first + 1
    return [document for document, _ in chosen]
