"""The known errors: one YAML file each in `entries/`.

A new error is a new file there; nothing else lists them. Must not know how a text is searched or shown, nor import
torch.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator

FOLDER = Path(__file__).parent / "entries"

Role = Literal["cause", "general", "consequence", "remark"]
Group = Literal["memory", "precision", "sharding", "ranks", "model", "data", "machine"]


class KnownError(BaseModel):
    """One known error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str
    """The name of its file."""
    title: str
    """What happened, in one line."""
    group: Group
    """Where it belongs on the page of all entries."""
    role: Role = "cause"
    """cause: what went wrong; general: the same in broad terms, where a specific entry says more; consequence:
    something else failed first; remark: it does not stop the run."""
    patterns: tuple[str, ...] = Field(min_length=1)
    """Regular expressions; one match is enough. Any run of white space in the text counts as one space."""
    cause: str
    """Why it happens."""
    remedy: tuple[str, ...] = Field(min_length=1)
    """What to do, the best first."""
    not_a_cure: tuple[str, ...] = ()
    """Common advice that is wrong."""
    keys: tuple[str, ...] = ()
    """The recipe keys that matter."""

    @field_validator("patterns")
    @classmethod
    def _compile(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
        return patterns


@functools.cache
def entries() -> tuple[KnownError, ...]:
    """Every known error, by name."""
    return tuple(
        KnownError.model_validate({"name": path.stem, **yaml.safe_load(path.read_text(encoding="utf-8"))})
        for path in sorted(FOLDER.glob("*.yaml"))
    )
