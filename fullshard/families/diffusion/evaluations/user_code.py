"""The user's code, named in a recipe: `path.py:Name`, or `my_package.my_module.Name`.

Must not know what it is for.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from fullshard.config.part import did_you_mean
from fullshard.errors import RecipeError

FORMS = "Write path.py:Name, or my_package.my_module.Name"


def load_callable(text: str, *, where: str) -> Callable[..., Any]:
    """The callable that `text` names; a class is instantiated without arguments."""
    found = load(text, where=where)
    if inspect.isclass(found):
        try:
            found = found()
        except Exception as error:  # whatever the user's code raises
            raise RecipeError(
                f"{where} = {text!r}: the class cannot be instantiated without arguments ({_words(error)}). Make its "
                "arguments optional, or name a function or an object."
            ) from error
    if not callable(found):
        raise RecipeError(
            f"{where} = {text!r} is {type(found).__name__}, which cannot be called. Name a function, a class or a "
            "module of torch."
        )
    return found  # type: ignore[no-any-return]


def load(text: str, *, where: str) -> Any:
    """The object that `text` names. A file is run once per process."""
    path, colon, name = text.rpartition(":")
    if not (colon and path.endswith(".py")):
        path, _, name = text.rpartition(".")
    if not path or not name.isidentifier():
        raise RecipeError(f"{where} = {text!r} is not the name of code. {FORMS}.")
    module = _file(Path(path).expanduser(), text, where) if colon else _module(path, text, where)
    if not hasattr(module, name):
        names = [n for n in vars(module) if not n.startswith("_")]
        raise RecipeError(f"{where} = {text!r}: there is no {name!r} in {path}{did_you_mean(name, names)}.")
    return getattr(module, name)


def _module(path: str, text: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        raise RecipeError(
            f"{where} = {text!r}: the module {error.name!r} cannot be imported. Install it, or put its folder on "
            f"PYTHONPATH. {FORMS}."
        ) from error


def _file(path: Path, text: str, where: str) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise RecipeError(f"{where} = {text!r}: there is no file {path}. Paths are relative to the current folder.")
    name = f"fullshard_user_{hashlib.blake2b(str(path).encode(), digest_size=8).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's code raises
        del sys.modules[name]
        raise RecipeError(f"{where} = {text!r}: {path} failed to import ({_words(error)}). Fix the file.") from error
    return module


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no text'}"
