"""Which curves share a picture, with title and unit, in the order of the page.

Numbers that nobody here knows, such as those of a user's own objective, get a picture of their own. Must not read
files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

_KNOWN = {
    "train/lr": ("Learning rate", ""),
    "train/grad_norm": ("Gradient norm", ""),
    "train/tokens_per_second": ("Tokens per second", ""),
    "train/mfu": ("MFU", "%"),
    "train/memory_gib": ("Memory", "GiB"),
    "train/host_memory_gib": ("Host memory", "GiB"),
    "train/data_wait": ("Data wait and padding", "%"),
    "validation/accuracy": ("Validation accuracy", "%"),
}
_EXACT = ("/lr", "_gib")
"""Numbers without noise: to smooth them would only make them wrong."""
_SHORT = {"lr": "learning rate", "grad_norm": "gradient norm", "mfu": "MFU", "data_wait": "data wait"}
_SHORT |= {"memory_gib": "memory", "host_memory_gib": "host memory"}


def charts(series: Iterable[str]) -> list[dict[str, Any]]:
    """The pictures for series such as `train/loss`, each with its title, unit and the series in it."""
    left = dict.fromkeys(series)
    found = [_take(left, "Loss", "", [name for name in left if name.endswith("loss") and "/" in name])]
    found += [_family(left, name) for name in list(left) if name.startswith("validation/")]
    for name in ("train/lr", "train/grad_norm"):
        found.append(_take(left, *_KNOWN[name], [name]))
    found += [_alone(left, name) for name in list(left) if name.endswith("_per_second")]
    found.append(_take(left, *_KNOWN["train/mfu"], ["train/mfu"]))
    found.append(_take(left, *_KNOWN["train/memory_gib"], _memory(left)))
    found.append(_alone(left, "train/host_memory_gib"))
    found.append(_take(left, *_KNOWN["train/data_wait"], ["train/data_wait", "train/padding"]))
    found += [_alone(left, name) for name in list(left)]
    return [chart for chart in found if chart["series"]]


def _memory(left: Iterable[str]) -> list[str]:
    """What a device holds, as it was and as predicted; the host has a picture of its own."""
    return [name for name in left if name.endswith("_gib") and "host" not in name]


def _take(left: dict[str, None], heading: str, unit: str, names: Sequence[str]) -> dict[str, Any]:
    """A picture of those that are left."""
    held = [name for name in names if name in left]
    for name in held:
        del left[name]
    found = {"title": heading, "unit": unit, "series": {name: _short(name, alone=len(held) == 1) for name in held}}
    return {**found, "exact": bool(held) and all(name.endswith(_EXACT) for name in held)}


def _alone(left: dict[str, None], name: str) -> dict[str, Any]:
    kind, _, number = name.partition("/")
    words = number.replace("_", " ")
    heading = f"Validation {words}" if kind == "validation" else words[:1].upper() + words[1:]
    return _take(left, *_KNOWN.get(name, (heading, "")), [name])


def _family(left: dict[str, None], name: str) -> dict[str, Any]:
    """A number of validation with its variants: recall@10 beside recall@10/64."""
    variants = [other for other in left if other.startswith(f"{name}/")]
    found = _alone(left, name)
    found["series"] |= {other: other.removeprefix("validation/") for other in variants}
    for other in variants:
        del left[other]
    return found


def _short(name: str, *, alone: bool) -> str:
    kind, _, number = name.partition("/")
    words = _SHORT.get(number) or number.replace("_gib", "").replace("_", " ")
    if number == "loss":
        return kind
    return f"validation {words}" if kind == "validation" and not alone else words
