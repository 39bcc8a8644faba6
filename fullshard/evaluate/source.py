"""What is evaluated, as a recipe: a run's, on its own or on other validation data, or one made for a model.

Must not know ranks, weights or numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from fullshard.checkpoint import folder as files
from fullshard.checkpoint import paths
from fullshard.commands.chosen_run import Here, choose, is_run
from fullshard.config.part import kinds, part_class, plain
from fullshard.contracts.model import Family
from fullshard.errors import CheckpointError, SetupError
from fullshard.faults.micro_batch import USUAL, usual
from fullshard.formatting.yaml_text import parse_value
from fullshard.recipes.read import Reading, read


@dataclass(frozen=True)
class EvaluateOptions:
    """The options of the command."""

    data: str | None
    checkpoint: str | None
    weights: str | None
    devices: str | None
    settings: Sequence[str]
    base: str | None
    trust_remote_code: bool


@dataclass(frozen=True)
class EvaluationTarget:
    """What is evaluated."""

    name: str
    """The checkpoint, or the model."""
    reading: Reading
    checkpoint: Path | None
    """None: the model's own weights."""
    why: str
    """Which weights these are, for the header: `step 300, the best`."""

    @property
    def step(self) -> int | None:
        return files.step_of(self.checkpoint) if self.checkpoint else None


def find_target(target: str, options: EvaluateOptions, *, nodes: int) -> EvaluationTarget:
    """The run or model that RUN|MODEL means."""
    if is_run(target) or Path(target).name in ("best", "last"):
        return _run(target, options, nodes=nodes)
    if (option := "--checkpoint" if options.checkpoint else "--weights" if options.weights else None) is not None:
        raise SetupError(f"{option} chooses among what a run has saved, and {target} is not a run. Leave it out.")
    return _model(target, options, nodes=nodes)


def _run(target: str, options: EvaluateOptions, *, nodes: int) -> EvaluationTarget:
    chosen = choose(target, options.checkpoint, here=_as_it_was(options, nodes=nodes), best_first=True)
    if chosen.checkpoint is None:
        raise CheckpointError(
            f"RUN = {target} has no checkpoint. Evaluate the model it has exported: "
            f"fullshard evaluate {chosen.run / 'model'} --data FILE"
        )
    best = files.pointed(chosen.checkpoint.parent, "best")
    is_best = best is not None and best.name == chosen.checkpoint.name
    why = f"step {files.step_of(chosen.checkpoint):,}{', the best' if is_best else ''}"
    return EvaluationTarget(str(chosen.checkpoint), chosen.reading, chosen.checkpoint, why)


def for_these_ranks(
    recipe: dict[str, Any], checkpoint: Path | None, options: EvaluateOptions, *, nodes: int
) -> dict[str, Any]:
    """A run's recipe for as many ranks of this machine as it had, unless others are asked for."""
    from fullshard.export.source import model_settings

    topology = {**recipe.get("topology", {}), "nodes": nodes}
    topology |= {"devices": options.devices} if options.devices is not None else {}
    sharding = dict(recipe.get("sharding", {}))
    if sharding.get("strategy") == "hybrid" and nodes == 1:
        sharding["strategy"] = "auto"
    model = recipe["model"]
    if checkpoint is not None:
        model = model_settings(checkpoint, files.read_state(checkpoint), options.base, options.trust_remote_code)
    return {**recipe, "topology": topology, "sharding": sharding, "model": model}


def _as_it_was(options: EvaluateOptions, *, nodes: int) -> Here:
    """The run's recipe as it was trained."""

    def here(recipe: dict[str, Any], checkpoint: Path | None) -> Reading:
        recipe = for_these_ranks(recipe, checkpoint, options, nodes=nodes)
        # Nothing is trained, so any batch will do; two passes, so that a step has more than one sample.
        batch = {"per_device": usual(recipe.get("batch", {}).get("per_device", USUAL), USUAL), "accumulate": 2}
        recipe = {key: value for key, value in recipe.items() if key not in ("schedule", "duration")} | {"batch": batch}
        reading = read(recipe, *options.settings)
        if options.data is None:
            return reading
        return read(_on_other_data(recipe, reading, data_of(options.data), checkpoint), *options.settings)

    return here


def _on_other_data(recipe: dict[str, Any], reading: Reading, data: Any, checkpoint: Path | None) -> dict[str, Any]:
    """The recipe with `data` for validation. It replaces the training data, too, which need not be there, unless
    samples are scaled by what was measured on it."""
    from fullshard.setup.run_inputs import encoder_of

    encoder = encoder_of(reading.recipe)
    changed = {**recipe, "data": {**recipe["data"], "validation": data}}
    if encoder is not None and encoder.needs_training_data:
        return changed
    changed["data"]["train"] = data
    folder = checkpoint / files.PROCESSOR if checkpoint else None
    if folder is not None and paths.exists(folder):
        changed["model"] = plain(reading.recipe.model.with_processor(folder))
    return changed


def _model(target: str, options: EvaluateOptions, *, nodes: int) -> EvaluationTarget:
    """A model without a run: its family says what else a recipe for it needs."""
    from fullshard.hf.hub import fetch

    folder = fetch(target, revision=None, code=options.trust_remote_code, weights=False, where="MODEL")
    families = [cast(type[Family], part_class(Family, kind, where="model")) for kind in kinds(Family)]
    fitting = [family for family in families if family.recognises(folder)]
    if not fitting:
        raise SetupError(
            f"{target} is neither a run (it has no checkpoint) nor a model (it has no config.json). Name a run folder, "
            "one of its checkpoints, the folder of a model or a hub name."
        )
    if fitting[0].usual is None:
        raise SetupError(
            f"MODEL = {target} is of kind {fitting[0].kind()}, which only the recipe of its run says how to evaluate. "
            "Name the run."
        )
    if options.data is None:
        raise SetupError(f"MODEL = {target} has no validation data of its own. Give it: --data FILE.")
    data = data_of(options.data)
    model = {
        "kind": fitting[0].kind(),
        "path": target,
        "base": options.base,
        "trust_remote_code": options.trust_remote_code,
    }
    recipe = {
        "name": "evaluate",
        "model": {key: value for key, value in model.items() if value},
        "data": {"train": data, "validation": data},
        "topology": {"devices": options.devices or "auto", "nodes": nodes},
        "checkpoint": {"best": None},
        **fitting[0].usual,
    }
    recipe["precision"] = _stored_precision(read(recipe, *options.settings))
    return EvaluationTarget(target, read(recipe, *options.settings), None, "its own weights")


def _stored_precision(reading: Reading) -> str:
    """The precision that the model was saved in, as other libraries load it."""
    from fullshard.hf.weights.safetensors_folder import stored_dtype
    from fullshard.setup.run_inputs import cache_folder

    family = reading.recipe.model
    family.prepare((), cache=cache_folder(reading.recipe))
    folder = family.stored_in()
    words = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}
    return words.get(str(stored_dtype(folder)), "auto") if folder is not None else "auto"


def data_of(text: str) -> Any:
    """What `--data` means, as `data.validation` would take it."""
    return parse_value(text, where="--data") if text.lstrip()[:1] in ("[", "{") else text
