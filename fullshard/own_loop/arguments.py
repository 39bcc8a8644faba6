"""Checks what a loop of your own passes to `fullshard.shard`, `save`, `load` and `clip_grad_norm`.

A wrong type is refused in words, on every rank alike, before anything is changed. Must not know what is done with it.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fullshard.errors import RecipeError, SetupError


def whole_number(value: Any, where: str, *, least: int | None = None) -> int:
    """An int, or what counts as one in Python: a NumPy integer, a tensor with one."""
    try:
        number = operator.index(value)
    except (TypeError, ValueError):
        raise SetupError(f"{where} = {value!r}; it must be a whole number.") from None
    if isinstance(value, bool):
        raise SetupError(f"{where} = {value!r}; it must be a whole number.")
    if least is not None and number < least:
        raise SetupError(f"{where} = {number}; it must be at least {least}.")
    return number


def require_norm(value: Any) -> None:
    """Raises unless gradients can be clipped at it; a negative norm would turn them around."""
    try:
        fits = float(value) > 0 and not isinstance(value, str)
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise SetupError(f"fullshard.clip_grad_norm: max_norm = {value!r}; it must be a number above 0, such as 1.0.")


def require_saved(folder: Any, model: Any, optimizer: Any, *, caller: str) -> None:
    """Raises unless these are a folder, a module and an optimizer."""
    if not isinstance(folder, str | os.PathLike) and not hasattr(folder, "fs"):
        raise SetupError(f"fullshard.{caller}: the folder is {folder!r}. Give a path, such as 'runs/mine', or a URL.")
    if folder == "":
        raise SetupError(f"fullshard.{caller}: the folder is empty text. Give a path, such as 'runs/mine', or a URL.")
    if not hasattr(folder, "fs") and os.path.exists(folder) and not os.path.isdir(folder):
        raise SetupError(f"fullshard.{caller}: {folder} is a file, and checkpoints go into a folder. Name another one.")
    if not isinstance(model, nn.Module):
        raise SetupError(f"fullshard.{caller}: model = {_short(model)}; it must be an nn.Module.")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise SetupError(f"fullshard.{caller}: optimizer = {_short(optimizer)}; it must be a torch.optim.Optimizer.")


def require_settings(overrides: Sequence[Any], *, resume: Any, resume_anyway: Any) -> None:
    """Raises unless these are what `fullshard.train` takes beside a recipe."""
    for each in overrides:
        if not isinstance(each, str):
            raise RecipeError(
                f"fullshard.train: the setting {_short(each)} is of type {type(each).__name__}. Settings are strings, "
                'each an argument of its own: fullshard.train(recipe, "optimizer.lr=3e-4", "seed=1").'
            )
    if not isinstance(resume, str | os.PathLike) and not hasattr(resume, "fs"):
        raise RecipeError(f'fullshard.train: resume = {resume!r}; allowed: "auto", "never", or a checkpoint.')
    if not isinstance(resume_anyway, bool):
        raise RecipeError(f"fullshard.train: resume_anyway = {resume_anyway!r}; it must be True or False.")


def require_wrap(wrap: Any) -> None:
    """Raises unless `wrap` names what becomes a unit."""
    listed = list(wrap) if isinstance(wrap, Sequence) and not isinstance(wrap, str) else [wrap]
    if type(wrap) is int and wrap > 0:
        return
    classes = [each for each in listed if isinstance(each, str) or _is_module_class(each)]
    if wrap is not None and (not listed or len(classes) < len(listed)):
        raise SetupError(
            f"fullshard.shard: wrap = {wrap!r}. Allowed: a class or its name, a list of these, a least number of "
            'parameters above 0, or "whole".'
        )


def _is_module_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else type(value).__name__
