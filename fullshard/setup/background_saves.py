"""Whether saves are written in the background, and when the host memory for that is taken.

Must not know how anything is written.
"""

from __future__ import annotations

from typing import Any

from fullshard.checkpoint.background import Background
from fullshard.checkpoint.host_capacity import shortage
from fullshard.checkpoint.saver import Saver
from fullshard.checkpoint.staging import sizes_of
from fullshard.checkpoint.tensors import all_tensors, materialise_state
from fullshard.control.next_save import Approach
from fullshard.control.triggers import Due
from fullshard.errors import SetupError
from fullshard.recipe import Recipe
from fullshard.setup.inputs import RunInputs
from fullshard.setup.run_inputs import effective_best


def go_background(saver: Saver, wanted: bool | None) -> None:
    """Lets the saver write in the background if that is wanted and host memory allows; all ranks decide alike."""
    world = saver.world
    if wanted is False or (wanted is None and world.device.type != "cuda"):
        return
    to_come = _state_to_come(saver)
    background = Background(device=world.device, sizes=sizes_of(to_come))
    if short := shortage(background.num_bytes, world):
        background.close()
        if wanted:
            raise SetupError(
                f"checkpoint.asynchronous = true: {short}. Set it to false, use more nodes, or free memory."
            )
        saver.console.warn(f"{short}: training waits for every save.")
        return
    saver.background = background
    saver.prepare(to_come)


def saves_to_come(recipe: Recipe, inputs: RunInputs, saver: Saver, due: Due) -> Approach:
    """When the recipe may ask for a save: by its own intervals, and where a validation may find the best model yet."""
    evaluate, judged = recipe.evaluate, effective_best(recipe, inputs) is not None
    return Approach(
        due=[due, Due(evaluate.every_steps, evaluate.every_epochs)] if judged else [due],
        at_end=recipe.checkpoint.at_end or judged,
        steps_per_epoch=inputs.plan.steps_per_epoch,
        total_steps=inputs.plan.total_steps,
        num_bytes=saver.background.num_bytes if saver.background else 0,
    )


def _state_to_come(saver: Saver) -> dict[str, Any]:
    """The tensors of a save, also before the optimizer has made its state: that is made, seen, and let go again."""
    fresh = not saver.optimizer.state
    if fresh:
        materialise_state(saver.optimizer)
        if saver.average:
            saver.average.materialise()
    tensors = all_tensors(saver.model, saver.optimizer, left_out=saver.left_out)
    if fresh:
        saver.optimizer.state.clear()
    return tensors


__all__ = ["go_background", "saves_to_come"]
