"""Malicious checkpoints with matching manifests: they are refused, and nothing in them ever runs."""

from __future__ import annotations

import io
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from typer.testing import CliRunner

from fullshard.checkpoint import folder as files
from fullshard.checkpoint import integrity
from fullshard.checkpoint.dcp_files import METADATA, Reader
from fullshard.checkpoint.integrity import problems as look
from fullshard.checkpoint.reader import open_tensors
from fullshard.cli import app
from fullshard.control.resume import resume_point
from fullshard.errors import CheckpointError
from tests.unit.checkpoint.handmade import make, seal, tensors

WEIGHT = "model/head.weight"
RAN = "it-ran"


@pytest.fixture(autouse=True)
def _nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every payload makes a file in the current folder."""
    monkeypatch.chdir(tmp_path)
    pickle.dumps(Metadata({}))  # which leaves a note on the class
    known = dict(vars(Metadata))
    yield
    assert not (tmp_path / RAN).exists(), "code from a checkpoint has run"
    assert dict(vars(Metadata)) == known, "a class was changed"


class Payload:
    """Runs a call when it is unpickled."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def touch() -> Payload:
    return Payload(os.system, f"touch {RAN}")


def metadata_of(checkpoint: Path) -> Metadata:
    found: Metadata = pickle.loads((checkpoint / METADATA).read_bytes())
    return found


def by_name(module: str, name: str, *args: str) -> bytes:
    """A pickle that calls what a module has under a name, dotted or not, as protocol 4 allows."""
    pieces = [b"\x80\x04", *(_text(word) for word in (module, name)), b"\x93"]
    return b"".join([*pieces, b"(", *(_text(word) for word in args), b"tR."])


def _text(word: str) -> bytes:
    return b"\x8c" + bytes([len(word.encode())]) + word.encode()


def onto_class(state: Any) -> bytes:
    """A pickle that sets attributes of a class that it may name."""
    body = pickle.dumps(state, protocol=4)[2:-1]
    return b"\x80\x04" + _text("torch.distributed.checkpoint.metadata") + _text("Metadata") + b"\x93" + body + b"b."


def inside_known(place: str) -> Callable[[Path], bytes]:
    """The real metadata with a payload in one of its fields."""

    def spoil(checkpoint: Path) -> bytes:
        metadata: Any = metadata_of(checkpoint)
        if place == "planner_data":
            metadata.planner_data = touch()
        elif place == "properties":
            metadata.state_dict_metadata[WEIGHT].properties = touch()
        else:
            metadata.storage_meta = [touch()]
        return pickle.dumps(metadata)

    return spoil


def fixed(content: bytes) -> Callable[[Path], bytes]:
    return lambda _: content


PICKLES: dict[str, Callable[[Path], bytes]] = {
    "os.system": fixed(pickle.dumps(touch())),
    "an old protocol": fixed(pickle.dumps(touch(), protocol=0)),
    "eval": fixed(pickle.dumps(Payload(eval, f"open({RAN!r}, 'w')"))),
    "exec": fixed(by_name("builtins", "exec", f"open({RAN!r}, 'w')")),
    "getattr": fixed(pickle.dumps(Payload(getattr, Payload(__import__, "os"), "system"))),
    "in planner_data": inside_known("planner_data"),
    "in a tensor's properties": inside_known("properties"),
    "in storage_meta": inside_known("storage_meta"),
    "a name with dots": fixed(by_name("torch.distributed.checkpoint.metadata", "os.system", f"touch {RAN}")),
    "a known class's globals": fixed(by_name("torch.distributed.checkpoint.metadata", "Metadata.__init__", "x")),
    "a module under torch": fixed(by_name("torch", "os.system", f"touch {RAN}")),
    "Size with dots": fixed(by_name("torch", "Size.__class__", "x")),
    "torch.load": fixed(by_name("torch", "load", RAN)),
    "torch's old unpickler": fixed(by_name("torch.storage", "_load_from_bytes", "x")),
    "pathlib": fixed(by_name("pathlib", "Path.touch", RAN)),
    "another class of the same name": fixed(by_name("tests.small", "Metadata", "x")),
}


@pytest.mark.parametrize("kind", PICKLES)
def test_a_pickle_that_would_run_code_is_refused_everywhere(tmp_path: Path, kind: str) -> None:
    path = make(tmp_path)
    (path / METADATA).write_bytes(PICKLES[kind](path))
    seal(path)
    assert integrity.file_problems(path, files.read_manifest(path)["files"]) == [], "the manifest alone cannot know"
    assert "would run code" in look(path)[0]
    for read in (open_tensors, lambda place: dcp_load(place, tensors())):
        with pytest.raises(CheckpointError, match=rf"{METADATA} would run code.*Do not use this checkpoint"):
            read(path)
    refused_by_verify(path, "would run code when it is loaded")


