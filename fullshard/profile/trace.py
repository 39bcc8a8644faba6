"""Where the time goes in a Chrome trace of torch's profiler: seconds by phase and by kind of work.

With a GPU the work is its kernels, which may overlap; without one it is the operators of the thread that trains, by the
time that they spend themselves. Must not import torch.
"""

from __future__ import annotations

import bisect
import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fullshard.profile.kinds import KINDS, kind_of

PREFIX = "fullshard::"
"""Names of the phases of a run in a trace."""
PHASES = ("data", "forward", "backward", "clip and checks", "optimizer", "log", "evaluate", "save")
_STEP, _OPTIMIZER, _BACKWARD = "ProfilerStep#", "Optimizer.step#", "autograd::engine::evaluate_function"
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCH = ("cuda_runtime", "cuda_driver")

Span = tuple[float, float]


@dataclass
class Profile:
    """Seconds over all profiled steps."""

    steps: int = 0
    seconds: float = 0.0
    gpu: bool = False
    phases: dict[str, float] = field(default_factory=dict)
    """On the host."""
    device: dict[str, float] = field(default_factory=dict)
    """Of a GPU's kernels, by the phase that launched them."""
    kinds: dict[str, float] = field(default_factory=dict)
    exposed: float = 0.0
    """Communication of a GPU while it did nothing else."""
    most: list[tuple[str, str, int, float]] = field(default_factory=list)
    """Name, kind, calls and seconds of the most expensive operators or kernels."""


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a trace with a duration; times are in microseconds."""
    with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
        events = json.load(file)["traceEvents"]
    return [event for event in events if event.get("ph") == "X" and "dur" in event and "ts" in event]


def summarise(events: Sequence[Mapping[str, Any]], *, most: int = 12) -> Profile:
    """What the profiled steps spent their time on."""
    steps = [
        event for event in events if str(event["name"]).startswith(_STEP) and event.get("cat") == "user_annotation"
    ]
    found = Profile(steps=len(steps))
    if not steps:
        return found
    inside = _Spans([_span(step) for step in steps])
    main, found.seconds = steps[0]["tid"], inside.total / 1e6
    host = [
        event for event in events if event.get("cat") in ("cpu_op", "user_annotation") and inside.holds(event["ts"])
    ]
    when = _When(host, main)
    found.phases = {name: seconds / 1e6 for name, seconds in when.seconds().items()}
    kernels = [event for event in events if event.get("cat") in _DEVICE and inside.holds(event["ts"])]
    found.gpu = bool(kernels)
    if kernels:
        _count_kernels(found, kernels, events, when, inside)
    else:
        _count_operators(found, host, when)
    found.most = found.most[:most]
    return found


class _Spans:
    """Times without overlaps, in order."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self.spans: list[Span] = []
        for begin, end in sorted(spans):
            if self.spans and begin <= self.spans[-1][1]:
                self.spans[-1] = (self.spans[-1][0], max(end, self.spans[-1][1]))
            else:
                self.spans.append((begin, end))
        self._begins = [begin for begin, _ in self.spans]

    @property
    def total(self) -> float:
        return sum(end - begin for begin, end in self.spans)

    def at(self, time: float) -> Span | None:
        index = bisect.bisect_right(self._begins, time) - 1
        return self.spans[index] if index >= 0 and time < self.spans[index][1] else None

    def holds(self, time: float) -> bool:
        return self.at(time) is not None

    def within(self, begin: float, end: float) -> float:
        """How much of these times lies between two moments."""
        index = max(bisect.bisect_right(self._begins, begin) - 1, 0)
        total = 0.0
        for start, stop in self.spans[index:]:
            if start >= end:
                break
            total += max(min(stop, end) - max(start, begin), 0.0)
        return total


