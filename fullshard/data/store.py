"""Encoded samples on disk: each feature one flat memory-mapped array, with the place where every sample starts.

A store is found by a hash of the records' content, the encoder and the tokenizer. One process of a node builds it while
the others wait; it appears by a rename, whole or not at all. Must not know ranks, batches or what a feature means.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import shutil
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from fullshard.config.part import plain
from fullshard.contracts.data import IGNORE, Encoder, Features, Records
from fullshard.data.records import combine, named
from fullshard.errors import DataError
from fullshard.formatting.plural import counted

_VERSION = 4
_HELPERS = "fullshard.data."
"""Where the code lies that encoders share."""
_COMMON = "common.npz"
_BATCH = 256
_EVERY_S = 2.0


@dataclass
class Counts:
    """What became of the records."""

    records: int = 0
    samples: int = 0
    truncated: int = 0
    """Samples cut at the sequence length."""
    empty: int = 0
    """Dropped: records without a sample, and samples too short to predict anything."""
    masked: int = 0
    """Dropped: samples with no position to learn."""
    beyond: int = 0
    """Dropped: samples whose first position to learn comes after the cut."""
    unreadable: int = 0
    """Dropped: records with an image that cannot be read."""
    lost: dict[str, int] = field(default_factory=dict)
    """Records of which something is not in their samples, by what it is."""
    noted: dict[str, int] = field(default_factory=dict)
    """Records of which something is worth knowing, by what it is."""

    @property
    def dropped(self) -> int:
        """Samples without anything to learn, and those that cannot be read."""
        return self.empty + self.masked + self.beyond + self.unreadable


class Store:
    """Samples by index, read from disk when asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        meta = json.loads((folder / "store.json").read_text())
        self.counts = Counts(**meta["counts"])
        self.records: np.ndarray = np.load(folder / "records.npy")
        """The record each sample was made from."""
        self.names: list[str] = meta["names"]
        self._columns = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in self.names}
        self._starts = {name: np.load(folder / f"{name}.starts.npy", mmap_mode="r") for name in self.names}
        first = next((name for name in ("input_ids", "tokens", *self.names) if name in self._starts), None)
        self.lengths: np.ndarray = np.diff(self._starts[first]) if first else np.zeros(0, dtype=np.int64)
        """Tokens of each sample; for samples without tokens, entries of the first feature."""

    def __getstate__(self) -> Path:
        # A memory map would travel to a loader process as a copy of the data.
        return self.folder

    def __setstate__(self, folder: Path) -> None:
        Store.__init__(self, folder)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Features:
        return {
            name: np.array(column[self._starts[name][index] : self._starts[name][index + 1]])
            for name, column in self._columns.items()
        }

    @property
    def common(self) -> Features:
        """What all samples share; empty where they share nothing."""
        file = self.folder / _COMMON
        if not file.is_file():
            return {}
        with np.load(file) as found:
            return {name: found[name] for name in found.files}

    def sizes(self, name: str) -> np.ndarray:
        """How many entries of a feature each sample has."""
        return np.asarray(np.diff(self._starts[name]))

    def flat(self, name: str) -> np.ndarray:
        """A feature of one entry, of all samples."""
        return np.asarray(self._columns[name])

    def slice(self, index: int, start: int, stop: int) -> Features:
        """Positions `start` to `stop` of one sample whose features are all equally long."""
        return {
            name: np.array(column[self._starts[name][index] + start : self._starts[name][index] + stop])
            for name, column in self._columns.items()
        }


def processor_fingerprint(processor: Any) -> str:
    """A hash of everything in a tokenizer that decides how text becomes tokens."""
    if processor is None:
        return "none"
    own = getattr(processor, "fingerprint", None)
    if callable(own):
        return str(own())
    tokenizer = getattr(processor, "tokenizer", processor)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        model = json.loads(backend.to_str())
        # These two hold the settings of the last call, not of the tokenizer.
        model.pop("truncation", None)
        model.pop("padding", None)
        core = json.dumps(model, sort_keys=True)
    else:
        core = json.dumps(sorted(tokenizer.get_vocab().items())) if hasattr(tokenizer, "get_vocab") else repr(tokenizer)
    template = getattr(tokenizer, "chat_template", None)
    special = sorted((k, str(v)) for k, v in getattr(tokenizer, "special_tokens_map", {}).items())
    outer = processor.to_json_string() if processor is not tokenizer and hasattr(processor, "to_json_string") else ""
    parts = [type(processor).__qualname__, core, json.dumps([template, special]), outer]
    # What an embedding model puts before its texts.
    if prompts := getattr(processor, "prompts", None):
        parts.append(json.dumps(prompts, sort_keys=True))
    return combine(*parts)


