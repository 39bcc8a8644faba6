"""The checks that start no rank: `check --quick` shows all findings; `train` runs them before its ranks meet, stops at
errors and shows warnings.

Takes about a second for data of any size; runs no collective. Must not know how a run is started or shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from fullshard.check import capacity, data, environment, model, settings
from fullshard.check.findings import Finding
from fullshard.check.machine import Machine, inspect
from fullshard.contracts.launcher import Ranks
from fullshard.errors import SetupError
from fullshard.log.console import Console
from fullshard.recipes.read import Reading
from fullshard.setup.inputs import RunInputs


def before_ranks_meet(reading: Reading, inputs: RunInputs, ranks: Ranks, *, console: Console) -> None:
    """Raises all errors at once; warnings go into the header of the run."""
    machine = inspect(links=False)
    found: dict[str, Iterable[Finding]] = {"Environment": environment.look(reading.recipe, ranks, machine=machine)}
    found |= look(reading, ranks, machine=machine, module=inputs.module, inputs=inputs)
    seen = [(section, finding) for section, findings in found.items() for finding in findings]
    lines = dict.fromkeys(_line(finding) for _, finding in seen if finding.level == "error")
    if lines:
        raise SetupError("\n".join(lines))
    # Recipe and data are the same on every node; each node reports on its own machine.
    own = [f for section, f in seen if f.level == "warning" and not (console.silent and section in ("Recipe", "Data"))]
    for line in dict.fromkeys(map(_line, own)):
        console.warn_in_header(line)


def _line(finding: Finding) -> str:
    return f"{finding.check}: {finding.sentence()}"


def look(
    reading: Reading, ranks: Ranks, *, machine: Machine, module: nn.Module | None, inputs: RunInputs | None
) -> dict[str, Iterable[Finding]]:
    """The sections after the environment; `module` and `inputs` are None if they could not be built."""
    recipe = reading.recipe

    def model_and_space() -> Iterator[Finding]:
        if module is not None:
            yield from model.look(recipe, inputs, module=module, ranks=ranks)
            size = capacity.size_of(recipe, module)
            yield from capacity.disk(recipe, size, inputs.plan if inputs else None)
            yield from capacity.memory(recipe, ranks, size, machine=machine)
            yield from capacity.strategies(recipe, ranks, size, machine=machine)

    return {
        "Recipe": settings.look(reading, ranks, inputs),
        "Model": model_and_space(),
        "Data": data.look(recipe, inputs) if inputs else (),
    }
