"""`fullshard check`: the sections in order, the last one on the ranks of a real launch.

This process checks environment, recipe, model and data by itself; the ranks it starts try the model and write their
findings to files, so that even a rank killed by the system becomes a finding. Under a launcher every rank checks
everything, and rank 0 reports. Must not know what is checked.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullshard.check.findings import Finding, error, guarded, of, ok, warning
from fullshard.check.report import Report
from fullshard.commands.options import json_alone
from fullshard.contracts.launcher import Ranks, Topology
from fullshard.errors import EXIT_DONE, EXIT_USER, DataError, FullshardError, SetupError
from fullshard.explain import crash
from fullshard.explain.match import explain_exception
from fullshard.recipes.read import Reading, hand_on

if TYPE_CHECKING:
    from torch import nn

    from fullshard.log.console import Console
    from fullshard.recipe import Recipe
    from fullshard.setup.inputs import RunInputs


@dataclass(frozen=True)
class CheckOptions:
    """What the user asked of the check."""

    quick: bool = False
    units: bool = False
    as_json: bool = False
    command: str = ""
    """The command that trains what is checked."""
    resume: str | None = None
    """The value of `--resume`; None without it."""
    resume_anyway: bool = False


def check(reading: Reading, ranks: Ranks | SetupError, options: CheckOptions, *, rank: int | None = None) -> int:
    """Checks in this process, then on ranks that it starts; returns the exit code. An error in place of `ranks` (the
    recipe asks for devices that do not exist) becomes a finding. Under a launcher this is `rank`: all ranks check, and
    rank 0 reports."""
    problem, by_hand = (None, False) if rank is None else _launch_problem(reading.recipe.topology)
    report = Report(as_json=options.as_json, silent=bool(rank) and not by_hand)
    with json_alone(options.as_json):
        extra = _look(reading, problem or ranks, report, options)
    tried = not (options.quick or report.failed)
    if tried and isinstance(ranks, Ranks):
        with json_alone(options.as_json), report.working("Trying the longest batch on all ranks"):
            found = _on_ranks(reading, ranks) if rank is None else _as_one(reading, rank=rank)
        report.section("Trial", found)
    report.end(options.command, tried=tried, extra=extra)
    return EXIT_USER if report.failed else EXIT_DONE


def show_sample(reading: Reading, number: int, *, as_json: bool) -> int:
    """Prints a sample of the training data."""
    with json_alone(as_json), Report(as_json=as_json).working("Encoding the training data"):
        from fullshard.log import libraries
        from fullshard.log.console import Console
        from fullshard.multimodal.transcript import show
        from fullshard.setup.run_inputs import prepare_inputs

        console = Console(silent=True)
        with libraries.route(console):
            inputs = prepare_inputs(reading.recipe, world_size=1, console=console)
    return show(inputs.data, number, as_json=as_json)


def _launch_problem(topology: Topology) -> tuple[SetupError | None, bool]:
    """What is wrong with the launcher's variables, as `train` would find it; and whether they were set by hand, so that
    no launcher shows what other ranks print."""
    from fullshard.dist import env
    from fullshard.setup.on_ranks import check_launch

    launch = env.detect(os.environ)
    try:
        check_launch(launch, topology)
    except SetupError as mistake:
        return mistake, launch.launcher != "slurm" and "TORCHELASTIC_ERROR_FILE" not in os.environ
    return None, False


def _as_one(reading: Reading, *, rank: int) -> list[Finding]:
    """The trial as one rank of a launcher, which reports what other ranks raise."""
    from fullshard.check.trial import run_trial

    try:
        return run_trial(reading)
    except Exception as mistake:
        if rank != 0:
            raise
        return [_trial_error(mistake)]


def refused(mistake: FullshardError, options: CheckOptions) -> int:
    """Reports a recipe that cannot be read, or a launcher that contradicts itself."""
    report = Report(as_json=options.as_json)
    section, check = ("Environment", "ranks") if isinstance(mistake, SetupError) else ("Recipe", "recipe")
    section, check = ("Data", "data") if isinstance(mistake, DataError) else (section, check)
    # A recipe with several mistakes has a line for each.
    report.section(section, [error(check, line, "") for line in str(mistake).splitlines()])
    report.end(options.command, tried=False, extra={})
    return mistake.exit_code


def _look(reading: Reading, asked: Ranks | SetupError, report: Report, options: CheckOptions) -> dict[str, Any]:
    """Sections 1 to 4, without starting ranks; returns what the JSON report holds besides findings."""
    with report.working("Inspecting this machine"):  # importing torch takes seconds
        from fullshard.check import earlier, environment, preflight
        from fullshard.check.machine import inspect
        from fullshard.log import libraries
        from fullshard.log.console import Console

        machine = inspect()
    recipe, console = reading.recipe, Console(silent=True)
    with libraries.route(console):
        ranks = asked if isinstance(asked, Ranks) else Ranks(per_node=1, nodes=recipe.topology.nodes)
        found = environment.look(recipe, asked if isinstance(asked, Ranks) else None, machine=machine)
        report.section("Environment", [*found, *([of("ranks", asked)] if isinstance(asked, SetupError) else [])])
        with report.working("Reading the data and building the model"):
            ready = _prepare(recipe, world_size=ranks.per_node * ranks.nodes, console=console)
        asked_of: dict[str, Any] = {"asked": options.resume, "anyway": options.resume_anyway}
        before = guarded("earlier run", lambda: earlier.look(recipe, ready.inputs, **asked_of) if ready.inputs else ())
        sections = preflight.look(reading, ranks, machine=machine, module=ready.module, inputs=ready.inputs)
        more = {"Recipe": before, "Model": guarded("peak memory", lambda: _foreseen(recipe, ranks, ready.module))}
        for title, seen in sections.items():
            report.section(title, chain(ready.problems(title.lower()), seen, more.get(title, ())))
        return _units(recipe, ranks, ready.module, report) if options.units and ready.module is not None else {}


def _foreseen(recipe: Recipe, ranks: Ranks, module: nn.Module | None) -> Iterator[Finding]:
    from fullshard.plan.foreseen import foreseen

    if module is not None:
        text, remedy = foreseen(recipe, ranks, module)
        yield warning("peak memory", text, remedy) if remedy else ok("peak memory", text)


@dataclass
class _Prepared:
    """As much of a run's inputs as could be prepared."""

    module: nn.Module | None = None
    inputs: RunInputs | None = None
    mistakes: list[tuple[str, FullshardError]] = field(default_factory=list)

    def problems(self, section: str) -> list[Finding]:
        return [of(where, mistake) for where, mistake in self.mistakes if where == section]


