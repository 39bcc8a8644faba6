"""The model that generates: a checkpoint of a run, or a model without one, with its tokenizer and prompt layout.

Must not know prompts, ranks or how a row is continued.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fullshard.checkpoint import folder as files
from fullshard.commands.chosen_run import RESOLVED, choose, is_run
from fullshard.config.part import decode, plain
from fullshard.contracts.data import Encoder
from fullshard.contracts.model import Family, Weights
from fullshard.contracts.objective import Objective
from fullshard.errors import SetupError
from fullshard.evaluate.source import EvaluateOptions, find_target, for_these_ranks
from fullshard.export.source import Values, open_trained
from fullshard.recipes.read import Reading, read
from fullshard.setup.run_inputs import cache_folder, encoder_of
from fullshard.text.tokens import inner_tokenizer


@dataclass(frozen=True)
class GeneratingModel:
    """A model on meta, where its values come from, and how a prompt is laid out for it."""

    name: str
    why: str
    reading: Reading
    family: Family
    processor: Any
    """The tokenizer, or what holds it."""
    module: nn.Module
    values: Weights | None
    chat: bool
    """Trained on conversations; without a run: it has a chat template."""


def find_model(target: str, options: EvaluateOptions, *, nodes: int) -> GeneratingModel:
    """The run or model that RUN|MODEL means."""
    if is_run(target) or Path(target).name in ("best", "last"):

        def here(recipe: dict[str, Any], checkpoint: Path | None) -> Reading:
            return read(_leaner(for_these_ranks(recipe, checkpoint, options, nodes=nodes)))

        chosen = choose(target, options.checkpoint, here=here, best_first=True)
        if chosen.checkpoint is not None:
            return _trained(chosen.checkpoint, chosen.reading, options)
        target = str(chosen.weights)
    # Data is never opened.
    without_data = EvaluateOptions("none", None, None, options.devices, (), options.base, options.trust_remote_code)
    found = find_target(target, without_data, nodes=nodes)
    reading = read({**_leaner(plain(found.reading.recipe)), "data": {"train": "none", "pack": False}})
    recipe = reading.recipe
    _require_tokens(recipe.objective, target)
    recipe.model.prepare((), cache=cache_folder(recipe))
    processor = recipe.model.processor(cache=cache_folder(recipe))
    module, tokenizer = recipe.model.build(processor=processor), inner_tokenizer(processor)
    chat = tokenizer is not None and bool(tokenizer.chat_template)
    return GeneratingModel(target, "its own weights", reading, recipe.model, processor, module, None, chat)


def _trained(checkpoint: Path, reading: Reading, options: EvaluateOptions) -> GeneratingModel:
    recipe = reading.recipe
    _require_tokens(recipe.objective, str(checkpoint))
    trained = open_trained(
        checkpoint, base=options.base, trust_remote_code=options.trust_remote_code, weights=options.weights
    )
    recipe.objective.extend(trained.module)
    step = f"step {files.step_of(checkpoint):,}"
    encoder = _encoder(checkpoint, reading)
    chat = encoder is not None and encoder.conversations
    name, values = str(checkpoint), Values(trained)
    return GeneratingModel(name, step, reading, recipe.model, trained.processor, trained.module, values, chat)


def _encoder(checkpoint: Path, reading: Reading) -> Encoder | None:
    """How the run's records became samples; where the recipe leaves it open, the run has written it down."""
    resolved = checkpoint.parent / RESOLVED
    found = encoder_of(reading.recipe)
    return found if found is not None or not resolved.is_file() else encoder_of(read(resolved).recipe)


def _leaner(recipe: dict[str, Any]) -> dict[str, Any]:
    """The recipe without what only training needs."""
    sharding = {**recipe.get("sharding", {}), "compile": False, "activation_checkpointing": "none"}
    model = plain(decode(Family, recipe["model"], where="model").unpacked())
    return {**recipe, "sharding": sharding, "model": model, "data": {**recipe["data"], "pack": False}}


def _require_tokens(objective: Objective, name: str) -> None:
    if not objective.predicts_tokens:
        raise SetupError(
            f"{name}: its objective is {objective.kind()}, which predicts no tokens, and fullshard generate continues "
            "texts. `fullshard --help` lists the commands for other models."
        )
