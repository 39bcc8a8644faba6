"""The run header: what is true of the run, as realised. Must not decide anything."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from fullshard.build import Built
from fullshard.dist.recompute import of_block
from fullshard.dist.world import World
from fullshard.ground import Ground
from fullshard.plural import counted
from fullshard.recipe import Recipe


def header_rows(
    recipe: Recipe, ground: Ground, world: World, built: Built, checkpoint: Path | None
) -> list[tuple[str, str]]:
    """Label and fact, in reading order."""
    rows = [
        ("world", world.describe()),
        ("sharding", built.model.plan.layout.describe()),
        ("units", _units(built)),
        ("precision", built.precision.describe()),
        *_kept_in_fp32(built),
        ("attention", built.model.kernels),
        ("compile", "each block" if built.model.plan.compile else "off"),
        ("recompute", _recompute(built)),
    ]
    for line in [*ground.data.report, *ground.plan.describe()]:
        label, _, text = line.partition(": ")
        rows.append((label, text) if text else ("data", line))
    rows.append(("optimizer", _optimizer(recipe)))
    if recipe.ema:
        rows.append(("ema", recipe.ema.describe()))
    rows.append(("checkpoints", _checkpoints(recipe, built)))
    if built.parts.best and (warning := built.parts.best.warning()):
        rows.append(("warning", " ".join(warning)))
    rows += [("proven", proof) for proof in built.proofs]
    if checkpoint is not None:
        rows.append(("resumed", f"{checkpoint} at step {built.parts.progress.step}"))
    rows.append(("run folder", str(recipe.folder)))
    return rows


def _units(built: Built) -> str:
    classes = Counter(unit.class_name for unit in built.model.units)
    ties = sum(len(unit.tied) for unit in built.model.units)
    tied = f"; {ties} tied {'group' if ties == 1 else 'groups'}" if ties else ""
    return (
        ", ".join(f"{count} x {name}" for name, count in classes.items()) + f" ({built.model.plan.wrap.reason}{tied})"
    )


def _recompute(built: Built) -> str:
    plan = built.model.plan
    asked = plan.activation_checkpointing
    whole = sum(of_block(block, asked, plan.wrap.units) != asked for block in plan.wrap.blocks)
    rest = f", full in {counted(whole, 'block')} that hold units of their own" if whole else ""
    return f"activation checkpointing {asked}{rest}"


def _kept_in_fp32(built: Built) -> list[tuple[str, str]]:
    """What a half precision leaves alone, and what it could not."""
    wrap, word = built.model.plan.wrap, built.precision.word
    lines = []
    if wrap.exact and word != "fp32":
        lines.append(
            f"{counted(len(wrap.exact), 'unit')} (routers, the model's own list): {', '.join(wrap.exact[:2])} ..."
        )
    if wrap.inexact and word != "fp32":
        lines.append(
            f"not {counted(len(wrap.inexact), 'single parameter')} of the model's own list, which compute in {word} "
            f"with the module around them: {', '.join(wrap.inexact[:2])} ..."
        )
    return [("in fp32", line) for line in lines]


def _optimizer(recipe: Recipe) -> str:
    optimizer, schedule = recipe.optimizer, recipe.schedule
    clip = f"clipped at norm {optimizer.clip:g}" if optimizer.clip else "not clipped"
    warmup = f", warm-up {schedule.warmup:g}" if schedule.warmup else ""
    return f"{optimizer.kind()}, lr {optimizer.lr:g}, {schedule.kind()} schedule{warmup}, gradients {clip}"


def _checkpoints(recipe: Recipe, built: Built) -> str:
    policy = recipe.checkpoint
    every = [f"every {policy.every_steps} steps"] if policy.every_steps else []
    every += (
        [f"every {'epoch' if policy.every_epochs == 1 else f'{policy.every_epochs} epochs'}"]
        if policy.every_epochs
        else []
    )
    every += [f"every {policy.every_minutes:g} minutes"] if policy.every_minutes else []
    keep = f"keep {policy.keep}" if policy.keep else "keep all"
    best = f", best by {built.parts.best.describe()}" if built.parts.best else ""
    how = f"{policy.format}, {'in the background' if built.saver.background else 'training waits for each'}"
    where = f", in {built.saver.target.run}" if policy.store else ""
    return f"{' and '.join(every) or 'at the end'}, {how}, {keep}{best}{where}"
