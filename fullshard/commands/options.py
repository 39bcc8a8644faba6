"""Words of the command line that several commands take: one of a few, and settings over those of a recipe.

Must not know what any of them does.
"""

from __future__ import annotations

from collections.abc import Sequence

from fullshard.errors import RecipeError, SetupError


def one_of(option: str, value: str | None, allowed: Sequence[str | None]) -> None:
    """Refuses a value that is none of those allowed; None among them means that the option may be left out."""
    if value not in allowed:
        from fullshard.config.part import did_you_mean

        known = [word for word in allowed if word]
        raise SetupError(f"{option} {value}: allowed are {', '.join(known)}{did_you_mean(str(value), known)}.")


def overrides(target: str, words: Sequence[str], *, command: str, options: Sequence[str]) -> list[str]:
    """The settings that follow what a command is about, each as `key=value`."""
    from fullshard.config.arguments import to_overrides
    from fullshard.recipes.read import Recipe

    if target.startswith("-"):
        raise RecipeError(f"{target} stands where a run is expected. Write: fullshard {command} RUN {target} ...")
    return to_overrides(words, sections=list(Recipe.model_fields), options=options)


__all__ = ["one_of", "overrides"]
