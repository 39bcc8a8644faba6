"""`fullshard check`: the sections in order, the last one on the ranks of a real launch.

This process looks at environment, recipe, model and data by itself; the ranks it starts try the model and write what
they found to files, so that even a rank that the system killed is a finding. Under a launcher every rank does it all,
and rank 0 tells. Must not know what is looked at.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullshard.check.findings import Finding, error, of, ok
from fullshard.check.report import Report
from fullshard.errors import EXIT_DONE, EXIT_USER, DataError, FullshardError, SetupError
from fullshard.launch.base import Ranks
from fullshard.read import Reading, hand_on

if TYPE_CHECKING:
    from torch import nn

    from fullshard.ground import Ground
    from fullshard.log.console import Console
    from fullshard.recipe import Recipe


@dataclass(frozen=True)
class Wish:
    """What the user asked of the check."""

    quick: bool = False
    units: bool = False
    as_json: bool = False
    command: str = ""
    """The command that trains what is checked."""


def check(reading: Reading, ranks: Ranks | SetupError, wish: Wish) -> int:
    """Checks in this process, then on ranks of its own; returns the exit code. Where the ranks that are asked for
    cannot be had, why not is one finding among others."""
    report = Report(as_json=wish.as_json)
    extra = _look(reading, ranks, report, wish)
    tried = not (wish.quick or report.failed)
    if tried and isinstance(ranks, Ranks):
        with report.working("Starting the ranks and trying the longest batch"):
            found = _on_ranks(reading, ranks)
        report.section("Trial", found)
    report.end(wish.command, tried=tried, extra=extra)
    return EXIT_USER if report.failed else EXIT_DONE


def check_as_rank(reading: Reading, ranks: Ranks, wish: Wish, *, rank: int) -> int:
    """The same in a rank that a launcher has started: all look, rank 0 tells."""
    report = Report(as_json=wish.as_json, silent=rank != 0)
    extra = _look(reading, ranks, report, wish)
    tried = not (wish.quick or report.failed)
    if tried:
        from fullshard.check.trial import run_trial

        report.section("Trial", run_trial(reading))
    report.end(wish.command, tried=tried, extra=extra)
    return EXIT_USER if report.failed else EXIT_DONE


def refused(mistake: FullshardError, wish: Wish) -> int:
    """A recipe that could not even be read."""
    report = Report(as_json=wish.as_json)
    # A recipe with several mistakes has a line for each.
    report.section("Recipe", [error("recipe", line, "") for line in str(mistake).splitlines()])
    report.end(wish.command, tried=False, extra={})
    return mistake.exit_code


def _look(reading: Reading, asked: Ranks | SetupError, report: Report, wish: Wish) -> dict[str, Any]:
    """Sections 1 to 4, without any rank; gives what the verdict carries beside findings."""
    from fullshard.check import data, environment, model, settings
    from fullshard.check.machine import inspect
    from fullshard.check.preflight import space
    from fullshard.log import libraries
    from fullshard.log.console import Console

    recipe, machine, console = reading.recipe, inspect(), Console(silent=True)
    with libraries.route(console):
        ranks = asked if isinstance(asked, Ranks) else Ranks(per_node=1, nodes=recipe.topology.nodes)
        found = environment.look(recipe, asked if isinstance(asked, Ranks) else None, machine=machine)
        report.section("Environment", [*found, *([of("ranks", asked)] if isinstance(asked, SetupError) else [])])
        with report.working("Reading the data and building the model"):
            laid = _lay(recipe, world_size=ranks.per_node * ranks.nodes, console=console)
        report.section("Recipe", [*laid.problems("recipe"), *settings.look(reading, ranks, laid.ground)])

        def model_and_space() -> Iterator[Finding]:
            yield from laid.problems("model")
            if laid.module is not None:
                yield from model.look(recipe, laid.ground, module=laid.module, ranks=ranks)
                plan = laid.ground.plan if laid.ground else None
                yield from space(recipe, ranks, machine=machine, module=laid.module, plan=plan)

        report.section("Model", model_and_space())
        report.section("Data", [*laid.problems("data"), *(data.look(recipe, laid.ground) if laid.ground else [])])
        return _units(recipe, ranks, laid.module, report) if wish.units and laid.module is not None else {}


@dataclass
class _Laid:
    """As much of a run's ground as could be laid."""

    module: nn.Module | None = None
    ground: Ground | None = None
    mistakes: list[tuple[str, FullshardError]] = field(default_factory=list)

    def problems(self, section: str) -> list[Finding]:
        return [of(where, mistake) for where, mistake in self.mistakes if where == section]