class _When:
    """Which phase a moment of a thread belongs to."""

    def __init__(self, host: Sequence[Mapping[str, Any]], main: Any) -> None:
        self._main = main
        named = defaultdict(list)
        for event in host:
            name = str(event["name"])
            if name.startswith(PREFIX):
                named[name.removeprefix(PREFIX)].append(_span(event))
            elif name.startswith((_OPTIMIZER, _BACKWARD)):
                named[_OPTIMIZER if name.startswith(_OPTIMIZER) else _BACKWARD].append(_span(event))
        self._spans = {name: _Spans(spans) for name, spans in named.items()}
        self._none = _Spans([])

    def of(self, time: float, thread: Any) -> str | None:
        """None: between phases."""
        for name in ("data", "log", "evaluate", "save"):
            if self._get(name).holds(time):
                return name
        step = self._get("compute").at(time)
        if step is None:
            return None
        if thread == self._main and self._get(_OPTIMIZER).holds(time):
            return "optimizer"
        if thread != self._main or self._get(_BACKWARD).holds(time):
            return "backward"
        return "clip and checks" if time >= self._last_backward(step) else "forward"

    def seconds(self) -> dict[str, float]:
        """The host's time in each phase."""
        found = {name: self._get(name).total for name in ("data", "log", "evaluate", "save")}
        found |= dict.fromkeys(("forward", "backward", "clip and checks", "optimizer"), 0.0)
        for begin, end in self._get("compute").spans:
            last = min(self._last_backward((begin, end)), end)
            backward = self._get(_BACKWARD).within(begin, end)
            optimizer = self._get(_OPTIMIZER).within(begin, end)
            found["backward"] += backward
            found["optimizer"] += optimizer
            found["forward"] += last - begin - backward
            found["clip and checks"] += end - last - optimizer
        return {name: max(found[name], 0.0) for name in PHASES}

    def _get(self, name: str) -> _Spans:
        return self._spans.get(name, self._none)

    def _last_backward(self, step: Span) -> float:
        """When the last backward pass of a step ends; its end if it has none, as when numbers are read."""
        ends = [end for begin, end in self._get(_BACKWARD).spans if step[0] <= begin < step[1]]
        return max(ends, default=step[0])


def _span(event: Mapping[str, Any]) -> Span:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _count_kernels(
    found: Profile,
    kernels: Sequence[Mapping[str, Any]],
    events: Sequence[Mapping[str, Any]],
    when: _When,
    inside: _Spans,
) -> None:
    launched = {
        event["args"]["correlation"]: (float(event["ts"]), event["tid"])
        for event in events
        if event.get("cat") in _LAUNCH and "correlation" in event.get("args", {})
    }
    kinds, device = dict.fromkeys(KINDS, 0.0), dict.fromkeys(PHASES, 0.0)
    each: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    sent: list[Span] = []
    worked: list[Span] = []
    for event in kernels:
        name, seconds = str(event["name"]), float(event["dur"]) / 1e6
        place = launched.get(event.get("args", {}).get("correlation"))
        phase = when.of(*place) if place else None
        kind = "copies" if event["cat"] != "kernel" else kind_of(name)
        kind = "optimizer" if phase == "optimizer" and kind != "communication" else kind
        kinds[kind] += seconds
        if phase is not None:
            device[phase] += seconds
        each[name, kind].append(seconds)
        (sent if kind == "communication" else worked).append(_span(event))
    busy, alone = _Spans([*sent, *worked]), _Spans(worked)
    kinds["idle"] = sum(end - begin - busy.within(begin, end) for begin, end in inside.spans) / 1e6
    found.exposed = (busy.total - alone.total) / 1e6
    found.kinds, found.device, found.most = kinds, device, _most(each)


def _count_operators(found: Profile, host: Sequence[Mapping[str, Any]], when: _When) -> None:
    """Operators of the main thread, each by the time that it does not spend in others."""
    kinds = dict.fromkeys(KINDS, 0.0)
    each: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    counted = 0.0
    for event, seconds, inherited in _self_times([event for event in host if event["tid"] == when._main]):
        name = str(event["name"])
        kind = inherited or kind_of(name)
        if when.of(float(event["ts"]), event["tid"]) == "optimizer" and kind != "communication":
            kind = "optimizer"
        kinds[kind] += seconds
        counted += seconds
        each[name, kind].append(seconds)
    kinds["idle"] = max(found.seconds - counted, 0.0)
    found.kinds, found.most = kinds, _most(each)


def _self_times(events: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], float, str | None]]:
    """Each operator with its own seconds, and `communication` if it is part of one: a wait has no operator of its own.

    Marks around operators (phases, steps, the engine of autograd) are no work: their own time is Python's."""
    ordered = sorted(events, key=lambda event: (float(event["ts"]), -float(event["dur"])))
    own = [float(event["dur"]) for event in ordered]
    sends: list[bool] = []
    open_: list[int] = []
    for index, event in enumerate(ordered):
        begin, end = _span(event)
        while open_ and _span(ordered[open_[-1]])[1] <= begin:
            open_.pop()
        if open_:
            own[open_[-1]] -= min(end, _span(ordered[open_[-1]])[1]) - begin
        sends.append(kind_of(str(event["name"])) == "communication" or bool(open_ and sends[open_[-1]]))
        open_.append(index)
    return [
        (event, max(own[index], 0.0) / 1e6, "communication" if sends[index] else None)
        for index, event in enumerate(ordered)
        if sends[index] or not _is_mark(event)
    ]


def _is_mark(event: Mapping[str, Any]) -> bool:
    return event.get("cat") == "user_annotation" or str(event["name"]).startswith(_BACKWARD)


def _most(each: Mapping[tuple[str, str], Sequence[float]]) -> list[tuple[str, str, int, float]]:
    rows = [(name, kind, len(times), sum(times)) for (name, kind), times in each.items()]
    return sorted(rows, key=lambda row: -row[3])
