"""An object store for tests, with the manners of the real ones: flat names, remembered listings, no folders to make.

Objects are files in a local folder, so that several processes share them: `bucket://NAME/KEY` lies in the folder that
NAME spells. An object is there when its file is closed, and never before. It fails when it is told to.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import fsspec
from fsspec.spec import AbstractFileSystem
from upath.implementations.cloud import CloudPath
from upath.registry import register_implementation

REFUSING = "REFUSES"
"""A file of this name makes the store refuse every object whose name holds the text in it; so many times if a number
follows in a second line."""


class LibraryError(Exception):
    """Not an OSError: store libraries have classes of their own."""


def url(folder: Path) -> str:
    """The address of the bucket in a folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    return f"bucket://{quote(str(folder), safe='').replace('%', '=')}"


class Bucket(AbstractFileSystem):
    protocol = "bucket"

    def _file(self, path: str) -> Path:
        name, _, key = self._strip_protocol(path).partition("/")
        return Path(unquote(name.replace("=", "%")), quote(key, safe=""))

    def ls(self, path: str, detail: bool = True, refresh: bool = False, **kwargs: Any) -> Any:
        path = self._strip_protocol(path).rstrip("/")
        if refresh or path not in self.dircache:
            self.dircache[path] = listed = self._listed(path)
        else:
            listed = self.dircache[path]
        if not listed:
            raise FileNotFoundError(path)
        return listed if detail else [entry["name"] for entry in listed]

    def _listed(self, path: str) -> list[dict[str, Any]]:
        bucket, _, key = path.partition("/")
        found: dict[str, dict[str, Any]] = {}
        for file in sorted(self._file(bucket).iterdir()):
            name = f"{bucket}/{unquote(file.name)}"
            try:
                size = file.stat().st_size
            except FileNotFoundError:  # another rank has removed it since
                continue
            if name == path:
                return [{"name": path, "size": size, "type": "file"}]
            if name.startswith(f"{path}/") and file.name != REFUSING:
                head, _, rest = name.removeprefix(f"{path}/").partition("/")
                kind = "directory" if rest else "file"
                found[head] = {"name": f"{path}/{head}", "size": 0 if rest else size, "type": kind}
        return list(found.values())

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if mode == "rb":
            return self._file(path).open("rb")
        assert mode == "wb", "objects are written whole"
        self._may(path)
        return _Object(self._file(path))

    def _rm(self, path: str) -> None:
        self._file(path).unlink(missing_ok=True)  # as a real one: deleting what is not there is no error

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        self._may(path2)
        with self._open(path2, "wb") as target:
            target.write(self._file(path1).read_bytes())

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        raise AssertionError(f"{path}: a folder would be a new bucket")

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Called by fsspec itself before it puts a file."""

    def rmdir(self, path: str) -> None:
        raise AssertionError(f"{path}: there are no folders")

    def _may(self, path: str) -> None:
        refusing = self._file(path).with_name(REFUSING)
        if not refusing.exists():
            return
        name, _, times = refusing.read_text().partition("\n")
        if name in path and times != "0":
            if times:  # another process may be reading it
                less = refusing.with_name(f"{REFUSING}.{os.getpid()}.part")
                less.write_text(f"{name}\n{int(times) - 1}")
                os.replace(less, refusing)
            raise LibraryError(f"503 SlowDown for {path.rpartition('/')[2]}")


class _Object(io.BytesIO):
    def __init__(self, file: Path) -> None:
        super().__init__()
        self._to = file

    def close(self) -> None:
        if not self.closed:
            part = self._to.with_name(f"{self._to.name}.{os.getpid()}.part")
            part.write_bytes(self.getvalue())
            os.replace(part, self._to)
        super().close()

    def discard(self) -> None:
        super().close()


class BucketPath(CloudPath):
    __slots__ = ()


def install() -> None:
    """Makes `bucket://` known in this process."""
    fsspec.register_implementation("bucket", Bucket, clobber=True)
    register_implementation("bucket", BucketPath, clobber=True)
