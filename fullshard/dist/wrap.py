"""Which modules become FSDP units, decided by structure alone.

A unit's parameters are gathered while it runs. A part of a block that is called while the block is not running would
see sharded parameters, so it becomes its own unit; one forward pass on meta tensors finds these parts. Must not know
any model class, torch.distributed or how units are sharded.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fullshard.config.part import did_you_mean
from fullshard.dist.keep_in_fp32 import exact_modules, timed_modules, within
from fullshard.errors import RecipeError

logger = logging.getLogger(__name__)

SEPARATE_PARAMS = 1_000_000
"""An untied embedding of at least this size is its own unit, so that it is not gathered for the whole forward pass."""


@dataclass(frozen=True)
class WrapPlan:
    """Names of the modules that become units, in forward order; everything else belongs to the root's unit."""

    blocks: list[str]
    """Repeated blocks: sharded, recomputed and compiled one by one."""
    separate: list[str] = field(default_factory=list)
    """Large untied input embeddings."""
    reached: list[str] = field(default_factory=list)
    """Parts of blocks that are called from outside their block."""
    timed: list[str] = field(default_factory=list)
    """Modules that a timestep passes through outside the blocks."""
    exact: list[str] = field(default_factory=list)
    """Modules that compute in fp32 in any precision."""
    inexact: list[str] = field(default_factory=list)
    """Single parameters that the model would keep in fp32, but that are cast with their module."""
    reason: str = ""
    """How the blocks were found; shown in the header."""

    @property
    def units(self) -> list[str]:
        """Every unit but the root's."""
        return [*self.blocks, *self.reached, *self.separate, *self.timed, *self.exact]


def find_blocks(
    module: nn.Module,
    *,
    classes: Sequence[str] | None = None,
    min_params: int | None = None,
    whole: bool = False,
    hints: Collection[str] | None = None,
    rehearse: Callable[[nn.Module], None] | None = None,
) -> WrapPlan:
    """The wrap plan: by class names, by size, one unit for the whole model, or (by default) its repeated blocks.

    `hints` are class names that the model asks not to be split, or the names of the blocks themselves; None collects
    class names from the module tree. `rehearse` runs a forward pass, to see what is called from outside its block.
    """
    exact, inexact = exact_modules(module)
    exact = _without_shared(module, exact)
    if whole:
        return WrapPlan([], exact=exact, inexact=inexact, reason="one unit for the whole model, as requested")
    if classes is not None:
        blocks, reason = _by_class(module, classes), f"by class: {', '.join(classes)}"
    elif min_params is not None:
        blocks, reason = _by_size(module, min_params), f"modules of at least {min_params:,} parameters"
    elif hints and all("." in hint for hint in hints):
        blocks, reason = list(hints), "named by the model family"
    else:
        own = (name for part in module.modules() for name in getattr(part, "_no_split_modules", None) or ())
        blocks, reason = _by_structure(module, set(own if hints is None else hints))
    found, blocks = blocks, _without_shared(module, blocks)
    if dropped := [name for name in found if name not in blocks]:
        reason += (
            f"; {len(dropped)} left in the root unit because they share parameters with it: {', '.join(dropped[:3])}"
        )
    blocks = [name for name in blocks if not within(name, exact)]
    reached = _without_shared(module, reached_from_outside(module, blocks, rehearse) if rehearse else [])
    reached = [name for name in reached if not within(name, exact)]
    timed = _without_shared(module, timed_modules(module, [*blocks, *exact]))
    separate = [name for name in _separate(module, [*blocks, *exact]) if not within(name, timed)]
    return WrapPlan(blocks, separate, reached, timed, exact, inexact, reason)


def tied_groups(module: nn.Module) -> list[list[str]]:
    """Names that share one parameter, two or more in each group."""
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def unit_parameters(module: nn.Module, plan: WrapPlan) -> dict[str, list[str]]:
    """The parameter names of each unit, the root's under ""; a tied parameter appears once."""
    names = plan.units
    units: dict[str, list[str]] = {name: [] for name in (*names, "")}
    for parameter, _ in module.named_parameters():
        units[_owner(parameter, names)].append(parameter)
    return units


def _owner(name: str, units: Collection[str]) -> str:
    """The unit of a parameter: the innermost one, since units may nest when they are named by class or size."""
    return max((unit for unit in units if name.startswith(f"{unit}.")), key=len, default="")


def reached_from_outside(
    module: nn.Module, blocks: Collection[str], rehearse: Callable[[nn.Module], None]
) -> list[str]:
    """Names of the outermost parts within blocks that are called while their block is not running.

    `rehearse` runs one forward pass of a copy on the meta device. If it cannot, nothing is found, and the first real
    forward pass will fail."""
    watched = copy.deepcopy(module).to("meta")
    owners = {name: block for name, _ in watched.named_modules() for block in blocks if name.startswith(f"{block}.")}
    running: list[str] = []
    found: list[str] = []

    def enter(name: str) -> Callable[..., None]:
        def before(part: nn.Module, *_: Any) -> None:
            outside = name in owners and owners[name] not in running and _has_parameters(part)
            if outside and not within(name, found):
                found.append(name)
            running.append(name)

        return before

    def leave(*_: Any) -> None:
        running.pop()

    for name, part in watched.named_modules():
        part.register_forward_pre_hook(enter(name))
        part.register_forward_hook(leave, always_call=True)
    try:
        rehearse(watched)
    except Exception as error:  # a model that reads values cannot run on meta
        logger.info(
            "parts called from outside their block could not be found, the forward pass on meta failed: %s", error
        )
        return []
    return found


