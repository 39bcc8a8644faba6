"""Runs a fault drill: starts `fullshard train`, lets the fault happen, waits for the recovery, and compares the run
with the one that nobody broke.

Must not know how the outcome is shown.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fullshard.checkpoint import folder as files
from fullshard.checkpoint.reader import open_tensors
from fullshard.commands.verify import problems
from fullshard.config.part import plain
from fullshard.drills.kinds import SAVE_EVERY, STEP, STEPS, STORE, TIMEOUT_S, Drill, Happens
from fullshard.log.metrics import FILE, last_step, read
from fullshard.prove.compare import compare_numbers, compare_samples, compare_tensors, steps_of
from fullshard.prove.proof import EXACT
from fullshard.prove.runs import RunFailed
from fullshard.recipe import Recipe

TAG = "FULLSHARD_DRILL"
"""The variable by which the processes of a drill are known, also when their parent is gone."""
ORPHANS_S, _LOOK_S = 10.0, 0.1
"""How long processes may take to end after their launcher, not counting the time that it takes to look for them."""
_LONGEST = 20
"""How many timeouts a run with one fault may take, also on a machine under load."""
_LINES = 12
"""How many of the last lines of a failed run are shown."""


@dataclass
class Outcome:
    """How a drill went."""

    drill: Drill
    codes: list[int] = field(default_factory=list)
    """Exit codes of the commands that were run."""
    happened: int = 0
    """How many of its faults happened."""
    resumed_from: list[int] = field(default_factory=list)
    """The checkpoints from which it went on."""
    seconds: float = 0.0
    explained: str = ""
    """The line that explains the fault."""
    problem: str | None = None
    """What is wrong with the recovery."""


@dataclass
class Drills:
    """Where drills are run: the shrunk recipe, and the run that nobody breaks."""

    recipe: Recipe
    folder: Path
    world: int
    timeout_s: float = TIMEOUT_S

    def straight(self) -> None:
        """Makes the run that the others must equal. Where it takes long, ranks of the others wait longer, too."""
        begun, settings = time.monotonic(), self._settings("straight")
        settings["topology"]["timeout_s"] = _LONGEST * TIMEOUT_S
        code = self._run("straight", settings, uuid.uuid4().hex)
        self.timeout_s = max(TIMEOUT_S, time.monotonic() - begun)
        if code:
            lines = "\n".join(f"    {line}" for line in self.output("straight").rstrip().splitlines()[-_LINES:])
            failed = RunFailed(f"The run without faults ended with exit code {code}. Its last lines:\n{lines}")
            failed.exit_code = code
            raise failed

    def run(self, drill: Drill) -> Outcome:
        """One drill, judged."""
        outcome, tag, begun = Outcome(drill), uuid.uuid4().hex, time.monotonic()
        settings = self._settings(drill.name, drill)
        outcome.codes.append(self._run(drill.name, settings, tag, kill_launcher=drill.to_launcher))
        left = _orphans(tag)
        if drill.recovery == "rerun" and outcome.codes[0]:
            outcome.codes.append(self._run(drill.name, self._settings(drill.name), tag))
        outcome.seconds = time.monotonic() - begun
        outcome.happened = len(list(self._of(drill.name).glob("fault-*"))) + drill.to_launcher
        outcome.problem = self._judge(drill, outcome, left)
        return outcome

    def output(self, name: str) -> str:
        """What the commands of a drill have printed."""
        return (self.folder / f"{name}.txt").read_text(encoding="utf-8", errors="replace")

    @property
    def _steps(self) -> int:
        return self.recipe.duration.steps or STEPS

    def _rank(self, fault: Happens) -> int:
        return self.world - 1 if fault.rank is None else fault.rank

    def _of(self, name: str) -> Path:
        return self.folder / name

    def _settings(self, name: str, drill: Drill | None = None) -> dict[str, Any]:
        settings: dict[str, Any] = plain(self.recipe.model_copy(update={"name": name, "output": self.folder}))
        settings["topology"] |= {"timeout_s": self.timeout_s, "restarts": max(2, len(drill.faults) if drill else 0)}
        settings["batch"] |= {"on_oom": "stop"}  # every fault must reach the launcher
        if drill is None:
            return settings
        kind = "fullshard.drills.fault.Fault"
        settings["evaluate"] |= {
            "every_steps": 1,
            "parts": [
                vars(fault) | {"kind": kind, "rank": self._rank(fault), "of": str(self._of(name)), "name": f"{number}"}
                for number, fault in enumerate(drill.faults)
            ],
        }
        for key, value in drill.settings:
            section, _, last = key.rpartition(".")
            settings[section][last] = value.format(folder=self.folder) if value == STORE else value
        return settings

    def _run(self, name: str, settings: Mapping[str, Any], tag: str, *, kill_launcher: bool = False) -> int:
        """One command, with its output in a file; returns its exit code."""
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(dict(settings), sort_keys=False), encoding="utf-8")
        command = [sys.executable, "-m", "fullshard", "train", str(path)]
        with (self.folder / f"{name}.txt").open("a", encoding="utf-8") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, TAG: tag})
            try:
                if kill_launcher:
                    _after_step(self._of(name) / FILE, process)
                    process.send_signal(signal.SIGKILL)
                return process.wait(_LONGEST * self.timeout_s * max(len(settings["evaluate"].get("parts") or ()), 1))
            except subprocess.TimeoutExpired:
                return -int(signal.SIGALRM)
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
                    _end(tag)

    def _judge(self, drill: Drill, outcome: Outcome, left: list[int]) -> str | None:
        """What is wrong, or None."""
        said, expected = self.output(drill.name), len(drill.faults) or 1
        outcome.resumed_from = [int(step) for step in re.findall(r"Resuming from\s+\S+checkpoint-(\d+)", said)]
        outcome.explained, unexplained = _explained(said, [each.format(last=self.world - 1) for each in drill.says])
        if outcome.happened != expected:
            return f"{outcome.happened} of {expected} faults happened"
        if left:
            return f"processes {left} were still there {ORPHANS_S:g} s after the end"
        if outcome.codes[-1]:
            return f"ended with exit code {outcome.codes[-1]}"
        if unexplained:
            return f"the output does not explain it: {unexplained}"
        if drill.recovery == "skip":
            return self._finite(drill)
        least = self._least(drill)
        if len(outcome.resumed_from) != len(least) or any(map(int.__lt__, outcome.resumed_from, least)):
            return f"resumed from {outcome.resumed_from or 'no checkpoint'}: more is lost than the last checkpoint"
        return self._compared(drill)

    def _least(self, drill: Drill) -> list[int]:
        """For each restart the oldest checkpoint from which the run may go on."""
        if drill.recovery == "retry":
            return []
        asked = self.recipe.checkpoint.asynchronous
        background = self.recipe.topology.device != "cpu" if asked is None else asked
        faults = [fault for fault in drill.faults if fault.where != "start"] or [Happens("killed", "data")]
        return [oldest(fault, background=background) for fault in faults]

    def _compared(self, drill: Drill) -> str | None:
        """The first difference from the straight run, bit by bit."""
        ours, theirs = (steps_of(read(self._of(name) / FILE)) for name in (drill.name, "straight"))
        saved = self._of(drill.name)
        if ("checkpoint.store", STORE) in drill.settings:
            saved = files.place(f"{STORE.format(folder=self.folder)}/{drill.name}")
        tensors = [open_tensors(run / files.name_of(self._steps)) for run in (saved, self._of("straight"))]
        looks = (
            compare_samples(ours, theirs, within=EXACT),
            compare_numbers(ours, theirs, within=EXACT),
            compare_tensors(*tensors, within=EXACT, step=self._steps),
        )
        return next((look.drift for look in looks if look.drift), None)

    def _finite(self, drill: Drill) -> str | None:
        """The last checkpoint of a run that left out an update is whole, and verify finds only finite weights in it."""
        return next(iter(problems(self._of(drill.name) / files.name_of(self._steps))), None)


def oldest(fault: Happens, *, background: bool) -> int:
    """The oldest checkpoint from which a run may go on: the last one before the fault. At a step that is saved, a fault
    in the evaluation comes before that save, and one in the save ends it. A save in the background may not be done."""
    last = fault.after // SAVE_EVERY * SAVE_EVERY
    before = fault.where in ("save", "evaluate") and fault.after == last
    return last - SAVE_EVERY if before or background else last


def _explained(said: str, patterns: Sequence[str]) -> tuple[str, str | None]:
    """The first line that explains a fault, and the first pattern that the output has too few of."""
    first = re.search(patterns[0], said) if patterns else None
    line = said[said.rfind("\n", 0, first.start()) + 1 :].split("\n")[0].strip() if first else ""
    rare = (each for each, count in Counter(patterns).items() if len(re.findall(each, said)) < count)
    return line, next(rare, None)


def _after_step(metrics: Path, process: subprocess.Popen[bytes]) -> None:
    """Waits until a run has logged the step after which faults happen."""
    while process.poll() is None and (last_step(metrics) or 0) < STEP:
        time.sleep(0.05)


def _processes(tag: str) -> list[Any]:
    import psutil  # type: ignore[import-untyped]

    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(TAG) == tag and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _orphans(tag: str) -> list[int]:
    """Processes of a drill that outlive it; they are ended here."""
    looks = round(ORPHANS_S / _LOOK_S)
    while (found := _processes(tag)) and looks:
        time.sleep(_LOOK_S)
        looks -= 1
    _end(tag)
    return [process.pid for process in found]


def _end(tag: str) -> None:
    for process in _processes(tag):
        with contextlib.suppress(Exception):
            process.kill()