def _prepare(recipe: Recipe, *, world_size: int, console: Console) -> _Prepared:
    """Continues after an error as far as possible, so that one check finds all of them."""
    from torch import nn

    from fullshard.setup.run_inputs import OpenSources, build_module, find_best, find_processor, prepare_data

    ready, sources = _Prepared(), OpenSources(recipe)

    def attempt(where: str, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except FullshardError as mistake:
            # Training a tokenizer reads the data, so the model step may find an error in the data.
            where = "data" if isinstance(mistake, DataError) else where
            if str(mistake) not in {str(known) for _, known in ready.mistakes}:
                ready.mistakes.append((where, mistake))
            return None

    processor = attempt("model", lambda: find_processor(recipe, sources))
    if ready.problems("model") or ready.problems("data"):
        return ready
    ready.module = attempt("model", lambda: build_module(recipe, processor))
    if (built := ready.module) is not None:
        attempt("recipe", lambda: find_best(recipe, built))
    # The data can be checked even if the model cannot be built.
    module = nn.Module() if ready.module is None else ready.module
    ready.inputs = attempt(
        "data", lambda: prepare_data(recipe, sources, processor, module, world_size=world_size, console=console)
    )
    return ready


def _units(recipe: Recipe, ranks: Ranks, module: nn.Module, report: Report) -> dict[str, Any]:
    from fullshard.check.model import planned_units
    from fullshard.check.units import units_table

    units = planned_units(recipe, module, ranks)
    report.text("\n" + units_table(units))
    return {"units": [unit.as_dict() for unit in units]}


def _on_ranks(reading: Reading, ranks: Ranks) -> list[Finding]:
    """Starts ranks for the trial and collects their findings."""
    from fullshard.check.trial import clear

    with tempfile.TemporaryDirectory(prefix="fullshard-") as name:
        folder = Path(name)
        merged = folder / f"{reading.recipe.name}.yaml"
        hand_on(reading, merged)
        command = [sys.executable, "-m", "fullshard", "check", str(merged), "--trial-in", name]
        output = reading.recipe.output
        absent = [path for path in (output, *output.parents) if not path.exists()]
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):  # what the launcher prints; ranks write to stderr directly
                code = reading.recipe.topology.launcher.start(command, ranks)
        except FullshardError as mistake:
            return [of("ranks", mistake)]
        finally:
            if ranks.node_rank == 0:  # a killed rank could not clean up
                clear(reading.recipe, absent)
        written = {int(file.stem): json.loads(file.read_text()) for file in sorted(folder.glob("[0-9]*.json"))}
    return _merged(written, code, said=said.getvalue())


