"""How a run ended, or that it runs: one word, one sentence, and what a reader should know next.

Says only what the files of the run show. Must not import torch, nor ask a rank for anything.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fullshard.checkpoint import folder as files
from fullshard.commands.chosen_run import MODEL
from fullshard.explain import crash
from fullshard.explain.match import explain
from fullshard.explain.record import KnownError
from fullshard.faults import beat
from fullshard.formatting.plural import counted
from fullshard.report.folders import Run
from fullshard.report.phases import phases, shares
from fullshard.runs.folder import is_alive

_SLOW_DATA, _LONG_PAUSES = 0.05, 0.25


@dataclass(frozen=True)
class Verdict:
    """What happened."""

    state: str
    """finished, stopped, running, guarded, died or ended."""
    sentence: str
    notes: list[str] = field(default_factory=list)
    """What limited the run, and what its curves show."""
    last_words: str = ""
    """The end of the traceback of a run that failed."""
    known: KnownError | None = None
    """Why, and what to do, if the error is known."""
    command: str = ""
    """What continues the run."""

    @property
    def word(self) -> str:
        words = {"guarded": "Stopped by the guard", "ended": "Not finished"}
        return words.get(self.state, self.state.capitalize())


def judge(run: Run) -> Verdict:
    """The verdict on a run."""
    result = result_of(run)
    notes = [*limits(run), *_trend(run)]
    if is_alive(run.folder):
        return Verdict("running", f"It is at {_progress(run)}.", notes)
    if result and result.get("stopped") == "signal":
        sentence = f"A signal stopped it at step {result['step']:,}, and it saved. The same command continues it."
        return Verdict("stopped", sentence, notes, command=command_of(run))
    if result:
        early = ", early: validation did not improve for long enough" if result.get("stopped") == "patience" else ""
        after = f" in {took(seconds)}" if (seconds := _number(result.get("seconds"))) else ""
        model = f" The trained model is in {run.folder.name}/{MODEL}." if (run.folder / MODEL).is_dir() else ""
        return Verdict("finished", f"It finished {counted(result['step'], 'step')}{after}{early}.{model}", notes)
    return _failed(run, notes)


def result_of(run: Run) -> dict[str, Any] | None:
    """The event `finished`, if nothing was trained after it."""
    last: dict[str, Any] = next((each for each in reversed(run.records) if each.get("event") != "restart"), {})
    return last if last.get("event") == "finished" and isinstance(last.get("step"), int) else None


def last_step(run: Run) -> int:
    return max((each["step"] for each in run.records if isinstance(each.get("step"), int)), default=0)


def _progress(run: Run) -> str:
    total = run.log.total_steps
    return f"step {last_step(run):,}" + (f" of {total:,}" if total else "")


def _failed(run: Run, notes: list[str]) -> Verdict:
    made, again = crash.newest(run.folder), command_of(run)
    at = f"at {_progress(run)}" if last_step(run) else "before its first step"
    saved = files.published(run.folder)
    rest = f" The same command continues it from {saved[-1].name}." if saved else " It has no checkpoint."
    if made is None or _is_older(made, run):
        state = "died" if last_step(run) or (run.folder / beat.FOLDER).is_dir() else "ended"
        return Verdict(state, f"It ended {at} without a word: it left no error.{rest}", notes, command=again)
    said = crash.left_behind(made)
    rank = crash.culprit(said, otherwise=next(iter(said))) if said else 0
    text = said[rank].text.rstrip() if said else ""
    state, who = ("guarded", "The guard stopped it") if "NumericalError" in text else ("died", f"Rank {rank} failed")
    known = explain(text)
    trace = text.partition("\n\n")[2] or text  # after the facts about the rank
    words = "\n".join(trace.splitlines()[-12:])
    return Verdict(state, f"{who} {at}.{rest}", notes, words, known[0].entry if known else None, again)


def _is_older(made: Path, run: Run) -> bool:
    """Whether the run went on after this crash: it has logged more than a minute later."""
    written = run.folder / "metrics.jsonl"
    return written.exists() and written.stat().st_mtime > made.stat().st_mtime + 60


def took(seconds: float) -> str:
    """`38 s`, `12 min 05 s`, `3 h 20 min`, `2 d 3 h`."""
    s = int(seconds)
    if s < 60:
        return f"{s} s"
    if s < 3600:
        return f"{s // 60} min {s % 60:02d} s"
    return f"{s // 3600} h {s % 3600 // 60:02d} min" if s < 86400 else f"{s // 86400} d {s % 86400 // 3600} h"


def command_of(run: Run) -> str:
    """The command that started the run."""
    words = run.facts.get("command")
    if not isinstance(words, list) or not words:
        return ""
    name = Path(str(words[0])).name
    return shlex.join([*(("python", "-m", "fullshard") if name == "__main__.py" else (name,)), *map(str, words[1:])])


def limits(run: Run) -> Iterator[str]:
    """What the run itself has found, or else what its time went into."""
    if found := run.events("limit"):
        limit, because, setting = (str(found[-1].get(key) or "") for key in ("limit", "because", "setting"))
        yield f"Limited by {limit}: {because}." + (f" Most likely to help: {setting}." if setting else "")
        return
    share = shares(phases(run))
    if not share:
        return
    pauses, training = share.get("evaluate", 0.0) + share.get("save", 0.0), share.get("data", 0.0)
    training += share.get("compute", 0.0) + share.get("log", 0.0)
    waited = share.get("data", 0.0) / training if training else 0.0
    if waited > _SLOW_DATA:
        yield f"Data limited it: ranks waited for data for {waited:.0%} of the training time (data.workers)."
    elif pauses > _LONG_PAUSES:
        yield f"Validation and saves took {pauses:.0%} of the time."
    else:
        mfu = [value for each in run.of_kind("train") if (value := _number(each.get("mfu")))]
        use = f", at a median MFU of {sorted(mfu)[len(mfu) // 2]:.1%}" if mfu else ""
        yield f"Compute limited it: {share.get('compute', 0.0):.0%} of the time{use}; {waited:.1%} waiting for data."


def _trend(run: Run) -> Iterator[str]:
    """Whether the best validation is the last one."""
    best, by, step = best_of(run)
    checked = [each["step"] for each in run.of_kind("validation")]
    if best is None or step is None or len(checked) < 3:
        return
    if step >= checked[-1]:
        yield f"The last validation was the best ({by}): more steps may help."
    elif sum(each > step for each in checked) >= 2:
        yield f"Validation was best at step {step:,} ({by}) and worse in the {sum(e > step for e in checked)} after it."


def best_of(run: Run) -> tuple[float | None, str, int | None]:
    """The best value, its metric and its step: what the run says, or else the lowest validation loss."""
    if (result := result_of(run)) and _number(result.get("best")) is not None:
        return (
            _number(result["best"]),
            str(result.get("best_by") or "loss").partition(" ")[2] or "loss",
            result["best_step"],
        )
    wanted = run.recipe.get("checkpoint", {}).get("best") if isinstance(run.recipe.get("checkpoint"), dict) else None
    rule = wanted if isinstance(wanted, dict) else {}
    metric = str(rule.get("metric", "loss"))
    found = [(v, each["step"]) for each in run.of_kind("validation") if (v := _number(each.get(metric))) is not None]
    if not found:
        return None, metric, None
    value, step = max(found, key=lambda pair: pair[0]) if rule.get("mode") == "max" else min(found)
    return value, metric, step


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