def store_key(records: Records, encoder: Encoder, processor: Any, *, length: int) -> str:
    """The name of the store for these inputs; any change of content, settings or code gives another."""
    code = _code_of(encoder)
    settings = json.dumps(plain(encoder), sort_keys=True)
    parts = [str(_VERSION), records.fingerprint(), settings, code, processor_fingerprint(processor), str(length)]
    # Files that records name are no part of their own fingerprint.
    return combine(*parts, *filter(None, [encoder.outside(records)]))


def _code_of(encoder: Encoder) -> str:
    """A hash of the code that encodes: the encoder's own file, and those of this folder that it uses."""
    own = sys.modules.get(type(encoder).__module__)
    names = {_module_of(thing) for thing in vars(own).values()} if own else set()
    used = [sys.modules[name].__file__ for name in sorted(names) if name.startswith(_HELPERS)]
    files = [inspect.getsourcefile(type(encoder)), *used]
    return combine(*(hashlib.blake2b(Path(file).read_bytes(), digest_size=16).hexdigest() for file in files if file))


def _module_of(thing: Any) -> str:
    """Where a name of a file comes from; a module may have been imported whole."""
    return thing.__name__ if isinstance(thing, ModuleType) else str(getattr(thing, "__module__", ""))


def encoded(
    records: Records,
    encoder: Encoder,
    processor: Any,
    *,
    length: int,
    cache: Path,
    say: Callable[[str], None],
) -> Store:
    """The store of these records, built when it is not there yet."""
    folder = cache / store_key(records, encoder, processor, length=length)
    if folder.is_dir():
        return Store(folder)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{folder}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            say("Waiting for another process that is encoding the same data.")
            lock.acquire()
        try:
            if not folder.is_dir():
                _build(folder, records, encoder, processor, length=length, say=say)
        finally:
            lock.release()
    except OSError as error:
        raise DataError(
            f"{cache}: encoded data cannot be written here: {error.strerror or error}. Make room, or set data.cache to "
            "another folder."
        ) from error
    return Store(folder)


def _build(
    folder: Path, records: Records, encoder: Encoder, processor: Any, *, length: int, say: Callable[[str], None]
) -> None:
    for stale in folder.parent.glob(f"{folder.name}.tmp-*"):
        shutil.rmtree(stale, ignore_errors=True)
    temporary = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    temporary.mkdir()
    writer = _Writer(temporary, length=length)
    begun = said = time.monotonic()
    try:
        for start in range(0, len(records), _BATCH):
            indices = range(start, min(start + _BATCH, len(records)))
            for index, samples in zip(
                indices, _encode(records, indices, encoder, processor, length=length), strict=True
            ):
                writer.add(index, samples, where=records.where)
            now = time.monotonic()
            if now - said >= _EVERY_S and indices[-1] + 1 < len(records):
                said, done = now, indices[-1] + 1
                left = (now - begun) / done * (len(records) - done)
                share = done / len(records)
                say(f"Encoding: {done:,} of {counted(len(records), 'record')} ({share:.0%}), about {left:.0f} s left.")
        if common := encoder.common():
            np.savez(temporary / _COMMON, **common)  # type: ignore[arg-type, unused-ignore]
        writer.close()
        os.rename(temporary, folder)
    finally:
        writer.abandon()
        shutil.rmtree(temporary, ignore_errors=True)


def _encode(
    records: Records, indices: range, encoder: Encoder, processor: Any, *, length: int
) -> list[Sequence[Features]]:
    batch = [records[index] for index in indices]
    try:
        return encoder.encode_many(batch, processor, length=length)
    except Exception:
        # Of the whole batch; the record that is to blame is named.
        for index, record in zip(indices, batch, strict=True):
            with named(records, index, record):
                encoder.encode(record, processor, length=length)
        raise


