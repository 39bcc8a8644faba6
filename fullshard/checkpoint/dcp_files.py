"""DCP files with two rules: every byte is hashed as it is written, and nothing that is read can run code.

Works on local and remote folders (fsspec, as UPath). Must not know what the tensors are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import io
import pickle
import struct
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystemBase
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fullshard.checkpoint.paths import exists, is_remote, make
from fullshard.errors import CheckpointError

METADATA = ".metadata"
_KNOWN = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
}


class Files(FileSystemBase):
    """The file system that DCP sees; `digests` has the checksum of each file written through it, by name."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with path.open(mode) as file:
            if "w" not in mode:
                yield file
                return
            hashed = Hashed(file)
            yield hashed
        self.digests[path.name] = hashed.hexdigest()

    def concat_path(self, path: Any, suffix: str) -> Any:
        return path / suffix

    def init_path(self, path: Any) -> Any:
        return path

    def rename(self, path: Any, new_path: Any) -> None:
        path.rename(new_path)
        self.digests[new_path.name] = self.digests.pop(path.name)

    def mkdir(self, path: Any) -> None:
        make(path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def exists(self, path: Any) -> bool:
        return exists(path)

    def rm_file(self, path: Any) -> None:
        path.unlink()


class Hashed(io.RawIOBase):
    """A file that is written sequentially, and the checksum of what was written."""

    def __init__(self, file: Any) -> None:
        self._file, self._sha256 = file, hashlib.sha256()

    def write(self, data: Any) -> int:
        self._sha256.update(data)
        self._file.write(data)
        return memoryview(data).nbytes

    def tell(self) -> int:
        return int(self._file.tell())

    def fileno(self) -> int:
        self._file.flush()  # only fsync asks for it
        return int(self._file.fileno())

    def writable(self) -> bool:
        return True

    def hexdigest(self) -> str:
        return self._sha256.hexdigest()


class _Part(io.RawIOBase):
    """A byte range of a file, as a file. zipfile cannot read DCP's own."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        return self._at

    def readinto(self, room: Any) -> int:
        self._file.seek(self._start + self._at)
        data = self._file.read(min(len(room), max(self._length - self._at, 0)))
        room[: len(data)] = data
        self._at += len(data)
        return len(data)


class Writer(FileSystemWriter):
    """Writes this rank's share as several files in parallel; raises an error in any of them."""

    def __init__(self, path: Path, *, threads: int) -> None:
        # Nothing is copied ahead: background saves are in host memory already.
        local = not is_remote(path)  # a remote file is complete when it is closed
        super().__init__(str(path), sync_files=local, thread_count=1, per_thread_copy_ahead=0, overwrite=False)
        self.fs, self.path = cast(Any, Files()), cast(Any, path)
        self._threads = threads

    @property
    def digests(self) -> dict[str, str]:
        return cast(Files, self.fs).digests

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)  # without its path: a checkpoint may be moved

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        if self._threads == 1:
            return super().write_data(plan, planner)
        prefix = plan.storage_data.prefix
        shares = [plan.items[index :: self._threads] for index in range(self._threads)]

        def write(index: int) -> list[WriteResult]:
            # DCP numbers files from 0 in each call, so the prefix names the share.
            storage = type(plan.storage_data)(f"{prefix}{index}_")
            share = dataclasses.replace(plan, items=shares[index], storage_data=storage)
            return super(Writer, self).write_data(share, planner).wait()

        busy = [index for index, share in enumerate(shares) if share]
        with ThreadPoolExecutor(max(len(busy), 1), thread_name_prefix="checkpoint") as pool:
            results = [result for part in pool.map(write, busy) for result in part]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future


