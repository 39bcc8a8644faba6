"""The page: one HTML file with its style, script, data and pictures inside. It loads nothing from anywhere.

A template with automatic escaping makes the markup, the data of the curves are JSON without any `<`, and a policy in
the head lets the browser run nothing but the two scripts written here. Must not read run folders itself.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from datetime import datetime
from importlib import metadata, resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from fullshard.formatting import readable
from fullshard.formatting.plural import counted
from fullshard.formatting.yaml_text import render as as_yaml
from fullshard.report import settings, tables
from fullshard.report.charts import charts
from fullshard.report.curves import DIGITS, curves
from fullshard.report.folders import Run
from fullshard.report.samples import Room, samples
from fullshard.report.verdict import command_of, judge

POINTS, FEWEST = 800, 120
"""The most points of a curve of a single run, and of each of very many."""
UPLOT = "uPlot-1.6.32"
_MARKED = ("restart", "rollback", "skipped", "straggler", "out_of_memory")
_PROFILE = 100_000


def page(runs: Sequence[Run], *, verify: bool = False, live: str = "") -> str:
    """The page about these runs. `verify` reads checksums of checkpoints.

    `live`, the server's state from before, makes a page that follows the server.
    """
    room = Room()
    shown = [_run(run, room, verify=verify) for run in runs]
    most = max(POINTS // max(len(runs) - 1, 1), FEWEST)
    drawn = [curves(run, most=most) | {"marks": _marks(run)} for run in runs]
    pictures = charts(name for each in drawn for name in each["series"])
    style = _asset(f"{UPLOT}.min.css") + _asset("page.css")
    scripts = [_asset(f"{UPLOT}.min.js"), _asset("page.js")]
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "brief": _brief,
        "counted": counted,
        "ticks": _ticks,
        "options": _options,
        "breakable": _breakable,
    }
    return environment.from_string(_asset("page.html")).render(
        runs=shown,
        charts=pictures,
        differences=settings.between(runs) if len(runs) > 1 else [],
        marked=any(each["marks"] for each in drawn),
        downsampled=[each for each in drawn if each["train"]["per_point"] > 1 or each["validation"]["per_point"] > 1],
        digits=DIGITS,
        title=" · ".join(run.label for run in runs[:3]) + (" · …" if len(runs) > 3 else ""),
        made=datetime.now().strftime("%Y-%m-%d %H:%M"),
        version=metadata.version("fullshard"),
        live=live,
        policy=_policy(style, scripts, live=bool(live)),
        style=Markup(style),
        scripts=[Markup(script) for script in scripts],
        data=Markup(as_json({"runs": drawn, "charts": pictures})),
    )


def _run(run: Run, room: Room, *, verify: bool) -> dict[str, Any]:
    """All that the template says about one run."""
    events, units = tables.event_rows(run), tables.unit_rows(run)
    return {
        "label": run.label,
        "verdict": judge(run),
        "tiles": list(tables.tiles(run)),
        "warnings": run.log.warnings,
        "header": [row for row in run.log.header if row[0] not in ("proven", "warning")],
        "command": command_of(run),
        "overridden": [str(line) for line in run.facts.get("overridden") or []],
        "settings": settings.from_defaults(run.recipe),
        "recipe": as_yaml(run.recipe) if run.recipe else "",
        "phases": tables.phase_rows(run),
        "units": units[: tables.UNITS],
        "more_units": len(units) - tables.UNITS,
        "proofs": run.log.proofs,
        "events": events[-tables.EVENTS :],
        "more_events": len(events) - tables.EVENTS,
        "samples": samples(run, room),
        "checkpoints": tables.checkpoint_rows(run, verify=verify),
        "verified": verify,
        "environment": tables.environment_rows(run),
        "profile": _profile(run),
    }


def _marks(run: Run) -> list[dict[str, Any]]:
    """Steps at which something happened that a curve may show."""
    found = [event for event in run.of_kind("event") if event.get("event") in _MARKED]
    return [{"step": event["step"], "what": str(event["event"])} for event in found[-100:]]


def _profile(run: Run) -> str:
    """The table of `fullshard train --profile`, if the run has one."""
    path = run.folder / "profile" / "table.txt"
    return readable.plain(path.read_text(encoding="utf-8", errors="replace")[:_PROFILE]) if path.is_file() else ""


def as_json(value: Any) -> str:
    """JSON that cannot end a script element, nor begin one."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _policy(style: str, scripts: Sequence[str], *, live: bool) -> str:
    """What the browser may do: show what is in the page, run these scripts, and nothing else."""
    allowed = {
        "default-src": "'none'",
        "script-src": " ".join(map(_hash, scripts)),
        "style-src": _hash(style),
        "img-src": "data:",
        "media-src": "data:",
        "connect-src": "'self'" if live else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{key} {value}" for key, value in allowed.items())


def _brief(value: float) -> str:
    """Three digits."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _ticks(text: str) -> Markup:
    """A text in which backticks surround code."""
    parts = [escape(part) for part in text.split("`")]
    return Markup("").join(Markup("<code>{}</code>").format(part) if at % 2 else part for at, part in enumerate(parts))


def _options(text: str) -> Markup:
    """A text in which options of the command line, such as `--profile`, are not broken in two."""
    parts = [escape(part) for part in re.split(r"(?<![\w-])(--[a-z][a-z-]*)", text)]
    return Markup("").join(
        Markup('<span class="option">{}</span>').format(part) if at % 2 else part for at, part in enumerate(parts)
    )


def _breakable(key: str) -> Markup:
    """A recipe key that a narrow column may break after its dots."""
    return Markup(".<wbr>").join(key.split("."))


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _asset(name: str) -> str:
    return (resources.files("fullshard.report") / "assets" / name).read_text(encoding="utf-8").replace("\r\n", "\n")
