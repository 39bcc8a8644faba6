"""`fullshard train --dry-run`: every value in force and the step arithmetic. Must not start anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fullshard.contracts.launcher import Ranks
    from fullshard.recipes.read import Reading


def describe(reading: Reading, *, ranks: Ranks) -> str:
    """What the run would do, as YAML with comments."""
    from fullshard.config.part import plain
    from fullshard.config.section import without_effect
    from fullshard.formatting.yaml_text import render
    from fullshard.log import libraries
    from fullshard.log.console import Console
    from fullshard.setup.run_inputs import prepare_inputs

    recipe, console = reading.recipe, Console(silent=True)
    with libraries.route(console):
        inputs = prepare_inputs(recipe, world_size=ranks.per_node * ranks.nodes, console=console)
    lines = [*reading.overridden, *without_effect(recipe), *inputs.data.report, *inputs.plan.describe()]
    return render(plain(recipe)) + "\n" + "\n".join(f"# {line}" for line in lines) + "\n"