def _lay(recipe: Recipe, *, world_size: int, console: Console) -> _Laid:
    """Goes on after a mistake as far as it can, so that one check finds them all."""
    from torch import nn

    from fullshard.ground import build_module, check_best, find_processor, lay_data

    laid = _Laid()

    def attempt(where: str, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except FullshardError as mistake:
            # Where it lies is in the message; a tokenizer is trained on the data, so either may be found by either.
            where = "data" if isinstance(mistake, DataError) else where
            laid.mistakes.append((where, mistake))
            return None

    attempt("recipe", lambda: check_best(recipe))
    processor = attempt("model", lambda: find_processor(recipe))
    if laid.problems("model") or laid.problems("data"):
        return laid
    laid.module = attempt("model", lambda: build_module(recipe, processor))
    # Data can be looked at beside a model that cannot be built.
    module = nn.Module() if laid.module is None else laid.module
    laid.ground = attempt("data", lambda: lay_data(recipe, processor, module, world_size=world_size, console=console))
    return laid


def _units(recipe: Recipe, ranks: Ranks, module: nn.Module, report: Report) -> dict[str, Any]:
    from fullshard.check.model import planned_units, units_table

    units = planned_units(recipe, module, ranks)
    report.text("\n" + units_table(units))
    return {"units": [unit.as_dict() for unit in units]}


def _on_ranks(reading: Reading, ranks: Ranks) -> list[Finding]:
    """Starts ranks for the trial and collects what they wrote."""
    from fullshard.check.trial import folder_of

    with tempfile.TemporaryDirectory(prefix="fullshard-") as name:
        folder = Path(name)
        merged = folder / f"{reading.recipe.name}.yaml"
        hand_on(reading, merged)
        command = [sys.executable, "-m", "fullshard", "check", str(merged), "--trial-in", name]
        try:
            code = reading.recipe.topology.launcher.start(command, ranks)
        except FullshardError as mistake:
            return [of("ranks", mistake)]
        finally:
            if ranks.node_rank == 0:  # a rank that was killed could not tidy up
                shutil.rmtree(folder_of(reading.recipe), ignore_errors=True)
        told = {int(file.stem): json.loads(file.read_text()) for file in sorted(folder.glob("[0-9]*.json"))}
    return _merged(told, code)


def _merged(told: dict[int, list[dict[str, Any]]], code: int) -> list[Finding]:
    """What the ranks agreed on, or what each of them met; the same words once."""
    lists = {rank: [Finding(**finding) for finding in findings] for rank, findings in told.items()}
    agreed = next((found for found in lists.values() if not any(f.check == "trial" for f in found)), [])
    met: dict[Finding, list[int]] = {}
    for rank, found in lists.items():
        for finding in found:
            if finding.check == "trial":
                met.setdefault(finding, []).append(rank)
    for finding, who in met.items():
        text = f"rank{'s' if len(who) > 1 else ''} {', '.join(map(str, who))}: {finding.text}"
        agreed.append(Finding(finding.level, finding.check, text, finding.remedy))
    if code and not any(finding.level == "error" for finding in agreed):
        text = f"The trial ended with exit code {code} before the ranks could say why; their last lines are above."
        agreed.append(error("trial", text, "Try a smaller batch.per_device, or `dmesg` for a process out of memory."))
    return agreed or [ok("trial", "the ranks of this node took part; node 0 has the findings")]


def trial_rank(reading: Reading, folder: Path) -> int:
    """One rank of the trial: writes its findings to a file of its own."""
    from fullshard.check.trial import run_trial

    try:
        found = run_trial(reading)
    except FullshardError as mistake:
        found = [of("trial", mistake)]
    except Exception as mistake:
        traceback.print_exc()
        found = [error("trial", f"{type(mistake).__name__}: {mistake}", _advice(mistake))]
    failed = any(finding.level == "error" for finding in found)
    path = folder / f"{os.environ.get('RANK', '0')}.json"
    path.write_text(json.dumps([finding.as_dict() for finding in found]), encoding="utf-8")
    return EXIT_USER if failed else EXIT_DONE


def _advice(mistake: Exception) -> str:
    return "Its traceback is above."
