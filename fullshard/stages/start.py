"""What a stage starts from: the folder it runs in, the checkpoint of an earlier stage, that stage's tokenizer.

Works on the merged settings of a stage, before they are checked. Must not read files: the earlier stage need not have
run yet.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fullshard.checkpoint.settings import Start
from fullshard.config.merge import Settings
from fullshard.config.part import class_of, decode, did_you_mean, plain
from fullshard.config.section import keys_of
from fullshard.contracts.model import Family
from fullshard.errors import RecipeError
from fullshard.recipe import Recipe

PROCESSOR = "processor"


def begin(
    stage: Settings, base: Mapping[str, Any], name: str, *, before: Sequence[str], others: Sequence[str]
) -> dict[str, Any]:
    """The settings of a stage as a recipe of its own: in its folder, and from where an earlier stage ended. `others`
    are the stages that it cannot start from: itself and later ones."""
    folders = _inside(base, stage.values)
    values = {**stage.values, **folders, "name": name}
    if not values.get("start", True) and _own(stage, name, "start"):  # `start: null`: the model's own weights
        return {key: value for key, value in values.items() if key != "start"}
    start = dict(values.get("start") or {})
    if not _own(stage, name, "start.from"):
        start["from"] = before[-1] if before else start.get("from")
    if start["from"] is None:
        return {key: value for key, value in values.items() if key != "start"}
    if start["from"] in before:
        start["from"] = f"{folders['checkpoint'].get('store') or folders['output']}/{start['from']}"
    elif start["from"] in others:
        earlier = f"Earlier stages: {', '.join(before)}." if before else "It is the first one."
        raise RecipeError(f"start.from = {start['from']!r} does not come before this stage. {earlier}")
    elif before and not any(mark in str(start["from"]) for mark in ("/", "~")):
        near = did_you_mean(str(start["from"]), before)
        raise RecipeError(f"start.from = {start['from']!r} is no earlier stage{near}: {', '.join(before)}.")
    values["start"] = start
    return {**values, "model": _model(stage, values, name, decode(Start, start, where="start"))}


def _inside(base: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The folder of the run as the one that holds the stages, and the same in a remote store."""
    name, output = base.get("name", "run"), str(base.get("output", "runs")).rstrip("/")
    checkpoint = dict(values.get("checkpoint") or {})
    store = checkpoint.get("store")
    if "://" in output:
        store, output = output, "runs"
    more = {"store": f"{str(store).rstrip('/')}/{name}"} if store else {}
    return {"output": f"{output}/{name}", "checkpoint": {**checkpoint, **more}}


def _own(stage: Settings, name: str, key: str) -> bool:
    """Whether a setting is the stage's own, not one that all stages have."""
    layers = [o for path, o in stage.origins.items() if path == key or path.startswith(f"{key}.")]
    return any(f"stages.{name}" in layer for layer in layers)


def _model(stage: Settings, values: Mapping[str, Any], name: str, start: Start) -> Any:
    """The model with the weights and the tokenizer of the earlier stage, unless the stage names its own."""
    model = values.get("model")
    if not isinstance(model, Mapping) or not starts_itself(model) or _own(stage, name, "model.from"):
        return model
    if not model.get("path") and not model.get("architecture"):
        # `from` alone defines the model: here it names weights of the same structure.
        model = plain(decode(Family, model, where="model"))
    changes: dict[str, Any] = {"from": checkpoint_of(start)}
    if (model.get("tokenizer") or {}).get("train") and not _own(stage, name, "model.tokenizer"):
        remote = "://" in checkpoint_of(start)
        place = f"{values['output']}/{start.source.rpartition('/')[2]}/model" if remote and start.source else None
        changes["tokenizer"] = {"path": place or f"{checkpoint_of(start)}/{PROCESSOR}"}
    return {**model, **changes}


def checkpoint_of(start: Start) -> str:
    """The checkpoint that a start names: its folder, or a pointer to it."""
    source = str(start.source).rstrip("/")
    named = re.fullmatch(r"best|last|checkpoint-\d+", source.rpartition("/")[2])
    return source if named else f"{source}/{start.weights}"


def place_of(recipe: Recipe) -> str:
    """Where the checkpoints of a stage are, as `start.from` has it."""
    return f"{recipe.checkpoint.store or recipe.output}/{recipe.name}"


def starts_itself(model: Mapping[str, Any]) -> bool:
    """Whether a family reads the weights of a checkpoint itself: it has the key `from`."""
    return "from" in keys_of(class_of(Family, model))


def check_start(recipe: Recipe, name: str, *, before: Mapping[str, Recipe | None]) -> None:
    """Raises if the earlier stage will not leave what this one starts from; `before` are the earlier stages."""
    start = recipe.start
    earlier = before.get(str(start.source).rpartition("/")[2]) if start else None
    if start is None or earlier is None or place_of(earlier) != start.source:
        return
    where = f"stages.{earlier.name}.checkpoint"
    if not earlier.checkpoint.at_end:
        raise RecipeError(f"{where}.at_end = false: {name} starts from its last checkpoint. Leave it out.")
    if start.weights == "best" and earlier.checkpoint.best is None:
        raise RecipeError(
            f"stages.{name}.start.weights = best: {where}.best is null, so {earlier.name} keeps no best checkpoint. "
            "Set it, or use weights: last."
        )
    _check_adapters(recipe, earlier)
    kinds = earlier.optimizer.kind(), recipe.optimizer.kind()
    if start.optimizer == "carry" and kinds[0] != kinds[1]:
        raise RecipeError(
            f"stages.{name}.start.optimizer = carry: {earlier.name} trains with {kinds[0]}, {name} with {kinds[1]}, "
            "and state of one does not fit the other. Use optimizer: fresh, or the same kind."
        )


def _check_adapters(recipe: Recipe, earlier: Recipe) -> None:
    """Raises if the earlier stage leaves adapters that this one has no place for."""
    theirs, own = (plain(each.model).get("lora") for each in (earlier, recipe))
    where = f"stages.{recipe.name}.model.lora"
    if theirs and not own:
        merged = f"fullshard export {place_of(earlier)} merged --as merged"
        raise RecipeError(
            f"{where} = null: {earlier.name} trains adapters, and {recipe.name} starts from them. Give it the same "
            f"model.lora, or another start. To train all weights after LoRA, merge the adapters ({merged}) and train "
            "the merged model with a recipe of its own (model.path: merged)."
        )
    if theirs and own and theirs["r"] != own["r"]:
        raise RecipeError(
            f"{where}.r = {own['r']}: {recipe.name} starts from the adapters of {earlier.name}, which have r = "
            f"{theirs['r']}. Use the same r, or another start."
        )
