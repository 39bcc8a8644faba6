"""Python's language reference: English prose that comes with every CPython.

Must not know tokens or ranks.
"""

from __future__ import annotations

from fullshard.contracts.data import Records, Source
from fullshard.data.records import Listed, combine


class PythonReference(Source):
    """One record for each topic of `pydoc_data.topics`, by name."""

    def open(self) -> Records:
        from pydoc_data.topics import topics

        names = sorted(topics)
        return Listed(
            [{"text": topics[name], "topic": name} for name in names],
            where=lambda index: f"pydoc_data.topics[{names[index]!r}]",
            fingerprint=lambda: combine("python_reference", *(f"{name}\n{topics[name]}" for name in names)),
        )


__all__ = ["PythonReference"]
