"""DCP files with two rules: every byte is hashed as it is written, and nothing that is read can run code.

Works on local and remote folders (fsspec, as UPath). Must not know what the tensors are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fullshard.checkpoint import paths
from fullshard.errors import CheckpointError, first_line, one_line

METADATA = ".metadata"
_DO_NOT_USE = "Do not use this checkpoint, and find out where it came from."


class Hashed:
    """A file that is written sequentially, and the checksum of what was written."""

    def __init__(self, file: Any) -> None:
        self._file, self.sha256 = file, hashlib.sha256()

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        self._file.write(data)
        return memoryview(data).nbytes

    def fileno(self) -> int:
        self._file.flush()  # only fsync asks for it
        return int(self._file.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class Files(FileSystem):
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
        self.digests[path.name] = hashed.sha256.hexdigest()

    def concat_path(self, path: Any, suffix: str) -> Any:
        return path / suffix

    def rename(self, path: Any, new_path: Any) -> None:
        path.rename(new_path)
        self.digests[new_path.name] = self.digests.pop(path.name)

    def mkdir(self, path: Any) -> None:
        paths.make(path)

    def exists(self, path: Any) -> bool:
        return paths.exists(path)

    def rm_file(self, path: Any) -> None:
        path.unlink()


class Writer(FileSystemWriter):
    """Writes this rank's share as several files in parallel; raises an error in any of them."""

    def __init__(self, path: Path, *, threads: int) -> None:
        # Nothing is copied ahead: background saves are in host memory already.
        local = not paths.is_remote(path)  # a remote file is complete when it is closed
        super().__init__(str(path), sync_files=local, thread_count=1, per_thread_copy_ahead=0, overwrite=False)
        files = Files()
        self.fs, self.path, self.digests = files, cast(Any, path), files.digests
        self._threads = threads

    def storage_meta(self) -> dcp.StorageMeta:
        return dcp.StorageMeta(save_id=self.save_id)  # without its path: a checkpoint may be moved

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        if self._threads == 1:
            return super().write_data(plan, planner)

        def write(index: int) -> list[WriteResult]:
            # DCP numbers files from 0 in each call, so the prefix names the share.
            storage = type(plan.storage_data)(f"{plan.storage_data.prefix}{index}_")
            share = dataclasses.replace(plan, items=plan.items[index :: self._threads], storage_data=storage)
            return super(Writer, self).write_data(share, planner).wait()

        with ThreadPoolExecutor(self._threads, thread_name_prefix="checkpoint") as pool:
            parts = pool.map(write, range(min(self._threads, len(plan.items))))
            results = [result for part in parts for result in part]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future


