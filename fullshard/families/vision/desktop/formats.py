"""The event formats, by the names that recipes use. Must not know how any of them encodes."""

from __future__ import annotations

from typing import Literal

from fullshard.families.vision.desktop.factorized import Factorized
from fullshard.families.vision.desktop.hierarchical import Hierarchical
from fullshard.families.vision.desktop.json_events import JsonEvents
from fullshard.families.vision.desktop.token_format import EventFormat

FormatName = Literal["factorized", "hierarchical", "json"]
FORMATS: dict[FormatName, EventFormat] = {
    "factorized": Factorized(),
    "hierarchical": Hierarchical(),
    "json": JsonEvents(),
}
