"""Encoded samples on disk: one flat memory-mapped array for each feature, with the offset of every sample.

The name of a store is a hash of the records, the encoder and the tokenizer. One process per node builds it while the
others wait; a rename publishes it when it is complete. Must not know ranks, batches or what a feature means.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np
from filelock import FileLock, Timeout

from fullshard.config.part import plain
from fullshard.contracts.data import Encoded, Features, OpenEncoder, Records
from fullshard.data.records import combine, digest, named
from fullshard.errors import DataError
from fullshard.formatting.plural import counted

_VERSION = 5
_HELPERS = ("fullshard.data.", "fullshard.text.", "fullshard.images.", "fullshard.multimodal.", "fullshard.families.")
"""Packages with code that encoders share."""
_SHARED = "shared.npz"
_BATCH = 256
_EVERY_S = 2.0


@dataclass
class Counts:
    """What encoding did with the records."""

    records: int = 0
    samples: int = 0
    truncated: int = 0
    """Samples cut at the sequence length."""
    drop_reasons: Counter[str] = field(default_factory=Counter)
    """Samples left out, by reason."""
    fixes: dict[str, str] = field(default_factory=dict)
    """What to do about each reason."""
    lost: Counter[str] = field(default_factory=Counter)
    """Records whose samples lack something, by what is missing."""
    noted: Counter[str] = field(default_factory=Counter)
    """Remarks of the encoder, with the number of records each applies to."""

    @property
    def dropped(self) -> int:
        return sum(self.drop_reasons.values())

    def add(self, encoded: Encoded) -> None:
        self.records += 1
        self.samples += len(encoded.samples)
        self.truncated += encoded.truncated
        self.fixes |= {drop.reason: drop.fix for drop in encoded.dropped}
        self.drop_reasons.update(drop.reason for drop in encoded.dropped)
        self.lost.update(encoded.lost)
        self.noted.update(encoded.noted)


class Store:
    """Samples by index, read from disk on access."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        meta = json.loads((folder / "store.json").read_text())
        self.counts = Counts(**meta["counts"])
        self.records: np.ndarray = np.load(folder / "records.npy")
        """The record each sample was made from."""
        self.names: list[str] = meta["names"]
        self._columns = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in self.names}
        self._starts = {name: np.load(folder / f"{name}.starts.npy", mmap_mode="r") for name in self.names}
        length_feature = next((name for name in (meta["length_feature"], *self.names) if name in self._starts), None)
        self.lengths: np.ndarray = self.sizes(length_feature) if length_feature else np.zeros(0, dtype=np.int64)
        """Tokens of each sample, or entries of the first feature if it has no tokens."""

    def __getstate__(self) -> Path:
        # Pickling a memory map would copy the data to every loader process.
        return self.folder

    def __setstate__(self, folder: Path) -> None:
        Store.__init__(self, folder)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Features:
        return self.slice(index, 0, None)

    @property
    def shared(self) -> Features:
        file = self.folder / _SHARED
        if not file.is_file():
            return {}
        with np.load(file) as found:
            return {name: found[name] for name in found.files}

    def sizes(self, name: str) -> np.ndarray:
        return np.asarray(np.diff(self._starts[name]))

    def flat(self, name: str) -> np.ndarray:
        return np.asarray(self._columns[name])

    def slice(self, index: int, start: int, stop: int | None) -> Features:
        """Positions `start` to `stop` of each feature of one sample."""
        ends = {name: starts[index : index + 2] for name, starts in self._starts.items()}
        return {name: np.array(column[slice(*ends[name])][start:stop]) for name, column in self._columns.items()}


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
        # These two hold the settings of the last call.
        model.pop("truncation", None)
        model.pop("padding", None)
        core = json.dumps(model, sort_keys=True)
    else:
        core = json.dumps(sorted(tokenizer.get_vocab().items())) if hasattr(tokenizer, "get_vocab") else repr(tokenizer)
    template = getattr(tokenizer, "chat_template", None)
    special = sorted((k, str(v)) for k, v in getattr(tokenizer, "special_tokens_map", {}).items())
    outer = processor.to_json_string() if processor is not tokenizer and hasattr(processor, "to_json_string") else ""
    parts = [type(processor).__qualname__, core, json.dumps([template, special]), outer]
    if prompts := getattr(processor, "prompts", None):
        parts.append(json.dumps(prompts, sort_keys=True))
    return combine(*parts)


def store_key(records: Records, encoder: OpenEncoder) -> str:
    """The name of a store. Any change of records, settings, code or tokenizer gives it another name."""
    settings = json.dumps(plain(encoder.settings), sort_keys=True)
    parts = [str(_VERSION), records.fingerprint(), settings, _code_of(encoder)]
    parts += [processor_fingerprint(encoder.processor), str(encoder.length)]
    return combine(*parts, *filter(None, [encoder.external_fingerprint(records)]))


