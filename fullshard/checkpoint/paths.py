"""Folders by path or by URL (fsspec, as UPath): what a remote store does otherwise than a disk is known here.

An object store has no folders, no links and no renames, and its library may remember listings. Must not know what a
checkpoint is, nor import torch.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

from fullshard.errors import CheckpointError, FullshardError, SetupError, missing_package

_PACKAGES = {"s3": ("s3fs", "s3"), "s3a": ("s3fs", "s3"), "gs": ("gcsfs", "gcs"), "gcs": ("gcsfs", "gcs")}
"""Package and extra by protocol."""


def place(text: str | Path) -> Path:
    """A folder by its path, or by its URL: s3://, gs://, anything that fsspec knows. SetupError where it knows none."""
    if "://" not in str(text) or not isinstance(text, (str, Path)):
        return Path(text) if isinstance(text, (str, Path)) else text
    address = str(text)
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
            f"{address}: there is no store of the kind {protocol}:// ({error}). Allowed are s3://, gs:// and whatever "
            "else the installed fsspec knows, and paths without ://."
        ) from error
    except Exception as error:  # a library of its own, which may log in at once
        raise SetupError(f"{address} cannot be opened ({words(error)}). {REACH}") from error
    if listings is not None:
        # A listing from before another process wrote would hide what it wrote.
        listings.clear()
        listings.use_listings_cache = False
    return cast(Path, found)


REACH = "Check the address, the network and your credentials for it."


def is_remote(path: Path) -> bool:
    return not isinstance(path, Path)


def is_flat(path: Path) -> bool:
    """Whether the place is an object store, which has no folders; there a new folder may mean a new bucket."""
    if not is_remote(path):
        return False
    from upath.implementations.cloud import CloudPath

    return isinstance(path, CloudPath)


def exists(path: Path) -> bool:
    """Whether something is there. Not UPath's own word for it: that calls a store that cannot be reached empty."""
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
    """Makes a folder and those above it, where there are folders."""
    if not is_flat(folder):
        folder.mkdir(parents=True, exist_ok=True)


def put_text(path: Path, text: str) -> None:
    """Writes a small remote file which readers see whole or not at all."""
    remote: Any = path
    if remote.protocol not in ("file", "local"):
        path.write_text(text)  # visible when it is closed
        return
    part: Any = path.with_name(f".{path.name}.part")
    part.write_text(text)
    remote.fs.mv(part.path, remote.path)


def remove(folder: Path) -> None:
    """Deletes a remote folder, if there is one."""
    if exists(folder):
        remote: Any = folder
        remote.fs.rm(remote.path, recursive=True)


def move(folder: Path, target: Path, *, last: str) -> None:
    """Moves a remote folder to a place where nothing is; an object store can only copy and then delete."""
    if is_flat(folder):
        copy(folder, target, last=last)
        remove(folder)
    else:
        remote: Any = folder
        remote.fs.mv(remote.path, cast(Any, target).path, recursive=True)


def copy(folder: Path, target: Path, *, last: str) -> None:
    """Copies a remote folder within its store, files called `last` at the end."""
    remote: Any = folder
    paths: list[Any] = [path for path in remote.rglob("*") if path.is_file()]

    def put(path: Any) -> None:
        copied: Any = target / str(path.relative_to(remote))
        make(copied.parent)
        remote.fs.cp_file(path.path, copied.path)

    with ThreadPoolExecutor(_COPIES) as pool:
        for group in ([p for p in paths if p.name != last], [p for p in paths if p.name == last]):
            list(pool.map(put, group))


_COPIES = 8
"""Copies under way at once: the store does the work."""


@contextlib.contextmanager
def reaching(place: Path) -> Iterator[None]:
    """Puts what a store's library raises into words, whatever its class; errors of a local folder pass."""
    try:
        yield
    except FullshardError:
        raise
    except Exception as error:
        if not is_remote(place):
            raise
        raise CheckpointError(f"{place} cannot be used ({words(error)}). {REACH}") from error


def words(error: BaseException) -> str:
    """An error in one line."""
    said = (str(error).strip().splitlines() or ["no text"])[0]
    return said if isinstance(error, OSError) and error.errno else f"{type(error).__name__}: {said}"
