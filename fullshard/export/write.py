"""Writes a trained model in one of four forms, under a hidden name until it is complete.

Must not know where tensors come from, nor what any library's files look like inside.
"""

from __future__ import annotations

import contextlib
import inspect
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fullshard.card.facts import Exported
from fullshard.card.write import write_card
from fullshard.checkpoint import folder as files
from fullshard.checkpoint.tensor_files import SafetensorsStream, TensorEntry, TensorStream, in_rows
from fullshard.errors import CheckpointError, SetupError
from fullshard.export.source import Trained

FORMS = ("hf", "adapter", "merged", "state")
SAFE, PICKLED = (".safetensors",), (".pt", ".pth", ".bin")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "original": None}


@dataclass(frozen=True)
class ExportOptions:
    """What the user asked for."""

    form: str
    dtype: str
    shard_bytes: int | None


def choose_form(trained: Trained, form: str | None, out: Path) -> str:
    """The form to write; raises an error that names a fitting one."""
    chosen = form or ("state" if out.suffix in (*SAFE, *PICKLED) else "adapter" if trained.adapters else "hf")
    where = f"--as {chosen}: {trained.checkpoint}"
    if chosen in ("adapter", "merged") and not trained.adapters:
        raise CheckpointError(f"{where} was trained without adapters (model.lora). Use --as hf.")
    if chosen == "hf" and trained.adapters:
        raise CheckpointError(
            f"{where} holds only adapters, not a whole model. Use --as merged for a whole model with the "
            "adapters added to its weights, or --as adapter for the adapters alone."
        )
    if (chosen == "state") != (out.suffix in (*SAFE, *PICKLED)):
        endings = ", ".join((*SAFE, *PICKLED))
        what = f"one file, with a name that ends in {endings}" if chosen == "state" else "a folder, and OUT is a file"
        raise SetupError(f"--as {chosen} writes {what}; found {out}. Change OUT or --as.")
    return chosen


def names_for(trained: Trained, form: str) -> dict[str, TensorEntry]:
    """The tensors that a form needs."""
    entries = trained.entries()
    if form == "adapter":
        return {name: entry for name, entry in entries.items() if name in trained.adapters}
    return entries


def write(trained: Trained, out: Path, options: ExportOptions, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Writes all of `out`, or nothing."""
    with _hidden(out) as hidden:
        if options.form == "state":
            _write_state(hidden, names_for(trained, "state"), tensors, DTYPES[options.dtype])
            return
        wanted = {
            "dtype": DTYPES[options.dtype],
            "shard_bytes": options.shard_bytes,
            "merged": options.form == "merged" or None,
        }
        asked = {key: value for key, value in wanted.items() if value is not None}
        taken = inspect.signature(trained.family.export).parameters
        if foreign := [key for key in asked if key not in taken]:
            words = {"dtype": "--dtype", "shard_bytes": "--shard-size", "merged": "--as merged"}
            raise SetupError(
                f"{words[foreign[0]]} cannot be used with a model of kind {trained.family.kind()!r}: its export does "
                f"not take {foreign[0]}. Leave it out."
            )
        extra: dict[str, Any] = asked
        trained.family.export(trained.module, tensors, hidden, processor=trained.processor, **extra)
        write_card(hidden, _exported(trained, options.form))


def _exported(trained: Trained, form: str) -> Exported:
    """What the card of an export is about."""
    state = files.read_state(trained.checkpoint)
    step = int((state.get("progress") or {}).get("step") or 0)
    form = "whole" if form == "hf" else form
    return Exported(trained.family, trained.module, state, step, form, trained.averaged, run=trained.checkpoint.parent)


def _write_state(
    path: Path, entries: dict[str, TensorEntry], tensors: Iterator[tuple[str, torch.Tensor]], dtype: torch.dtype | None
) -> None:
    """One file with every tensor under the model's own name."""
    if dtype is not None:
        entries = {n: TensorEntry(dtype, e.shape) if e.dtype.is_floating_point else e for n, e in entries.items()}
    kind = SafetensorsStream if path.suffix in SAFE else TorchStream
    with kind(path, entries=entries) as stream:
        for name, tensor in tensors:
            stream.add_rows(name, entries[name], (piece.to(entries[name].dtype) for piece in in_rows(tensor)))


class TorchStream(TensorStream):
    """A torch file with one flat mapping from name to tensor, as `torch.save` writes it; tensors come in any order.

    `torch.load` reads it with `weights_only=True` and with `mmap=True`. Checksums inside the archive are those of
    empty tensors; torch ignores them.
    """

    def __init__(self, path: Path, *, entries: Mapping[str, TensorEntry]) -> None:
        self._offsets = _write_skeleton(path, entries)
        super().__init__(path, entries=entries, mode="r+b")

    def _place(self, name: str, entry: TensorEntry) -> None:
        self._file.seek(self._offsets[name])


def _write_skeleton(path: Path, entries: Mapping[str, TensorEntry]) -> dict[str, int]:
    """Writes the file without its tensors; returns the offset of each."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = {name: torch.empty(entry.shape, dtype=entry.dtype) for name, entry in entries.items()}
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(fake, path)
    with FakeTensorMode():
        loaded = torch.load(path, weights_only=True)
    return {name: tensor.untyped_storage()._checkpoint_offset for name, tensor in loaded.items()}


def free(text: str, checkpoint: Path) -> Path:
    """The path of OUT; raises if it exists or is inside the checkpoint."""
    if "://" in text:
        raise SetupError(f"OUT = {text}: exports go to a local path. Write it here, then copy it there.")
    out = Path(text).expanduser()
    if isinstance(checkpoint, Path) and checkpoint in out.resolve().parents:
        raise SetupError(f"OUT = {out} is inside the checkpoint. Choose a place outside it.")
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise SetupError(f"OUT = {out} exists and is not empty. Choose another name, or remove it first.")
    return out


@contextlib.contextmanager
def _hidden(out: Path) -> Iterator[Path]:
    """A path beside `out` that is renamed to it at the end; removes what an interrupted export left there."""
    # Not .unfinished-*: in a run folder the next save would delete it.
    hidden = out.with_name(f".export-{out.name}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove(hidden)
        yield hidden
        hidden.rename(out)
    except OSError as error:
        raise CheckpointError(
            f"{out} cannot be written ({error.strerror or error}). Check disk space and permissions; nothing was left."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            _remove(hidden)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
