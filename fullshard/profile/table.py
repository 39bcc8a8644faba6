"""A profile as text and as JSON, per step. Must not know traces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fullshard.formatting import readable
from fullshard.profile.kinds import KINDS
from fullshard.profile.trace import PHASES, Profile

_NAME_WIDTH = 60


def as_json(profile: Profile, *, rank: int, first_step: int) -> dict[str, Any]:
    """Seconds of one step, on average; shares are of the wall time."""
    each = {name: seconds / max(profile.steps, 1) for name, seconds in _all(profile).items()}
    found: dict[str, Any] = {
        "steps": profile.steps,
        "first_step": first_step,
        "rank": rank,
        "device": "GPU" if profile.gpu else "CPU",
        "seconds_per_step": round(each["wall"], 6),
        "phases": {name: round(each[f"phase {name}"], 6) for name in PHASES},
        "kinds": {name: round(each[f"kind {name}"], 6) for name in KINDS},
        "most": [
            {"name": name, "kind": kind, "calls": calls, "seconds": round(seconds / max(profile.steps, 1), 6)}
            for name, kind, calls, seconds in profile.most
        ],
    }
    if profile.gpu:
        found["device_phases"] = {name: round(each[f"device {name}"], 6) for name in PHASES}
        found["communication_alone"] = round(each["exposed"], 6)
    return found


def _all(profile: Profile) -> dict[str, float]:
    return {
        "wall": profile.seconds,
        "exposed": profile.exposed,
        **{f"phase {name}": profile.phases.get(name, 0.0) for name in PHASES},
        **{f"kind {name}": profile.kinds.get(name, 0.0) for name in KINDS},
        **{f"device {name}": profile.device.get(name, 0.0) for name in PHASES},
    }


def as_text(found: dict[str, Any]) -> str:
    """The tables of `as_json` for people, in milliseconds."""
    wall = found["seconds_per_step"]
    last = found["first_step"] + found["steps"] - 1
    title = f"Profile of steps {found['first_step']:,} to {last:,} on rank {found['rank']}: {_ms(wall)} ms a step"
    gpu = found["device"] == "GPU"
    phases = [
        [name, _ms(seconds), _share(seconds, wall), *([_ms(found["device_phases"][name])] if gpu else [])]
        for name, seconds in found["phases"].items()
    ]
    rest = max(wall - sum(found["phases"].values()), 0.0)
    phases.append(["between phases", _ms(rest), _share(rest, wall), *([""] if gpu else [])])
    kinds = [[name, _ms(seconds), _share(seconds, wall)] for name, seconds in found["kinds"].items()]
    note = "idle: the GPU has no work" if gpu else "idle: no operator runs, only Python, or the rank waits"
    if gpu:
        note += f"; communication while nothing else runs: {_ms(found['communication_alone'])} ms"
    most = [
        [_short(row["name"]), row["kind"], f"{row['calls'] / max(found['steps'], 1):g}", _ms(row["seconds"])]
        for row in found["most"]
    ]
    head = ["phase", "host ms", "share", *(["GPU ms"] if gpu else [])]
    work = "kernel" if gpu else "operator"
    return "\n".join(
        [
            title,
            *("", *_aligned([head, *phases], left=1)),
            *("", *_aligned([["kind of work", "ms", "share"], *kinds], left=1), note),
            *("", *_aligned([[f"most expensive {work}s", "kind", "calls", "ms"], *most], left=2)),
        ]
    )


def _aligned(rows: Sequence[Sequence[str]], *, left: int) -> Iterable[str]:
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    for row in rows:
        cells = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        yield f"  {'  '.join(cells)}".rstrip()


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.2f}"


def _share(seconds: float, wall: float) -> str:
    return f"{seconds / wall:.1%}" if wall > 0 else "-"


def _short(name: str) -> str:
    plain = " ".join(readable.plain(name).split())
    return plain if len(plain) <= _NAME_WIDTH else f"{plain[: _NAME_WIDTH - 3]}..."
