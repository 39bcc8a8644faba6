"""`fullshard verify`, in process: what it finds and prints."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from fullshard.checkpoint import folder as files
from fullshard.checkpoint import integrity
from fullshard.checkpoint.reader import open_tensors
from fullshard.cli import app
from fullshard.commands.verify import problems
from fullshard.control.resume import choose
from fullshard.errors import CheckpointError
from tests.unit.checkpoint.handmade import FORMATS, make, seal, tensors

DATA = {"sharded": "__0_0.distcp", "full": "model.safetensors"}


def verify(*words: Any) -> Result:
    result = CliRunner().invoke(app, ["verify", *map(str, words)])
    assert "Traceback" not in result.output
    assert isinstance(result.exception, (SystemExit, type(None))), result.exception
    return result


def json_of(result: Result) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "flipped": (flip, "was changed: the checksum of its {size:,} bytes differs from what was written"),
    "truncated": (cut, "is {less:,} bytes long, but was written with {size:,}"),
    "missing": (Path.unlink, "is missing"),
}


@pytest.mark.parametrize("format", FORMATS)
def test_a_complete_checkpoint_exits_with_0_and_is_not_changed(tmp_path: Path, format: str) -> None:
    path = make(tmp_path, format=format)
    before = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in tmp_path.rglob("*")}
    result = verify(path)
    assert result.exit_code == 0, result.output
    num_files = len(list(path.iterdir())) - 1
    assert result.output.startswith(f"✓ {path} is intact: {num_files} files, ")
    assert f"{len(tensors())} tensors, every checksum matches" in result.output
    assert {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("format", FORMATS)
def test_damage_exits_with_2_and_names_the_file(tmp_path: Path, format: str, kind: str) -> None:
    path = make(tmp_path, format=format)
    harm, words = DAMAGE[kind]
    file = path / DATA[format]
    size = file.stat().st_size
    harm(file)
    result = verify(path)
    assert result.exit_code == 2
    assert result.output == f"✗ {path} is DAMAGED\n    {file} {words.format(size=size, less=size - 1)}\n"


@pytest.mark.parametrize("format", FORMATS)
def test_every_damaged_file_is_named_not_only_the_first(tmp_path: Path, format: str) -> None:
    path = make(tmp_path, format=format)
    listed = sorted(files.read_manifest(path)["files"])
    harms: list[Callable[[Path], None]] = [flip, cut, Path.unlink]
    for name, harm in zip(listed, harms, strict=False):
        harm(path / name)
    result = verify(path)
    assert result.exit_code == 2
    assert [line.split()[0] for line in result.output.splitlines()[1:]] == [str(path / name) for name in listed[:3]]


def test_any_flipped_bit_is_found(tmp_path: Path) -> None:
    path = make(tmp_path)
    for name in files.read_manifest(path)["files"]:
        whole = (path / name).read_bytes()
        for place in (0, len(whole) // 3, len(whole) - 1):
            changed = bytearray(whole)
            changed[place] ^= 128
            (path / name).write_bytes(changed)
            assert len(problems(path)) == 1, (name, place)
        (path / name).write_bytes(whole)
    assert problems(path) == []


def test_a_run_folder_is_verified_with_all_of_its_checkpoints(tmp_path: Path) -> None:
    run = tmp_path / "run"
    paths = [make(run, step, format=FORMATS[step % 2]) for step in (2, 4, 9)]
    assert verify(run).exit_code == 0
    flip(paths[1] / files.STATE)
    (run / ".unfinished-checkpoint-12").mkdir()  # not a checkpoint
    result = verify(run)
    assert result.exit_code == 2
    marks = [line.split()[:2] for line in result.output.splitlines() if not line.startswith(" ")]
    assert marks == [["✓", str(paths[0])], ["✗", str(paths[1])], ["✓", str(paths[2])]]
    assert str(paths[1] / files.STATE) in result.output


def test_best_and_last_are_what_they_point_to(tmp_path: Path) -> None:
    best, last = make(tmp_path, 3, point="best"), make(tmp_path, 8)
    cut(last / "__0_0.distcp")
    assert verify(tmp_path / "best").output.startswith(f"✓ {best.resolve()} is intact")
    result = verify(tmp_path / "last")
    assert result.exit_code == 2
    assert result.output.startswith(f"✗ {last.resolve()} is DAMAGED")
    shutil.rmtree(last)
    result = verify(tmp_path / "last")
    assert result.exit_code == 2
    assert f"Checkpoints in {tmp_path}: {best}" in result.output


def test_json_output_has_the_same_findings(tmp_path: Path) -> None:
    paths = [make(tmp_path, step) for step in (1, 2)]
    (paths[1] / "__0_0.distcp").unlink()
    result = verify(tmp_path, "--json")
    assert result.exit_code == 2
    assert json_of(result) == {
        "whole": False,
        "checkpoints": [
            {"checkpoint": str(paths[0]), "whole": True, "problems": []},
            {"checkpoint": str(paths[1]), "whole": False, "problems": [f"{paths[1] / '__0_0.distcp'} is missing"]},
        ],
    }
    result = verify(paths[0], "--json")
    assert (result.exit_code, json_of(result)["whole"]) == (0, True)


def test_a_path_that_is_not_a_checkpoint_is_an_error_in_one_line(tmp_path: Path) -> None:
    path = make(tmp_path / "run")
    for wrong in (tmp_path / "nowhere", tmp_path, path / files.STATE):
        result = verify(wrong)
        assert result.exit_code == 2, wrong
        assert result.output.startswith(f"Error: {wrong}: "), result.output
        assert result.output.count("\n") == 1
    (path / files.MANIFEST).unlink()
    assert "not a finished checkpoint (it has no manifest.json)" in verify(path).output


def test_files_that_the_manifest_does_not_list_are_mentioned(tmp_path: Path) -> None:
    path = make(tmp_path)
    (path / "notes.txt").write_text("mine")
    (path / "processor").mkdir()
    (path / "processor" / "more.json").write_text("{}")
    result = verify(path)
    assert result.exit_code == 0
    assert "not part of it: notes.txt, processor/more.json" in result.output


@pytest.mark.parametrize("format", FORMATS)
def test_a_manifest_that_lists_other_tensors_is_damage(tmp_path: Path, format: str) -> None:
    path = make(tmp_path, format=format)
    listed = files.read_manifest(path)["tensors"]
    missing, added = "model/head.bias", "model/tail.weight"
    wrong = {name: entry for name, entry in listed.items() if name != missing}
    wrong[added] = {"shape": [1], "dtype": "float32"}
    wrong["model/head.weight"] = {"shape": [4, 6], "dtype": "float32"}
    seal(path, tensors=wrong)
    result = verify(path)
    assert result.exit_code == 2
    assert f"{missing}: listed as None, stored as {listed[missing]}" in result.output
    assert f"{added}: listed as {wrong[added]}, stored as None" in result.output
    assert "model/head.weight: listed as {'shape': [4, 6]" in result.output
    seal(path, tensors={name: {**entry, "dtype": "float16"} for name, entry in listed.items()})
    assert verify(path).exit_code == 2


@pytest.mark.parametrize("wrong", [None, 3, ["model/head.weight"], {"model/head.weight": 3}], ids=repr)
def test_a_manifest_with_unreadable_tensors_is_damage(tmp_path: Path, wrong: Any) -> None:
    path = make(tmp_path)
    seal(path, tensors=wrong)
    result = verify(path)
    assert result.exit_code == 2
    assert "is DAMAGED" in result.output


def test_the_format_that_the_manifest_names_must_be_the_one_that_is_stored(tmp_path: Path) -> None:
    for format, other in (FORMATS, FORMATS[::-1]):
        path = make(tmp_path, format=format)
        result = verify(seal(path, format=other))
        assert result.exit_code == 2
        assert "cannot be read" in result.output


def stored_by(checkpoint: Path, **changes: Any) -> Path:
    """The same checkpoint with another manifest: None takes a key away."""
    manifest = json.loads((checkpoint / files.MANIFEST).read_text()) | changes
    kept = {key: value for key, value in manifest.items() if value is not None}
    (checkpoint / files.MANIFEST).write_text(json.dumps(kept))
    return checkpoint


@pytest.mark.parametrize("format", FORMATS)
def test_a_checkpoint_has_a_version_and_without_one_it_is_version_1(tmp_path: Path, format: str) -> None:
    path = make(tmp_path, format=format)
    assert files.read_manifest(path)["version"] == files.VERSION
    assert files.read_manifest(path)["fullshard"]
    old = stored_by(path, version=None, fullshard=None)
    assert problems(old) == []
    assert files.read_state(old)["progress"] == {"step": 4}


@pytest.mark.parametrize("format", FORMATS)
def test_a_newer_checkpoint_is_refused_by_every_command_with_the_version_that_wrote_it(
    tmp_path: Path, format: str
) -> None:
    path = stored_by(make(tmp_path, 9, format=format), version=99, fullshard="7.1.0")
    make(tmp_path, 4)
    files.point(tmp_path, "last", path)
    words = "was written by fullshard 7.1.0 in version 99 of the checkpoint format, and this fullshard"
    result = verify(path)
    assert result.exit_code == 2
    assert words in result.output
    assert "DAMAGED" not in result.output
    for read in (files.read_state, files.read_manifest, open_tensors):
        with pytest.raises(CheckpointError, match=re.escape(words)):
            read(path)
    # A run does not go on from the older one beside it, and give up what was trained since.
    warned: list[str] = []
    with pytest.raises(CheckpointError, match=re.escape(words)) as refused:
        choose(files.candidates(tmp_path), "auto", problems=integrity.problems, warn=warned.append)
    assert "pip install --upgrade fullshard" in str(refused.value)
    assert warned == []
    exported = CliRunner().invoke(app, ["export", str(path), str(tmp_path / "out")])
    assert exported.exit_code == 2
    assert "written by fullshard 7.1.0" in " ".join(exported.output.split())


@pytest.mark.parametrize("version", ["1", 0, -3, 1.5, True, []])
def test_a_version_that_is_not_a_number_is_damage(tmp_path: Path, version: Any) -> None:
    assert "versions are whole numbers" in problems(stored_by(make(tmp_path), version=version))[0]


@pytest.mark.parametrize("format", FORMATS)
def test_train_and_verify_agree_on_what_is_complete(tmp_path: Path, format: str) -> None:
    path = make(tmp_path, format=format)
    listed = files.read_manifest(path)["tensors"]
    name = next(iter(listed))
    stored_by(path, tensors={key: entry for key, entry in listed.items() if key != name})
    assert verify(path).exit_code == 2
    with pytest.raises(CheckpointError, match=f"{name}: listed as None"):
        choose([path], "auto", problems=integrity.problems, warn=lambda line: None)
    # On several ranks one of them finds it.
    shares = [integrity.problems(path, rank=rank, world=3) for rank in range(3)]
    assert [bool(found) for found in shares] == [True, False, False]