def dcp_load(path: Path, into: dict[str, torch.Tensor]) -> None:
    """As a resume does it, without other ranks; DCP packs errors into its own."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(into, storage_reader=Reader(path), no_dist=True)
    except CheckpointException as error:
        raise CheckpointError(str(error.failures[0][0])) from None


def refused_by_verify(path: Path, said: str) -> None:
    result = CliRunner().invoke(app, ["verify", str(path)])
    assert result.exit_code == 2
    assert said in result.output
    assert "is DAMAGED" in result.output
    assert "Traceback" not in result.output
    assert isinstance(result.exception, (SystemExit, type(None)))


@pytest.mark.parametrize(
    "state", [(None, {"__init__": 1}), (None, {"storage_data": {}}), {"x": 1}], ids=["method", "attribute", "dict"]
)
def test_a_pickle_cannot_change_the_classes_it_may_name(tmp_path: Path, state: Any) -> None:
    path = make(tmp_path)
    (path / METADATA).write_bytes(onto_class(state))
    with pytest.raises(CheckpointError, match=METADATA):
        open_tensors(seal(path))


def test_data_that_dcp_would_unpickle_as_code_is_refused(tmp_path: Path) -> None:
    """DCP loads what is not described as a tensor without weights_only; here it poses as one by its shape."""
    path = make(tmp_path)
    metadata = metadata_of(path)
    bytes_entry: Any = BytesStorageMetadata()
    bytes_entry.__dict__.update(vars(metadata.state_dict_metadata[WEIGHT]))
    metadata.state_dict_metadata[WEIGHT] = bytes_entry
    plant(path, metadata, WEIGHT, touch(), offset=None)
    for read in (open_tensors, lambda place: dcp_load(place, tensors())):
        with pytest.raises(CheckpointError, match=f"describes {WEIGHT} as BytesStorageMetadata"):
            read(path)
    refused_by_verify(path, "BytesStorageMetadata")


def plant(path: Path, metadata: Metadata, name: str, content: Any, *, offset: tuple[int, ...] | None) -> None:
    """Puts something else where a tensor was stored, and makes metadata and manifest fit."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    [old] = [key for key in metadata.storage_data if key.fqn == name]
    info, file = metadata.storage_data.pop(old), path / "__0_0.distcp"
    key = type(old)(name, offset)
    metadata.storage_data[key] = type(info)(info.relative_path, file.stat().st_size, len(buffer.getvalue()))
    with file.open("ab") as end:
        end.write(buffer.getvalue())
    (path / METADATA).write_bytes(pickle.dumps(metadata))
    seal(path)


@pytest.mark.parametrize(
    "content", [touch(), {"weight": touch()}, [torch.zeros(6, 4), touch()]], ids=["bare", "dict", "list"]
)
def test_a_hostile_piece_of_a_tensor_is_refused(tmp_path: Path, content: Any) -> None:
    path = make(tmp_path)
    plant(path, metadata_of(path), WEIGHT, content, offset=(0, 0))
    stored = open_tensors(path)
    with pytest.raises(CheckpointError, match=r"__0_0.distcp cannot be read at byte \d+: Weights only load failed"):
        stored.whole(WEIGHT)
    with pytest.raises(CheckpointError, match="Weights only load failed"):
        dcp_load(path, tensors())


def test_a_piece_that_is_not_a_tensor_is_refused(tmp_path: Path) -> None:
    path = make(tmp_path)
    plant(path, metadata_of(path), WEIGHT, {"plain": 1}, offset=(0, 0))
    with pytest.raises(CheckpointError, match="found a dict instead of a tensor"):
        open_tensors(path).whole(WEIGHT)


@pytest.mark.parametrize("name", ["../outside.distcp", "/etc/passwd", "sub/file", "..", ""])
def test_metadata_that_names_files_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    path = make(tmp_path)
    metadata = metadata_of(path)
    for info in metadata.storage_data.values():
        info.relative_path = name
    (path / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=f"names {name!r}, outside its own folder. Do not use"):
        open_tensors(seal(path))
    refused_by_verify(path, "outside its own folder")


def test_a_tensor_with_missing_rows_is_refused(tmp_path: Path) -> None:
    path = make(tmp_path)
    metadata: Any = metadata_of(path)
    metadata.state_dict_metadata[WEIGHT].chunks[0].sizes = torch.Size([3, 4])
    (path / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=f"only some of the rows of {WEIGHT}"):
        dcp_load(seal(path), tensors())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"garbage",
        pickle.dumps({"plain": "dict"}),
        pickle.dumps([1] * 99)[:40],
        b"\x80\x04P1\n.",
        b"\x80\x04\x82\x01.",
    ],
    ids=["empty", "garbage", "a dict", "half", "a persistent id", "an extension code"],
)
def test_unreadable_metadata_is_reported_without_a_traceback(tmp_path: Path, content: bytes) -> None:
    path = make(tmp_path)
    (path / METADATA).write_bytes(content)
    with pytest.raises(CheckpointError, match=str(path / METADATA)):
        open_tensors(seal(path))
    refused_by_verify(path, str(path / METADATA))