class Reader(FileSystemReader):
    """Reads what DCP wrote; unpickles the metadata only as plain data."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))  # DCP takes a string; the real path follows
        self.fs, self.path = Files(), cast(Any, path)
        self._begins: dict[tuple[str, int], int | None] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        path = cast(Path, self.path) / METADATA
        try:
            with path.open("rb") as file, _untouched(path):
                metadata = _Plain(file, path).load()
            _require_tensors(metadata, path)
        except CheckpointError:
            raise
        except Exception as error:  # a broken pickle may raise anything
            raise CheckpointError(f"{path} cannot be read ({one_line(error)}).") from error
        metadata.storage_meta = dcp.StorageMeta(load_id=self.load_id)
        return cast(dcp.Metadata, metadata)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        try:
            return super().read_data(plan, planner)
        except pickle.UnpicklingError as error:  # torch.load with weights_only
            raise CheckpointError(f"{self.path}: {first_line(error)}") from error

    def piece(self, info: _StorageInfo) -> torch.Tensor:
        """One stored piece of a tensor."""
        path = cast(Path, self.path) / info.relative_path
        try:
            with path.open("rb") as file:
                piece = torch.load(self._slice_file(file, info), map_location="cpu", weights_only=True)
            if not isinstance(piece, torch.Tensor):
                raise CheckpointError(f"found a {type(piece).__name__} instead of a tensor")
        except Exception as error:  # torch raises several classes for a damaged archive
            raise CheckpointError(f"{path} cannot be read at byte {info.offset}: {first_line(error)}") from error
        return piece

    def rows(self, info: _StorageInfo, start: int, out: torch.Tensor) -> None:
        """Reads rows of one stored piece, from `start`, into `out`, and no other byte of the piece."""
        path = cast(Path, self.path) / info.relative_path
        with path.open("rb") as file:
            place = info.relative_path, info.offset
            if place not in self._begins:
                self._begins[place] = _first_byte(self._slice_file(file, info), out.dtype)
            begin = self._begins[place]
            if begin is not None and out.is_contiguous() and out.numel():
                file.seek(info.offset + begin + start * out[0].numel() * out.element_size())
                room = memoryview(cast(Any, out.reshape(-1).view(torch.uint8).numpy()))
                if cast(Any, file).readinto(room) == len(room):
                    return
        out.copy_(self.piece(info)[start : start + len(out)])


def _first_byte(piece: IO[bytes], dtype: torch.dtype) -> int | None:
    """The offset of a stored tensor's values; None if they are not stored contiguously."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    try:
        with FakeTensorMode():  # reads everything but the values
            found = torch.load(piece, weights_only=True)
    except Exception:  # another kind of tensor, or a damaged one: reading it as a whole will tell
        return None
    plain = type(found) is FakeTensor and found.is_contiguous() and found.dtype == dtype
    return int(found.untyped_storage()._checkpoint_offset) if plain and not found.storage_offset() else None


def _require_tensors(metadata: Any, path: Path) -> None:
    """DCP would unpickle anything that is not described as a tensor, and skip rows that no piece covers."""
    if type(metadata) is not dcp.Metadata:
        raise CheckpointError(f"{path} holds {type(metadata).__name__}, not DCP's metadata: do not use it.")
    for name, entry in metadata.state_dict_metadata.items():
        if type(entry) is not dcp.TensorStorageMetadata:
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


_PLAIN: tuple[Any, ...] = (
    dcp.BytesStorageMetadata,
    dcp.ChunkStorageMetadata,
    dcp.Metadata,
    dcp.MetadataIndex,
    dcp.StorageMeta,
    dcp.TensorProperties,
    dcp.TensorStorageMetadata,
    dcp._MEM_FORMAT_ENCODING,
    _StorageInfo,
    torch.serialization._get_layout,
)
"""Everything that DCP's metadata consists of, apart from dtypes and sizes."""


class _Plain(pickle.Unpickler):
    """Unpickles DCP's data classes and nothing else."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        for known in _PLAIN:
            if (known.__module__, known.__qualname__) == (module, name):
                return known
        raise CheckpointError(
            f"{self._path} would run code when it is loaded: it asks for {module}.{name}, which no checkpoint needs. "
            f"{_DO_NOT_USE}"
        )


@contextlib.contextmanager
def _untouched(path: Path) -> Iterator[None]:
    """Refuses a pickle that changes the classes it may name, and restores them."""
    before = [(known, _members(known)) for known in _PLAIN]
    try:
        yield
    finally:
        changed = [(known, members) for known, members in before if _members(known) != members]
        for known, members in changed:
            for name, value in _members(known).items():
                if name not in members:
                    delattr(known, name)
                elif value is not members[name]:
                    setattr(known, name, members[name])
    if changed:
        raise CheckpointError(f"{path} changes {changed[0][0].__qualname__} when it is loaded. {_DO_NOT_USE}")


def _members(known: Any) -> dict[str, Any]:
    # Python itself sets __slotnames__ when an object is pickled, perhaps by a save in another thread.
    return {name: value for name, value in vars(known).items() if name != "__slotnames__"}