def _merged(written: dict[int, list[dict[str, Any]]], code: int, *, said: str = "") -> list[Finding]:
    """What the ranks agreed on, or what each raised, equal messages once; `said` is what the launcher printed."""
    lists = {rank: [Finding(**finding) for finding in findings] for rank, findings in written.items()}
    agreed = next((found for found in lists.values() if not any(f.check == "trial" for f in found)), [])
    raised: dict[Finding, list[int]] = {}
    for rank, found in lists.items():
        for finding in found:
            if finding.check == "trial":
                raised.setdefault(finding, []).append(rank)
    failures = [
        replace(finding, text=f"rank{'s' if len(who) > 1 else ''} {', '.join(map(str, who))}: {finding.text}")
        for finding, who in raised.items()
    ]
    if code and said.strip():
        advice = "Their last lines are above. If memory ran out (see dmesg), lower batch.per_device or use fewer ranks."
        failures.insert(0, error("trial", " ".join(said.split()), advice))
    # A rank that lost another one reports that too, but the other one's error is the cause.
    causes = [failure for failure in failures if not crash.is_victim(failure.text)]
    agreed += causes or failures
    if code and not any(finding.level == "error" for finding in agreed):
        text = f"The trial ended with exit code {code}, and no rank reported an error."
        agreed.append(error("trial", text, "Their last lines are above."))
    return agreed or [ok("trial", "the ranks of this node took part; node 0 reports the findings")]


def trial_rank(reading: Reading, folder: Path) -> int:
    """One rank of the trial: writes its findings to a file."""
    from fullshard.check.trial import run_trial

    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # standard output is for the report alone
    try:
        found = run_trial(reading)
    except Exception as mistake:
        found = [_trial_error(mistake)]
    path = folder / f"{os.environ.get('RANK', '0')}.json"
    path.write_text(json.dumps([finding.as_dict() for finding in found]), encoding="utf-8")
    return EXIT_USER if any(finding.level == "error" for finding in found) else EXIT_DONE


def _trial_error(mistake: Exception) -> Finding:
    """What stopped the trial; an unexpected error also prints its traceback."""
    if isinstance(mistake, FullshardError):
        return of("trial", mistake)
    if crash.lost_a_rank(mistake):
        return error("trial", f"lost another rank ({mistake}).", "Look for the error of that rank.")
    traceback.print_exception(mistake)
    known = [f"{m.entry.title}: `fullshard explain {m.entry.name}`." for m in explain_exception(mistake)[:1]]
    return error("trial", f"{type(mistake).__name__}: {mistake}", " ".join([*known, "Its traceback is above."]))
