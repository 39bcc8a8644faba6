"""Towers: the language model, the encoder of each medium and the projector between them, found by structure.

A tower is the outermost module built from a part of the config (`vision_config`: the tower `vision`). The projector is
everything outside the towers. If nothing is outside, it is the part of a tower after its blocks whose output is as wide
as the language model. Must not know model names, data or ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from fullshard.config.part import Section, did_you_mean
from fullshard.contracts.optimizer import Group
from fullshard.errors import RecipeError

if TYPE_CHECKING:
    from torch import nn

LANGUAGE, PROJECTOR = "language", "projector"


class Tower(Section):
    """Settings of one tower."""

    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = (("freeze", "lora"), ("freeze", "lr"))

    freeze: bool = False
    """Do not train it."""
    lora: bool | None = None
    """Whether model.lora puts adapters into it; null: only into the language model."""
    lr: float | None = Field(None, gt=0)
    """Its base learning rate, which the schedule multiplies as well; null: optimizer.lr."""
    recompute: Literal["none", "selective", "full"] | None = None
    """Activation checkpointing of its blocks; null: sharding.activation_checkpointing."""


def find(module: nn.Module) -> dict[str, list[str]]:
    """The names of each tower's modules. A module inside two towers belongs to the inner one."""
    model: Any = module
    text = model.config.get_text_config(decoder=True)
    parts = {name.removesuffix("_config"): getattr(model.config, name) for name in model.config.sub_configs}
    kinds = {part.model_type: name for name, part in parts.items() if part is not None and part is not text}
    kinds[text.model_type] = LANGUAGE
    found: dict[str, list[str]] = {}
    for name, part in module.named_modules():
        config = getattr(part, "config", None)
        kind = kinds.get(getattr(config, "model_type", ""))
        # Some language models hold the encoders of other media.
        outer = [n for k, names in found.items() if k != LANGUAGE or kind == LANGUAGE for n in names]
        if name and kind and not _within(name, outer):
            found.setdefault(kind, []).append(name)
    head = next((name for name, part in module.named_modules() if part is model.get_output_embeddings()), None)
    if head and not _within(head, found.get(LANGUAGE, [])):
        found.setdefault(LANGUAGE, []).append(head)
    taken = [name for names in found.values() for name in names]
    rest = [name for name, part in _outermost(module, taken) if any(True for _ in part.parameters())]
    rest += [name for name, _ in module.named_parameters() if not _within(name, [*taken, *rest])]
    encoders = [name for kind, names in found.items() if kind != LANGUAGE for name in names]
    rest += [name for language in found.get(LANGUAGE, []) for name in _beside(module, encoders, language)]
    inner = [n for encoder in encoders for n in _after_blocks(module, encoder, text.hidden_size)]
    if projector := rest or inner:
        found[PROJECTOR] = projector
    return dict(sorted(found.items(), key=lambda item: (item[0] != LANGUAGE, item[0])))


def tower_of(name: str, towers: Mapping[str, list[str]]) -> str | None:
    """The tower that a parameter belongs to."""
    holders = [(len(prefix), kind) for kind, names in towers.items() for prefix in names if _within(name, [prefix])]
    return max(holders)[1] if holders else None


def check_names(settings: Mapping[str, Tower], towers: Mapping[str, list[str]], *, model: str) -> None:
    """Raises for a tower that the model does not have."""
    for name in settings:
        if name not in towers:
            raise RecipeError(
                f"model.towers.{name}: {model} has no such tower{did_you_mean(name, list(towers))}. It has: "
                f"{', '.join(towers)}."
            )


def check_blocks(module: nn.Module, settings: Mapping[str, Tower], towers: Mapping[str, list[str]]) -> None:
    """Raises for a tower without blocks whose activations are to be recomputed."""
    asked = {kind: tower.recompute for kind, tower in settings.items() if tower.recompute is not None}
    if not asked:
        return
    from fullshard.dist.wrap import find_blocks

    having = {tower_of(block, towers) for block in find_blocks(module).blocks}
    for kind, recompute in asked.items():
        if kind not in having:
            raise RecipeError(
                f"model.towers.{kind}.recompute = {recompute}: {kind} has no blocks, and only the activations of "
                f"blocks can be recomputed. Leave it out. Blocks are in: {', '.join(t for t in towers if t in having)}."
            )


