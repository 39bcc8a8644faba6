"""Groups rows into episodes: the rows of one recording, in chronological order.

Must not know tokens or windows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from fullshard.config.problems import found
from fullshard.contracts.data import Record, Records
from fullshard.data.records import combine
from fullshard.errors import DataError
from fullshard.families.vision.desktop.events import Event, Info, Screen
from fullshard.families.vision.desktop.rows import events_of, form_of, whole
from fullshard.families.vision.desktop.screens import located
from fullshard.formatting.plural import counted


@dataclass(frozen=True)
class Episode:
    """One recording."""

    path: str
    events: list[Event]


class Episodes:
    """An open source of whole episodes: `episode_path`, its `rows`, and their `places` for errors.

    The rows of an episode must be next to each other, so that no episode is cut in two by mistake. Rows that hold
    finished windows may be in any order."""

    def __init__(self, rows: Records) -> None:
        self._rows = rows
        self.notes = [*getattr(rows, "notes", [])]
        self._found: dict[str, list[int]] = {}
        finished, last = len(rows) > 0 and form_of(rows[0]) == "tokenised", None
        for index in range(len(rows)):
            path = rows[index].get("episode_path")
            if not isinstance(path, str) or not path:
                raise DataError(
                    f"{rows.where(index)}: 'episode_path' must be the name of the recording, found {found(path)}. Give "
                    "it a name."
                )
            if path in self._found and path != last and not finished:
                raise DataError(
                    f"{rows.where(index)}: 'episode_path' = {found(path)} is here again, after rows of another "
                    f"episode; its first row is {rows.where(self._found[path][0])}. Sort the rows by episode_path and "
                    "timestamp_ns."
                )
            self._found.setdefault(path, []).append(index)
            last = path
        self._paths = list(self._found)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> Record:
        path = self._paths[index]
        return {
            "episode_path": path,
            "rows": [self._rows[row] for row in self._found[path]],
            "places": [self._rows.where(row) for row in self._found[path]],
        }

    def where(self, index: int) -> str:
        rows = self._found[self._paths[index]]
        return f"{self._rows.where(rows[0])} ({counted(len(rows), 'row')} of one episode)"

    def fingerprint(self) -> str:
        return combine("episodes", self._rows.fingerprint())


def read_episode(record: Record, *, image_root: Path | None = None) -> Episode:
    """The events of a record of `Episodes`; the paths of its screens start at `image_root`."""
    path = str(record["episode_path"])
    events, last = list[Event](), dict[str, int]()
    for row, where in zip(record["rows"], record["places"], strict=True):
        try:
            made = events_of(row)
            if "bin_idx" in row:
                _in_order("bin_idx", whole(row, "bin_idx"), last, path, least_step=1)
            for event in made:
                _in_order("timestamp_ns", event.timestamp_ns, last, path)
                events.append(_located(event, path, image_root))
        except DataError as error:
            raise type(error)(f"{Path(where).name}: {error}") from error  # the episode is named with its folder
    if all(isinstance(event, Info) for event in events):
        what = f"{counted(len(events), 'message')} about windows and state" if events else "no event"
        raise DataError(
            f"the episode {path!r} is empty: it has {what}, but no screen, keyboard or mouse event. Remove it, or "
            "record it again."
        )
    return Episode(path, events)


def _located(event: Event, path: str, root: Path | None) -> Event:
    if not isinstance(event, Screen) or event.image is None:
        return event
    return replace(event, image=located(event.image, root=root, episode_path=path))


def _in_order(key: str, value: int, last: dict[str, int], path: str, *, least_step: int = 0) -> None:
    before = last.setdefault(key, value - least_step)
    if value < before + least_step:
        raise DataError(
            f"{key!r} = {value} comes after {before} in the episode {path!r}, but the rows of an episode must be in "
            "chronological order. Sort the rows by episode_path and timestamp_ns."
        )
    last[key] = value