def _code_of(encoder: OpenEncoder) -> str:
    """A hash of the encoder's own files, and of the modules of fullshard whose names they use."""
    own = {type(encoder.settings).__module__, type(encoder).__module__}
    things = (thing for name in own if name in sys.modules for thing in vars(sys.modules[name]).values())
    names = {str(getattr(thing, "__name__" if isinstance(thing, ModuleType) else "__module__", "")) for thing in things}
    helpers = (name for name in names if name.startswith(_HELPERS) and name in sys.modules)
    files = [sys.modules[name].__file__ for name in sorted({*own, *helpers}) if name in sys.modules]
    return combine(*(digest(Path(file)) for file in files if file))


def encoded(records: Records, encoder: OpenEncoder, *, cache: Path, say: Callable[[str], None]) -> Store:
    """The store of these records; builds it if the cache does not have it."""
    folder = cache / store_key(records, encoder)
    if folder.is_dir():
        return Store(folder)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{folder}.lock")
        try:
            held = lock.acquire(timeout=0)
        except Timeout:
            say("Waiting for another process that is encoding the same data.")
            held = lock.acquire()
        with held:
            if not folder.is_dir():
                _build(folder, records, encoder, say=say)
    except OSError as error:
        raise DataError(
            f"{cache}: encoded data cannot be written here: {error.strerror or error}. Free some space, or set "
            "data.cache to another folder."
        ) from error
    return Store(folder)


def _build(folder: Path, records: Records, encoder: OpenEncoder, *, say: Callable[[str], None]) -> None:
    for stale in folder.parent.glob(f"{folder.name}.tmp-*"):
        shutil.rmtree(stale, ignore_errors=True)
    temporary = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    temporary.mkdir()
    writer = _Writer(temporary)
    begun = said = time.monotonic()
    try:
        for start in range(0, len(records), _BATCH):
            indices = range(start, min(start + _BATCH, len(records)))
            for index, found in zip(indices, _encode(records, indices, encoder), strict=True):
                writer.add(index, found, where=records.where)
            now, done, total = time.monotonic(), indices[-1] + 1, len(records)
            if now - said >= _EVERY_S and done < total:
                said, left = now, (now - begun) / done * (total - done)
                say(f"Encoding: {done:,} of {counted(total, 'record')} ({done / total:.0%}), about {left:.0f} s left.")
        if shared := encoder.shared_features():
            np.savez(temporary / _SHARED, **shared)  # type: ignore[arg-type, unused-ignore]
        writer.finish(length_feature=encoder.settings.length_feature)
        os.rename(temporary, folder)
    finally:
        writer.close()
        shutil.rmtree(temporary, ignore_errors=True)


def _encode(records: Records, indices: range, encoder: OpenEncoder) -> list[Encoded]:
    batch = [records[index] for index in indices]
    try:
        return encoder.encode_many(batch)
    except Exception:
        # One by one, to name the record that fails.
        for index, record in zip(indices, batch, strict=True):
            with named(records, index, record):
                encoder.encode_many([record])
        raise


class _Writer:
    """Appends samples to a new store, one .npy file for each feature, and counts them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shapes: dict[str, tuple[Any, tuple[int, ...]]] = {}
        self._starts: dict[str, array[int]] = {}
        self._files: dict[str, BinaryIO] = {}
        self._records = array("q")
        self._counts = Counts()

    def add(self, record: int, encoded: Encoded, *, where: Callable[[int], str]) -> None:
        self._counts.add(encoded)
        for features in encoded.samples:
            if not self._shapes:
                self._shapes = {name: (values.dtype, values.shape[1:]) for name, values in features.items()}
                for name in features:
                    self._starts[name] = array("q", [0])
                    self._files[name] = open(self._folder / f"{name}.npy", "wb")  # noqa: SIM115  (closed below)
                    self._write_header(name)
            found = {name: (values.dtype, values.shape[1:]) for name, values in features.items() if values.ndim}
            if found != self._shapes:
                raise DataError(
                    f"{where(record)}: the encoder gave the features {found}, but {self._shapes} for the first sample. "
                    "All samples need the same features, dtypes and inner shapes, each an array of at least one "
                    "dimension."
                )
            for name, values in features.items():
                self._files[name].write(np.ascontiguousarray(values).tobytes())
                self._starts[name].append(self._starts[name][-1] + len(values))
            self._records.append(record)

    def _write_header(self, name: str) -> None:
        """Written twice: numpy pads a header, so that the final number of rows fits."""
        dtype, inner = self._shapes[name]
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False}
        self._files[name].seek(0)
        np.lib.format.write_array_header_1_0(self._files[name], {**header, "shape": (self._starts[name][-1], *inner)})

    def finish(self, *, length_feature: str) -> None:
        for name, starts in self._starts.items():
            self._write_header(name)
            np.save(self._folder / f"{name}.starts.npy", np.frombuffer(starts, dtype=np.int64))
        self.close()
        np.save(self._folder / "records.npy", np.frombuffer(self._records, dtype=np.int64))
        meta = {"counts": vars(self._counts), "names": list(self._shapes), "length_feature": length_feature}
        (self._folder / "store.json").write_text(json.dumps(meta))

    def close(self) -> None:
        for file in self._files.values():
            file.close()