def check_rates(module: nn.Module, settings: Mapping[str, Tower], towers: Mapping[str, list[str]]) -> None:
    """Raises for a tower that has a learning rate, and nothing that is trained with it."""
    trained = {tower_of(name, towers) for name, parameter in module.named_parameters() if parameter.requires_grad}
    for kind, tower in settings.items():
        if tower.lr is not None and kind not in trained:
            raise RecipeError(
                f"model.towers.{kind}.lr = {tower.lr:g}: nothing in {kind} is trained. With model.lora set "
                f"model.towers.{kind}.lora: true, or leave lr out."
            )


def freeze(module: nn.Module, settings: Mapping[str, Tower], towers: Mapping[str, list[str]]) -> None:
    """Freezes the towers with `freeze: true`."""
    for name, parameter in module.named_parameters():
        tower = settings.get(tower_of(name, towers) or "")
        if tower is not None and tower.freeze:
            parameter.requires_grad_(False)


def groups(settings: Mapping[str, Tower], towers: Mapping[str, list[str]]) -> list[Group]:
    """Parameter groups for towers that set a learning rate or recomputation, inner modules first."""
    own = {
        kind: {k: v for k in ("lr", "recompute") if (v := getattr(tower, k)) is not None}
        for kind, tower in settings.items()
    }
    # A tower inside another is a group as well, or it would take the outer one's.
    outer = [name for kind, values in own.items() if values for name in towers[kind]]
    inside = [kind for kind, names in towers.items() if any(_within(n, outer) and n not in outer for n in names)]
    found = [
        (max(name.count(".") for name in towers[kind]), Group(match=_patterns(towers[kind]), **own.get(kind, {})))
        for kind in dict.fromkeys([*own, *inside])
        if own.get(kind) or kind in inside
    ]
    return [group for _, group in sorted(found, key=lambda pair: -pair[0])]


def _patterns(names: list[str]) -> list[str]:
    # A parameter of the model itself is in no submodule.
    return [pattern for name in names for pattern in (f"{name}.*", name)]


def without_adapters(settings: Mapping[str, Tower], towers: Mapping[str, list[str]]) -> list[str]:
    """The modules that get no adapters."""

    def adapts(kind: str) -> bool:
        asked = settings[kind].lora if kind in settings else None
        return kind == LANGUAGE if asked is None else asked

    return [name for kind, names in towers.items() if not adapts(kind) for name in names]


def _outermost(module: nn.Module, taken: list[str], prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The largest modules that do not contain a taken one."""
    for key, child in module.named_children():
        name = f"{prefix}{key}"
        if _within(name, taken):
            continue
        if any(other.startswith(f"{name}.") for other in taken):
            yield from _outermost(child, taken, f"{name}.")
        else:
            yield name, child


def _beside(module: nn.Module, encoders: list[str], language: str) -> Iterator[str]:
    """What a language model holds together with encoders: in the same child of its own."""
    inside = [name for name in encoders if _within(name, [language])]
    children = dict.fromkeys(".".join(name.split(".")[: language.count(".") + 2]) for name in inside)
    for child in (name for name in children if name not in inside):
        part = module.get_submodule(child)
        found = [name for name, other in _outermost(part, inside, f"{child}.") if any(True for _ in other.parameters())]
        names = (f"{child}.{name}" for name, _ in part.named_parameters())
        yield from [*found, *(name for name in names if not _within(name, [*inside, *found]))]


def _after_blocks(module: nn.Module, encoder: str, width: int) -> list[str]:
    """The children of an encoder after its stack of blocks that end in the width of the language model."""
    from torch import nn

    children = list(module.get_submodule(encoder).named_children())
    stack = next(
        (at for at, (_, child) in enumerate(children) if isinstance(child, nn.ModuleList) and len(child)), None
    )
    after = children[stack + 1 :] if stack is not None else []
    return [f"{encoder}.{key}" for key, child in after if _last_width(child) == width]


def _last_width(part: nn.Module) -> int | None:
    from torch import nn

    layers = [layer for layer in part.modules() if isinstance(layer, nn.Linear)]
    return layers[-1].out_features if layers else None


def _within(name: str, holders: list[str]) -> bool:
    return any(name == holder or name.startswith(f"{holder}.") for holder in holders)


__all__ = [
    "Tower",
    "check_blocks",
    "check_names",
    "check_rates",
    "find",
    "freeze",
    "groups",
    "tower_of",
    "without_adapters",
]
