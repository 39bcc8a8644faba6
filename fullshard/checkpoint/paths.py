"""Folders by path or URL (fsspec, as UPath): how remote stores differ from a disk, and copies of a run's logs and model
in a store.

An object store has no folders, links or renames, and its library may cache listings. Must not know what a
checkpoint is, nor import torch.
"""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

from fullshard.errors import CheckpointError, FullshardError, SetupError, missing_package, one_line

_PACKAGES = {"s3": ("s3fs", "s3"), "s3a": ("s3fs", "s3"), "gs": ("gcsfs", "gcs"), "gcs": ("gcsfs", "gcs")}
"""Package and extra by protocol."""
REACH = "Check the address, the network and your credentials for it."
TEXTS = ("recipe.resolved.yaml", "metrics.jsonl", "log.txt", "units.json")
MODEL, _WHOLE = "model", ".model-is-whole"


def place(text: str | Path) -> Path:
    """A folder by path or URL: s3://, gs://, anything that fsspec knows. Raises SetupError for other protocols."""
    if not isinstance(text, (str, Path)):
        return text
    address = str(text)
    if "://" not in address:
        return Path(text)
    protocol = address.partition("://")[0]
    from upath import UPath

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="UPath .* not explicitly implemented")
            found: Any = UPath(address)
            listings = getattr(found.fs, "dircache", None)
    except ImportError as error:
        if protocol in _PACKAGES:
            package, extra = _PACKAGES[protocol]
            raise missing_package(package, extra=extra, needed_by=address) from error
        raise SetupError(f"{address}: {protocol}:// needs a package that is not installed ({error}).") from error
    except ValueError as error:
        raise SetupError(
            f"{address}: {protocol}:// is not a known kind of store ({error}). Use s3://, gs:// or another protocol "
            "of the installed fsspec, or a path without ://."
        ) from error
    except Exception as error:  # a store's library, which may log in right away
        raise SetupError(f"{address} cannot be opened ({one_line(error)}). {REACH}") from error
    if listings is not None:
        # A cached listing would hide what another process wrote since.
        listings.clear()
        listings.use_listings_cache = False
    return cast(Path, found)


def is_remote(path: Path) -> bool:
    return not isinstance(path, Path)


def is_flat(path: Path) -> bool:
    """Whether the path is in an object store, which has no folders; there, mkdir may create a bucket."""
    if not is_remote(path):
        return False
    from upath.implementations.cloud import CloudPath

    return isinstance(path, CloudPath)


def exists(path: Path) -> bool:
    """Whether a path exists. Unlike UPath.exists, raises if the store cannot be reached."""
    if not is_remote(path):
        return path.exists()
    remote: Any = path
    with reaching(path):
        try:
            remote.fs.info(remote.path)
        except (FileNotFoundError, NotADirectoryError):
            return False
    return True


def make(folder: Path) -> None:
    """Makes a folder and its parents, if the store has folders."""
    if not is_flat(folder):
        folder.mkdir(parents=True, exist_ok=True)


def put_text(path: Path, text: str) -> None:
    """Writes a small remote file that readers see whole or not at all."""
    remote: Any = path
    if remote.protocol not in ("file", "local"):
        path.write_text(text)  # becomes visible when it is closed
        return
    part: Any = path.with_name(f".{path.name}.part")
    part.write_text(text)
    remote.fs.mv(part.path, remote.path)


def remove(folder: Path) -> None:
    """Deletes a folder, if it exists."""
    if exists(folder):
        remote: Any = folder
        remote.fs.rm(remote.path, recursive=True) if is_remote(folder) else shutil.rmtree(folder)


def move(folder: Path, target: Path, *, last: str) -> None:
    """Moves a folder to a new path; an object store can only copy and delete."""
    if not is_remote(folder):
        folder.replace(target)
    elif is_flat(folder):
        copy(folder, target, last=last)
        remove(folder)
    else:
        remote: Any = folder
        remote.fs.mv(remote.path, cast(Any, target).path, recursive=True)


def copy(folder: Path, target: Path, *, last: str) -> None:
    """Copies a remote folder within its store, files named `last` at the end."""
    remote: Any = folder
    paths: list[Any] = [path for path in remote.rglob("*") if path.is_file()]

    def put(path: Any) -> None:
        copied: Any = target / str(path.relative_to(remote))
        make(copied.parent)
        remote.fs.cp_file(path.path, copied.path)

    with ThreadPoolExecutor(8) as pool:  # the store does the work
        for group in ([p for p in paths if p.name != last], [p for p in paths if p.name == last]):
            list(pool.map(put, group))


@contextlib.contextmanager
def reaching(place: Path) -> Iterator[None]:
    """Turns any error of a store's library into a CheckpointError; errors of a local folder pass."""
    try:
        yield
    except FullshardError:
        raise
    except Exception as error:
        if not is_remote(place):
            raise
        raise CheckpointError(f"{place} cannot be used ({one_line(error)}). {REACH}") from error


def upload_model(folder: Path, run: Path) -> None:
    """Copies the exported model to the store, replacing an older one. A marker file says that the copy is complete."""
    target: Any = run / MODEL
    remove(run / _WHOLE)
    remove(target)
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        copy = target / path.relative_to(folder).as_posix()
        make(copy.parent)
        target.fs.put_file(str(path), copy.path)
    put_text(run / _WHOLE, "")


def is_exported(run: Path) -> bool:
    """Whether the store has the run's complete model."""
    return exists(run / MODEL) and (not is_remote(run) or exists(run / _WHOLE))


def send_texts(run: Path, target: Path, *, warn: Callable[[str], None]) -> None:
    """Copies log files; if that fails, the run continues and the next save tries again."""
    if not is_remote(target):
        return
    for name in TEXTS:
        try:
            if (run / name).is_file():
                (target / name).write_bytes((run / name).read_bytes())
        except Exception as error:  # whatever the store's library raises
            warn(f"{name} could not be copied to {target} ({one_line(error)}): for now it is only in {run}.")


def fetch_texts(run: Path, target: Path) -> None:
    """Fetches the log files of a run on another machine. A local file that extends the store's copy stays."""
    for name in TEXTS if is_remote(target) else ():
        if exists(target / name):
            copy, own = (target / name).read_bytes(), run / name
            if not (own.exists() and own.read_bytes().startswith(copy)):
                own.write_bytes(copy)