def _by_structure(module: nn.Module, hints: set[str]) -> tuple[list[str], str]:
    """Every outermost stack of blocks, one or more per tower."""
    stacks = _stacks(module, nn.ModuleList, hints) or _stacks(module, nn.Sequential, hints)
    blocks = [name for names in stacks.values() for name in names]
    if not blocks:
        raise RecipeError(
            f"sharding.wrap: {type(module).__name__} has no repeated blocks to wrap. "
            f"Name classes in sharding.wrap.classes ({', '.join(_composite_classes(module)[:6])}), "
            "set sharding.wrap.min_params, or sharding.wrap.whole: true."
        )
    parts = []
    for stack, names in stacks.items():
        classes = dict.fromkeys(type(module.get_submodule(name)).__name__ for name in names)
        parts.append(f"{len(names)} x {'/'.join(classes)} in {stack or 'root'}")
    return blocks, "; ".join(parts)


def _stacks(module: nn.Module, container: type[nn.Module], hints: set[str]) -> dict[str, list[str]]:
    """Stack name -> block names. A list is a stack when it holds a hinted class or repeats one composite class."""
    stacks: dict[str, list[str]] = {}
    for name, part in module.named_modules():
        inside = any(name.startswith(block + ".") for blocks in stacks.values() for block in blocks)
        if inside or not isinstance(part, container):
            continue
        children = [(key, child) for key, child in part.named_children() if _has_parameters(child)]
        classes = Counter(type(child).__name__ for _, child in children if _is_composite(child))
        if set(classes) & hints or max(classes.values(), default=0) > 1:
            prefix = f"{name}." if name else ""
            stacks[name] = [f"{prefix}{key}" for key, child in children if _is_composite(child)]
    return stacks


def _by_class(module: nn.Module, classes: Sequence[str]) -> list[str]:
    known = {type(part).__name__ for name, part in module.named_modules() if name}
    for wanted in classes:
        if wanted not in known:
            raise RecipeError(
                f"sharding.wrap.classes: {type(module).__name__} has no module of class {wanted!r}"
                f"{did_you_mean(wanted, sorted(known))}. Candidates: {', '.join(_composite_classes(module))}."
            )
    return [name for name, part in module.named_modules() if name and type(part).__name__ in classes]


def _by_size(module: nn.Module, min_params: int) -> list[str]:
    """Innermost modules first: a module counts what its wrapped children have not taken."""
    wrapped: list[str] = []

    def left_over(part: nn.Module, name: str) -> int:
        count = sum(p.numel() for p in part.parameters(recurse=False))
        for key, child in part.named_children():
            count += left_over(child, f"{name}.{key}" if name else key)
        # Containers have no forward, so nothing would gather their parameters.
        if name and count >= min_params and not isinstance(part, (nn.ModuleList, nn.ModuleDict)):
            wrapped.append(name)
            return 0
        return count

    left_over(module, "")
    if not wrapped:
        total = sum(p.numel() for p in module.parameters())
        raise RecipeError(
            f"sharding.wrap.min_params = {min_params:,}: no module below {type(module).__name__} "
            f"({total:,} parameters) is that large. Lower it, leave it out, or set sharding.wrap.whole: true."
        )
    order = {name: index for index, (name, _) in enumerate(module.named_modules())}
    return sorted((name for name in wrapped if name in order), key=order.__getitem__)


def _without_shared(module: nn.Module, blocks: list[str]) -> list[str]:
    """Drops blocks with one end of a tie: FSDP needs a shared parameter in one unit."""
    groups = tied_groups(module)
    while True:
        owners = [{_owner(name, blocks) for name in group} for group in groups]
        split = {owner for found in owners if len(found) > 1 for owner in found if owner}
        if not split:
            return blocks
        # Without a block, its parameters go to the enclosing one, which may hold only one end as well.
        blocks = [block for block in blocks if block not in split]


def _separate(module: nn.Module, blocks: list[str]) -> list[str]:
    tied = {name for group in tied_groups(module) for name in group}
    return [
        name
        for name, part in module.named_modules()
        if isinstance(part, nn.Embedding)
        and name
        and part.weight.numel() >= SEPARATE_PARAMS
        and f"{name}.weight" not in tied
        and not within(name, blocks)
    ]


def _has_parameters(part: nn.Module) -> bool:
    return next(part.parameters(), None) is not None


def _is_composite(part: nn.Module) -> bool:
    return next(part.children(), None) is not None and not isinstance(part, (nn.ModuleList, nn.ModuleDict))


def _composite_classes(module: nn.Module) -> list[str]:
    """Class names of modules with children, the most repeated first."""
    counts = Counter(type(part).__name__ for name, part in module.named_modules() if name and _is_composite(part))
    return [name for name, _ in counts.most_common()]
