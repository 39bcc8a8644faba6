"""A run folder's checkpoints as files: names, pointers, retention, what counts as published."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fullshard.checkpoint import folder as files
from fullshard.checkpoint import integrity
from fullshard.errors import CheckpointError


def make(run: Path, step: int, *, content: str = "tensors") -> Path:
    """A published checkpoint, the way a save does it."""
    target = files.begin(run, step)
    (target / "__0_0.distcp").write_text(content)
    described = integrity.describe(target, {"__0_0.distcp": hashlib.sha256(content.encode()).hexdigest()})
    files.write_json(target / files.STATE, {"progress": {"step": step}})
    path = files.publish(run, step, {"step": step, "files": described})
    files.point(run, "last", path)
    return path


def names(run: Path) -> list[str]:
    return [path.name for path in files.published(run)]


def test_published_checkpoints_are_complete_and_in_step_order(tmp_path: Path) -> None:
    for step in (9, 100, 20):
        make(tmp_path, step)
    (tmp_path / "checkpoint-30").mkdir()  # no manifest
    (tmp_path / "checkpoint-final").mkdir()
    files.unfinished(tmp_path, 40).mkdir()
    assert names(tmp_path) == ["checkpoint-9", "checkpoint-20", "checkpoint-100"]


def test_publishing_replaces_an_older_checkpoint_of_the_same_step(tmp_path: Path) -> None:
    make(tmp_path, 5, content="old")
    path = make(tmp_path, 5, content="new")
    assert (path / "__0_0.distcp").read_text() == "new"
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-5", "last"]


def test_pointers_are_links_that_survive_a_move(tmp_path: Path) -> None:
    make(tmp_path / "run", 3)
    files.point(tmp_path / "run", "best", tmp_path / "run" / "checkpoint-3")
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    assert files.pointed(tmp_path / "elsewhere", "best") == tmp_path / "elsewhere" / "checkpoint-3"
    assert os.readlink(tmp_path / "elsewhere" / "best") == "checkpoint-3"


def test_a_dangling_pointer_is_ignored(tmp_path: Path) -> None:
    assert files.pointed(tmp_path, "last") is None
    (tmp_path / "last").symlink_to("checkpoint-7")
    assert files.pointed(tmp_path, "last") is None


@pytest.mark.parametrize(
    ("keep", "best", "kept"),
    [(1, 1, [1, 5]), (2, None, [4, 5]), (2, 2, [2, 4, 5]), (3, 4, [3, 4, 5]), (None, None, [1, 2, 3, 4, 5])],
)
def test_retention_keeps_the_newest_best_and_last(
    tmp_path: Path, keep: int | None, best: int | None, kept: list[int]
) -> None:
    for step in range(1, 6):
        make(tmp_path, step)
    if best:
        files.point(tmp_path, "best", tmp_path / f"checkpoint-{best}")
    files.tidy(tmp_path, keep=keep)
    assert names(tmp_path) == [f"checkpoint-{step}" for step in kept]


def test_retention_never_deletes_last_even_when_it_is_not_the_highest(tmp_path: Path) -> None:
    for step in (10, 20, 4):  # gone on from an earlier one: the last save has the lowest step
        make(tmp_path, step)
    files.tidy(tmp_path, keep=1)
    assert names(tmp_path) == ["checkpoint-4", "checkpoint-20"]


def test_tidying_removes_what_an_interrupted_save_left(tmp_path: Path) -> None:
    make(tmp_path, 1)
    for leftover in (".unfinished-checkpoint-2", ".unfinished-model", ".unfinished-removed-checkpoint-9"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "part").write_text("half")
    files.tidy(tmp_path, keep=None)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-1", "last"]


def test_a_checkpoint_caught_between_the_two_renames_of_its_replacement_comes_back(tmp_path: Path) -> None:
    path = make(tmp_path, 1)
    path.rename(tmp_path / ".unfinished-old-checkpoint-1")
    files.tidy(tmp_path, keep=None)
    assert names(tmp_path) == ["checkpoint-1"]
    shutil.copytree(path, tmp_path / ".unfinished-old-checkpoint-1")  # and goes where the new one made it
    files.tidy(tmp_path, keep=None)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-1", "last"]


def test_auto_resumes_from_the_last_save_and_falls_back_to_older_ones(tmp_path: Path) -> None:
    assert files.candidates(tmp_path) == []
    assert files.candidates(tmp_path / "no such run") == []
    for step in (10, 20):
        make(tmp_path, step)
    assert [files.step_of(p) for p in files.candidates(tmp_path)] == [20, 10]
    make(tmp_path, 15)  # after `--resume checkpoint-10`: 20 is of a life that was given up
    assert [files.step_of(p) for p in files.candidates(tmp_path)] == [15, 10, 20]
    (tmp_path / "last").unlink()
    assert [files.step_of(p) for p in files.candidates(tmp_path)] == [20, 15, 10]


def test_a_named_checkpoint_must_exist_and_be_complete(tmp_path: Path) -> None:
    path = make(tmp_path, 10)
    assert files.named(str(path)) == path.resolve()
    assert files.named(tmp_path / "last") == path.resolve()
    assert files.named(tmp_path) == path.resolve(), "a run folder means its last one"
    with pytest.raises(CheckpointError, match=r"no such folder. Checkpoints in .*: .*checkpoint-10"):
        files.named(str(tmp_path / "checkpoint-11"))
    (path / files.MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=r"not a finished checkpoint .*Checkpoints in .*: none"):
        files.named(str(path))


def test_the_manifest_has_sizes_and_checksums(tmp_path: Path) -> None:
    manifest = json.loads((make(tmp_path, 1, content="abc") / files.MANIFEST).read_text())
    digest = hashlib.sha256(b"abc").hexdigest()
    assert manifest["files"] == {"__0_0.distcp": {"size_bytes": 3, "sha256": digest}}


def test_damage_is_named_by_file(tmp_path: Path) -> None:
    path = make(tmp_path, 1, content="tensors")
    described = files.read_manifest(path)["files"]
    assert integrity.file_problems(path, described) == []
    (path / "__0_0.distcp").write_text("tensorS")
    assert integrity.file_problems(path, described, checksums=False) == []
    [line] = integrity.file_problems(path, described)
    assert line.startswith(f"{path}/__0_0.distcp was changed")
    (path / "__0_0.distcp").write_text("tens")
    assert integrity.file_problems(path, described) == [f"{path}/__0_0.distcp is 4 bytes long, but was written with 7"]
    (path / "__0_0.distcp").unlink()
    assert integrity.file_problems(path, described) == [f"{path}/__0_0.distcp is missing"]


def test_each_rank_checks_a_share_of_the_files(tmp_path: Path) -> None:
    described = {f"f{i}": {"size_bytes": i} for i in range(7)}
    shares = [integrity.share(described, rank=rank, world=3) for rank in range(3)]
    assert sorted(name for share in shares for name in share) == sorted(described)


def test_a_folder_without_state_is_not_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a fullshard checkpoint: state.json cannot be read"):
        files.read_state(tmp_path)
    (tmp_path / files.STATE).write_text("{half")
    with pytest.raises(CheckpointError, match="--resume never"):
        files.read_state(tmp_path)


def test_starting_over_moves_an_earlier_run_aside(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert files.set_aside(run) is None
    run.mkdir()
    assert files.set_aside(run) is None, "an empty folder is not a run"
    for number in (1, 2):
        make(run, number)
        assert files.set_aside(run) == tmp_path / f"run.old-{number}"
        assert not run.exists()
    assert names(tmp_path / "run.old-1") == ["checkpoint-1"]


HOLD = """
import sys
from pathlib import Path
from fullshard.checkpoint.folder import claim
lock = claim(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_run_folder_has_one_run_at_a_time(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-c", HOLD, str(run)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        for _ in range(2):  # being refused must not spoil what the next one reads
            with pytest.raises(CheckpointError) as refused:
                files.claim(run)
            message = rf"{run} is in use by process {other.pid} on \S+ since [\d: -]+\. Wait for it, stop it, or choose"
            assert re.match(message, str(refused.value))
        other.kill()
    files.claim(run).close()
    assert str(os.getpid()) in (tmp_path / ".run.lock").read_text()
    assert os.listdir(tmp_path) == [".run.lock"], "the lock is beside the folder, which is not made"