def test_metadata_with_wrong_field_types_is_reported_without_a_traceback(tmp_path: Path) -> None:
    path = make(tmp_path)
    for place, value in [("storage_data", None), ("storage_data", {1: 2}), ("state_dict_metadata", [3])]:
        metadata = metadata_of(make(tmp_path))
        setattr(metadata, place, value)
        (path / METADATA).write_bytes(pickle.dumps(metadata))
        with pytest.raises(CheckpointError, match=r"cannot be read \((AttributeError|TypeError)"):
            open_tensors(seal(path))


HOSTILE_FILES: dict[str, Any] = {
    "a device": {"/dev/zero": {"size_bytes": 0, "sha256": "0"}},
    "a file elsewhere": {"../../secret": {"size_bytes": 0, "sha256": "0"}},
    "the folder": {".": {"size_bytes": 0, "sha256": "0"}},
    "no size": {"state.json": {"sha256": "0"}},
    "an endless size": {"state.json": {"size_bytes": float("inf"), "sha256": "0"}},
    "a negative size": {"state.json": {"size_bytes": -1, "sha256": "0"}},
    "a size in words": {"state.json": {"size_bytes": "many", "sha256": "0"}},
    "a number as checksum": {"state.json": {"size_bytes": 1, "sha256": 7}},
    "no entry": {"state.json": None},
    "nothing": {},
    "a list": ["state.json"],
}


@pytest.mark.parametrize("kind", HOSTILE_FILES)
def test_a_manifest_with_absurd_entries_is_refused(tmp_path: Path, kind: str) -> None:
    path = make(tmp_path)
    seal(path, files=HOSTILE_FILES[kind])
    [line] = look(path)
    assert str(path / files.MANIFEST) in line or "not a regular file" in line
    refused_by_verify(path, str(path))


def test_a_pipe_in_place_of_a_file_is_not_read(tmp_path: Path) -> None:
    path = make(tmp_path)
    (path / "__0_0.distcp").unlink()
    os.mkfifo(path / "__0_0.distcp")
    assert look(path) == [f"{path}/__0_0.distcp is not a regular file"]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "[" * 100_000, "\xff", '{"files": 3}'],
    ids=["empty", "half", "a list", "null", "nested", "binary", "a number"],
)
def test_an_unreadable_manifest_is_refused(tmp_path: Path, text: str) -> None:
    path = make(tmp_path)
    (path / files.MANIFEST).write_bytes(text.encode("latin-1"))
    assert len(look(path)) == 1
    with pytest.raises(CheckpointError, match="--resume"):
        open_tensors(path)
    refused_by_verify(path, str(path / files.MANIFEST))


STATES: dict[str, tuple[Any, str]] = {
    "no progress": ({}, "progress: Field required"),
    "a list": ({"progress": [1]}, "progress: "),
    "a step in words": ({"progress": {"step": "soon"}}, "progress.step: "),
    "a negative step": ({"progress": {"step": -4}}, "says step -4, but the manifest says step 4"),
    "another step": ({"progress": {"step": 5}}, "says step 5, but the manifest says step 4"),
    "sums in words": ({"progress": {"step": 4, "epoch_sums": {"loss": "x"}}}, "progress.epoch_sums.loss: "),
    "identity": ({"progress": {"step": 4}, "identity": [1]}, "identity: "),
    "recipe": ({"progress": {"step": 4}, "recipe": "rm -rf"}, "recipe: "),
    "optimizer": ({"progress": {"step": 4}, "optimizer": 3}, "optimizer: "),
    "scaler": ({"progress": {"step": 4}, "scaler": {"scale": "big"}}, "scaler.scale: "),
    "frozen": ({"progress": {"step": 4}, "frozen": ["x"]}, "frozen: "),
}


@pytest.mark.parametrize("kind", STATES)
def test_a_state_with_absurd_values_is_refused(tmp_path: Path, kind: str) -> None:
    content, said = STATES[kind]
    path = make(tmp_path)
    files.write_json(path / files.STATE, content)
    with pytest.raises(CheckpointError) as refused:
        resume_point(seal(path), identity={}, recipe={})
    assert said in str(refused.value)
    assert str(path / files.STATE) in str(refused.value)
    assert "--resume" in str(refused.value)