class _Column:
    """One growing .npy file; numpy leaves room in its header for the final number of rows."""

    def __init__(self, folder: Path, name: str, like: np.ndarray) -> None:
        self.dtype, self.tail = like.dtype, like.shape[1:]
        self.starts = array("q", [0])
        self._path = folder / f"{name}.npy"
        self._starts_path = folder / f"{name}.starts.npy"
        self.file = open(self._path, "wb")  # noqa: SIM115  (closed by the writer)
        self._header()

    def _header(self) -> None:
        shape = (self.starts[-1], *self.tail)
        description = np.lib.format.dtype_to_descr(self.dtype)
        np.lib.format.write_array_header_1_0(self.file, {"descr": description, "fortran_order": False, "shape": shape})

    def add(self, values: np.ndarray) -> None:
        self.file.write(np.ascontiguousarray(values).tobytes())
        self.starts.append(self.starts[-1] + len(values))

    def close(self) -> None:
        self.file.seek(0)
        self._header()
        self.file.close()
        np.save(self._starts_path, np.frombuffer(self.starts, dtype=np.int64))


class _Writer:
    """Appends samples to the columns of a new store, and keeps the counts."""

    def __init__(self, folder: Path, *, length: int) -> None:
        self._folder, self._length = folder, length
        self._columns: dict[str, _Column] = {}
        self._records = array("q")
        self._counts = Counts()

    def add(self, record: int, samples: Sequence[Features], *, where: Callable[[int], str]) -> None:
        self._counts.records += 1
        self._counts.empty += not samples
        for encoded in samples:
            whole = self._without_remarks(encoded)
            if "unreadable" in whole:
                self._counts.unreadable += 1
                continue
            features = self._cut(whole)
            if "labels" in features and (features["labels"] == IGNORE).all():
                self._drop(whole["labels"])
                continue
            if not self._columns:
                self._columns = {name: _Column(self._folder, name, values) for name, values in features.items()}
            self._check(features, where(record))
            for name, column in self._columns.items():
                column.add(features[name])
            self._records.append(record)
            self._counts.samples += 1

    def _without_remarks(self, features: Features) -> Features:
        for name, counts in (("lost", self._counts.lost), ("noted", self._counts.noted)):
            for remark in map(str, features.get(name, ())):
                counts[remark] = counts.get(remark, 0) + 1
        return {name: values for name, values in features.items() if name not in ("lost", "noted")}

    def _drop(self, labels: np.ndarray) -> None:
        if len(labels) < 2:
            self._counts.empty += 1
        elif (labels == IGNORE).all():
            self._counts.masked += 1
        else:
            self._counts.beyond += 1

    def _cut(self, features: Features) -> Features:
        if "cut" in features:
            self._counts.truncated += bool(features["cut"].any())
            return {name: values for name, values in features.items() if name != "cut"}
        size = len(features["input_ids"]) if "input_ids" in features else 0
        if size <= self._length:
            return features
        self._counts.truncated += 1
        return {name: v[: self._length] if v.ndim and len(v) == size else v for name, v in features.items()}

    def _check(self, features: Features, where: str) -> None:
        found = {name: (values.dtype, values.shape[1:]) for name, values in features.items() if values.ndim}
        wanted = {name: (column.dtype, column.tail) for name, column in self._columns.items()}
        if found != wanted:
            raise DataError(
                f"{where}: the encoder gave the features {found}, but {wanted} for the first sample. All samples need "
                "the same features, dtypes and inner shapes, each an array of at least one dimension."
            )

    def close(self) -> None:
        for column in self._columns.values():
            column.close()
        np.save(self._folder / "records.npy", np.frombuffer(self._records, dtype=np.int64))
        meta = {"counts": asdict(self._counts), "names": list(self._columns)}
        (self._folder / "store.json").write_text(json.dumps(meta))

    def abandon(self) -> None:
        """Closes the files whatever happened."""
        for column in self._columns.values():
            column.file.close()


__all__ = ["Counts", "Store", "encoded", "processor_fingerprint", "store_key"]
