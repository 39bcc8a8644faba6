"""Messages about the shapes of images and latents.

Must not know files, records or models.
"""

from __future__ import annotations

from collections.abc import Sequence

RESIZE = "Set data.encode.size to make the images alike, or remove the record."


def by(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def in_words(shape: Sequence[int], is_latent: bool) -> str:
    return f"{'a latent' if is_latent else 'an image'} of {by(shape)} (channels x height x width)"


def remedy(form: tuple[tuple[int, ...], bool], wanted: tuple[tuple[int, ...], bool]) -> str:
    """How to fix a sample whose shape differs from the others."""
    (shape, is_latent), (first, _) = form, wanted
    if is_latent or wanted[1]:
        return "Make all latents in one way, or remove the record."
    changed = {"data.encode.channels": shape[0] != first[0], "data.encode.size": shape[1:] != first[1:]}
    settings = " and ".join(key for key, differs in changed.items() if differs)
    return f"Set {settings} to make them alike, or remove the record."