class Reader(FileSystemReader):
    """Reads what DCP wrote; unpickles the metadata only as plain data."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))  # DCP takes a string; the real path follows
        self.fs, self.path = cast(Any, Files()), cast(Any, path)
        self._begins: dict[tuple[str, int], int | None] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = cast(Path, self.path) / METADATA
        try:
            with path.open("rb") as file, _untouched(path):
                metadata = _Plain(file, path).load()
            _require_tensors(metadata, path)
        except CheckpointError:
            raise
        except Exception as error:  # a broken pickle may raise anything
            raise CheckpointError(f"{path} cannot be read ({type(error).__name__}: {_first_line(error)}).") from error
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return cast(Metadata, metadata)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        try:
            return super().read_data(plan, planner)
        except pickle.UnpicklingError as error:  # torch.load with weights_only
            raise CheckpointError(f"{self.path}: {_first_line(error)}") from error

    def chunk(self, info: Any) -> torch.Tensor:
        """One stored piece of a tensor."""
        path = cast(Path, self.path) / info.relative_path
        try:
            with path.open("rb") as file:
                piece = torch.load(self._slice_file(file, info), map_location="cpu", weights_only=True)
            if not isinstance(piece, torch.Tensor):
                raise CheckpointError(f"found a {type(piece).__name__} instead of a tensor")
        except Exception as error:  # torch raises several classes for a damaged archive
            raise CheckpointError(f"{path} cannot be read at byte {info.offset}: {_first_line(error)}") from error
        return piece

    def rows(self, info: Any, start: int, out: torch.Tensor) -> None:
        """Reads rows of one stored piece, from `start`, into `out`, and no other byte of the piece."""
        path = cast(Path, self.path) / info.relative_path
        with path.open("rb") as file:
            place = info.relative_path, info.offset
            if place not in self._begins:
                part = io.BufferedReader(_Part(file, info.offset, info.length))
                self._begins[place] = _first_byte(part, out.dtype)
            begin = self._begins[place]
            if begin is not None and out.is_contiguous() and out.numel():
                file.seek(info.offset + begin + start * out[0].numel() * out.element_size())
                room = memoryview(cast(Any, out.reshape(-1).view(torch.uint8).numpy()))
                if cast(Any, file).readinto(room) == len(room):
                    return
        out.copy_(self.chunk(info)[start : start + len(out)])


def _first_byte(piece: Any, dtype: torch.dtype) -> int | None:
    """The offset of a stored tensor's values; None if they are not stored contiguously."""
    try:
        with torch.serialization.skip_data():
            found = torch.load(piece, map_location="cpu", weights_only=True)
        if not (type(found) is torch.Tensor and found.is_contiguous() and found.dtype == dtype):
            return None
        [record] = [entry for entry in zipfile.ZipFile(piece).infolist() if "/data/" in entry.filename]
        if found.storage_offset() or record.compress_type or record.file_size != found.nbytes:
            return None
        piece.seek(record.header_offset + 26)
        return int(record.header_offset + 30 + sum(struct.unpack("<HH", piece.read(4))))
    except Exception:  # another kind of tensor, or a damaged one: reading all of it will tell
        return None


def _require_tensors(metadata: Any, path: Path) -> None:
    """DCP would unpickle anything that is not described as a tensor, and skip rows that no piece covers."""
    if type(metadata) is not Metadata:
        raise CheckpointError(f"{path} holds {type(metadata).__name__}, not DCP's metadata: do not use it.")
    for name, entry in metadata.state_dict_metadata.items():
        if type(entry) is not TensorStorageMetadata:
            raise CheckpointError(
                f"{path} describes {name} as {type(entry).__name__}, which would run code when it is loaded; "
                f"fullshard checkpoints hold tensors only. {_DO_NOT_USE}"
            )
        if sum(chunk.sizes.numel() for chunk in entry.chunks) < entry.size.numel():
            raise CheckpointError(f"{path} has only some of the rows of {name}: the checkpoint is damaged.")
    for info in metadata.storage_data.values():
        name = info.relative_path
        if Path(name).name != name or name in ("", "..") or info.transform_descriptors:
            raise CheckpointError(f"{path} names {name!r}, outside its own folder. {_DO_NOT_USE}")


_DO_NOT_USE = "Do not use this checkpoint, and find out where it came from."


@contextlib.contextmanager
def _untouched(path: Path) -> Iterator[None]:
    """Refuses a pickle that changes the classes it may name, and restores them."""
    things: list[Any] = [getattr(importlib.import_module(m), name) for m, names in _KNOWN.items() for name in names]
    before = [(thing, _members(thing)) for thing in things]
    try:
        yield
    finally:
        changed = [(thing, known) for thing, known in before if _members(thing) != known]
        for thing, known in changed:
            for name, value in _members(thing).items():
                if name not in known:
                    delattr(thing, name)
                elif value is not known[name]:
                    setattr(thing, name, known[name])
    if changed:
        raise CheckpointError(f"{path} changes {changed[0][0].__qualname__} when it is loaded. {_DO_NOT_USE}")


def _members(thing: Any) -> dict[str, Any]:
    # Python itself sets __slotnames__ when an object is pickled, perhaps by a save in another thread.
    return {name: value for name, value in vars(thing).items() if name != "__slotnames__"}


class _Plain(pickle.Unpickler):
    """Unpickles DCP's data classes and nothing else."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        plain = module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype))
        if plain or name in _KNOWN.get(module, ()):
            return super().find_class(module, name)
        raise CheckpointError(
            f"{self._path} would run code when it is loaded: it asks for {module}.{name}, which no checkpoint needs. "
            f"{_DO_NOT_USE}"
        )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
