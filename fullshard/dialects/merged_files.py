"""Several files of other trainers as one recipe: what is trained, and how ranks start and shard.

A launcher's file fills in what the training file leaves open; its ranks are in force, as under that launcher. Must not
know the recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fullshard.dialects.files import translated
from fullshard.dialects.readers import EXCLUSIVE
from fullshard.dialects.rows import Settings, nested
from fullshard.dialects.translate import Translation, wins
from fullshard.errors import RecipeError
from fullshard.formatting.yaml_text import shown


@dataclass(frozen=True)
class Merged:
    """The files, each in our words, and their settings together."""

    translations: tuple[Translation, ...]
    settings: Settings

    @property
    def is_whole(self) -> bool:
        """Whether they say what is trained on what."""
        tops = {key.partition(".")[0] for key in self.settings}
        return {"model", "data"} <= tops and any(key.startswith("data.train") for key in self.settings)


def read(paths: Sequence[str]) -> Merged:
    """Recognises and translates each file, and merges them."""
    found = [_recognised(path) for path in paths]
    settings: Settings = {}
    source: dict[str, str] = {}
    left_out = [key for done in found if not done.dialect.launches for key in done.left_out]
    for done in sorted(found, key=lambda each: each.dialect.launches):
        for key, value in done.settings.items():
            if key in settings and settings[key] != value and not done.dialect.launches:
                raise RecipeError(
                    f"{source[key]} and {done.name} both set {key}: {shown(settings[key])} and {shown(value)}. "
                    "Keep one "
                    "of them."
                )
            if wins(key, left_out if done.dialect.launches else ()) or not _taken(key, settings):
                settings[key], source[key] = value, done.name
    return Merged(tuple(found), settings)


def _recognised(path: str) -> Translation:
    done = translated(path)
    if done is None:
        from fullshard.dialects.tables import dialects

        known = ", ".join(dialect.name for dialect in dialects().values() if dialect.marks)
        raise RecipeError(
            f"{path} is not a file of a trainer that fullshard knows: {known}. If it is a recipe of fullshard, "
            "train it "
            f"as it is: fullshard train {path}"
        )
    return done


def _taken(key: str, settings: Settings) -> bool:
    others = [other for group in EXCLUSIVE if key in group for other in group]
    return any(other in settings for other in (key, *others))


def checked(found: Merged, check: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """The settings as a recipe, checked as far as they go."""
    values = nested(found.settings)
    whole = dict(values)
    if not found.is_whole:  # what is missing, for the check only
        whole["model"] = {"architecture": "qwen3", "size": "tiny", **_mapping(values.get("model"))}
        whole["data"] = {"train": "data", **_mapping(values.get("data"))}
        if {"path", "from"} & set(whole["model"]):
            whole["model"] = values["model"]
    check(whole)
    return values


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {"path": value} if value else {}


def next_step(found: Merged, recipe: str) -> str:
    """What to do with the recipe."""
    refused = sum(len(done.refused) for done in found.translations)
    left = f" {refused} refused, see its comments." if refused else ""
    if found.is_whole:
        return f"Written to {recipe}.{left} Check it with: fullshard check {recipe}"
    missing = [key for key in ("model", "data.train") if not any(k.startswith(key) for k in found.settings)]
    return (
        f"Written to {recipe}.{left} It names no {' and no '.join(missing)}: add them, or give it beside a recipe: "
        f"put it into presets/ and use --preset."
    )
