"""Remote stores as files: addresses, how object stores differ, copies of a run's log files, the exported model."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from typer.testing import CliRunner

from fullshard.check import capacity
from fullshard.check.remote_store import look as check
from fullshard.checkpoint import folder as files
from fullshard.checkpoint import paths
from fullshard.cli import app
from fullshard.errors import CheckpointError, RecipeError, SetupError
from fullshard.recipes.read import read
from tests import bucket
from tests.unit.checkpoint.test_folder import make, names

bucket.install()


@pytest.fixture(params=["bucket", "file", "memory"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A run folder at a store that does not have it yet."""
    addresses = {"bucket": bucket.url(tmp_path / "b"), "file": f"file://{tmp_path}/f", "memory": "memory://m"}
    yield files.place(f"{addresses[request.param]}/runs/run")
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def inside(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_save_is_a_folder_per_step_with_text_files_as_pointers(run: Path) -> None:
    assert files.published(run) == []
    assert files.candidates(run) == []
    for step in (9, 100, 20):
        make(run, step)
    files.point(run, "best", run / "checkpoint-9")
    assert names(run) == ["checkpoint-9", "checkpoint-20", "checkpoint-100"]
    assert (run / "last").read_text() == "checkpoint-20"
    assert files.pointed(run, "best") == run / "checkpoint-9"
    assert [files.step_of(path) for path in files.candidates(run)] == [20, 9, 100]
    files.tidy(run, keep=1)
    assert names(run) == ["checkpoint-9", "checkpoint-20", "checkpoint-100"]
    make(run, 101)
    files.tidy(run, keep=1)
    assert inside(run) == ["best", "checkpoint-101", "checkpoint-9", "last"]


def test_a_name_means_a_checkpoint_a_pointer_or_a_run(run: Path) -> None:
    path = make(run, 3)
    make(run, 4)
    files.point(run, "best", path)
    for named, step in ((path, 3), (run / "best", 3), (run / "last", 4), (run, 4)):
        assert files.step_of(files.named(str(named))) == step
    with pytest.raises(CheckpointError, match=r"checkpoint-5: no such folder. Checkpoints in .*: .*checkpoint-4"):
        files.named(str(run / "checkpoint-5"))
    (path / files.MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="it has no manifest.json"):
        files.named(str(path))


def test_a_checkpoint_without_a_manifest_is_ignored_and_removed_by_the_next_save(run: Path) -> None:
    make(run, 1)
    target = files.begin(run, 2)
    (target / "__0_0.distcp").write_text("half")
    assert names(run) == ["checkpoint-1"]
    make(run, 3)
    assert inside(run) == ["checkpoint-1", "checkpoint-3", "last"]


def test_a_damaged_pointer_is_ignored(run: Path) -> None:
    make(run, 1)
    for text in ("", "checkpoint-", "..", "checkpoint-7"):
        (run / "last").write_text(text)
        assert files.pointed(run, "last") is None
    assert names(run) == ["checkpoint-1"]


def test_saving_a_step_again_replaces_it_and_a_kill_loses_nothing(run: Path) -> None:
    make(run, 5, content="old")
    target = files.begin(run, 5)
    (target / "__0_0.distcp").write_text("half of the new")
    assert names(run) == [], "from here on the step is being written"
    files.recover(run)
    assert names(run) == ["checkpoint-5"]
    assert (run / "checkpoint-5" / "__0_0.distcp").read_text() == "old"
    assert inside(make(run, 5, content="new")) == ["__0_0.distcp", files.MANIFEST, files.STATE]
    assert (run / "checkpoint-5" / "__0_0.distcp").read_text() == "new"
    assert inside(run) == ["checkpoint-5", "last"]


def test_a_partial_copy_is_not_a_checkpoint(run: Path) -> None:
    make(run, 5, content="old")
    paths.copy(run / "checkpoint-5", run / ".unfinished-old-checkpoint-5", last=files.MANIFEST)
    (run / ".unfinished-old-checkpoint-5" / files.MANIFEST).unlink()
    (run / "checkpoint-5" / "__0_0.distcp").write_text("kept")
    files.recover(run)
    assert (run / "checkpoint-5" / "__0_0.distcp").read_text() == "kept"
    files.tidy(run, keep=None)
    assert inside(run) == ["checkpoint-5", "last"]


def test_starting_over_moves_the_run_aside(run: Path) -> None:
    assert files.set_aside(run) is None
    for number in (1, 2):
        make(run, number)
        assert files.set_aside(run) == run.with_name(f"run.old-{number}")
        assert not run.exists()
    assert names(run.with_name("run.old-1")) == ["checkpoint-1"]
    assert inside(run.with_name("run.old-2") / "checkpoint-2") == ["__0_0.distcp", files.MANIFEST, files.STATE]


def test_cached_listings_do_not_hide_what_another_process_wrote(tmp_path: Path) -> None:
    address = f"{bucket.url(tmp_path / 'b')}/run"
    run = files.place(address)
    make(run, 1)
    assert names(run) == ["checkpoint-1"]
    other: Any = bucket.Bucket(skip_instance_cache=True)  # as another process: it shares the objects and nothing else
    for name in (files.MANIFEST, files.STATE):
        other.pipe_file(f"{address}/checkpoint-2/{name}", b"{}")
    assert names(files.place(address)) == ["checkpoint-1", "checkpoint-2"]
    assert names(run) == ["checkpoint-1", "checkpoint-2"]
    assert (run / "checkpoint-2" / files.STATE).exists()


def test_log_files_are_copied_to_the_store_and_back(run: Path, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    (here / "metrics.jsonl").write_text("1\n2\n")
    (here / "other.bin").write_text("stays")
    paths.make(run)
    paths.send_texts(here, run, warn=pytest.fail)
    paths.fetch_texts(there, run)
    assert inside(there) == ["metrics.jsonl"]
    (here / "metrics.jsonl").write_text("1\n2\n3\n")  # lost its machine before the next copy, and came back
    paths.fetch_texts(here, run)
    assert (here / "metrics.jsonl").read_text() == "1\n2\n3\n"
    (there / "metrics.jsonl").write_text("1\n2\nthree\nfour\n")  # the run has gone on elsewhere since
    paths.send_texts(there, run, warn=pytest.fail)
    paths.fetch_texts(here, run)
    assert (here / "metrics.jsonl").read_text() == "1\n2\nthree\nfour\n"


def test_log_files_that_cannot_be_copied_are_reported_and_the_run_continues(tmp_path: Path) -> None:
    run = files.place(f"{bucket.url(tmp_path / 'b')}/run")
    (tmp_path / "b" / bucket.REFUSING).write_text("metrics.jsonl")
    for name in ("metrics.jsonl", "log.txt"):
        (tmp_path / name).write_text("x")
    said: list[str] = []
    paths.send_texts(tmp_path, run, warn=said.append)
    assert len(said) == 1
    assert said[0].startswith(f"metrics.jsonl could not be copied to {run} (LibraryError: 503 SlowDown")
    assert inside(run) == ["log.txt"]


def test_a_model_counts_as_exported_when_its_upload_is_complete(run: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    (model / "deep").mkdir(parents=True)
    for name in ("config.json", "deep/weights.bin"):
        (model / name).write_text(name)
    paths.upload_model(model, run)
    assert paths.is_exported(run)
    assert (run / "model" / "deep" / "weights.bin").read_text() == "deep/weights.bin"
    (model / "config.json").unlink()
    paths.upload_model(model, run)
    assert inside(run / "model") == ["deep"], "what was there before has gone"


def test_a_partial_upload_is_not_a_model(tmp_path: Path) -> None:
    run = files.place(f"{bucket.url(tmp_path / 'b')}/run")
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "weights.bin"):
        (model / name).write_text(name)
    paths.upload_model(model, run)
    (tmp_path / "b" / bucket.REFUSING).write_text("weights")
    with pytest.raises(bucket.LibraryError):
        paths.upload_model(model, run)
    assert (run / "model").exists()
    assert not paths.is_exported(run)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("s3://bucket/runs", r"s3://bucket/runs needs the package s3fs, .*pip install 'fullshard\[s3\]'"),
        ("gs://bucket/runs", r"gs://bucket/runs needs the package gcsfs, .*pip install 'fullshard\[gcs\]'"),
        ("abfs://box/runs", r"abfs://box/runs: abfs:// needs a package that is not installed \(.*adlfs"),
        ("nosuch://bucket/runs", r"nosuch:// is not a known kind of store .*Use s3://, gs://"),
    ],
)
def test_a_store_that_cannot_be_opened_says_what_is_missing(address: str, said: str) -> None:
    with pytest.raises(SetupError, match=said):
        files.place(address)


def test_any_store_that_fsspec_knows_is_accepted_without_a_warning() -> None:
    fsspec.register_implementation("ownstore", MemoryFileSystem, clobber=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert files.is_remote(files.place("ownstore://a/b"))


def test_errors_of_a_stores_library_become_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise bucket.LibraryError("no route to host")

    address = f"{bucket.url(tmp_path / 'b')}/run"
    make(files.place(address), 1)
    monkeypatch.setattr(bucket.Bucket, "ls", refuse)
    monkeypatch.setattr(bucket.Bucket, "_open", refuse)
    run = files.place(address)
    for act in (lambda: files.named(address), lambda: files.candidates(run), lambda: files.read_state(run)):
        with pytest.raises(CheckpointError, match=r"cannot be used \(LibraryError: no route to host\). Check the addr"):
            act()


# Settings


def settings(**changes: Any) -> dict[str, Any]:
    return {"model": {"path": "m"}, "data": {"train": "t.jsonl"}, **changes}


def test_an_output_that_is_an_address_is_the_store_and_the_local_folder_stays() -> None:
    recipe = read(settings(output="memory://box/runs/", name="a")).recipe
    assert (recipe.folder, str(recipe.checkpoints)) == (Path("runs/a"), "memory://box/runs/a")
    assert recipe == read(settings(name="a", checkpoint={"store": "memory://box/runs/"})).recipe
    assert read(settings(name="a")).recipe.checkpoints == Path("runs/a")


def test_output_on_the_command_line_may_be_an_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("model: {path: m}\ndata: {train: t.jsonl}\ntopology: {device: cpu}\n")
    seen: list[Any] = []

    def train(reading: Any, **_: Any) -> int:
        seen.append(reading.recipe)
        return 0

    monkeypatch.setattr("fullshard.run.train", train)
    result = CliRunner().invoke(app, ["train", str(tmp_path / "r.yaml"), "--output", "memory://box/runs"])
    assert result.exit_code == 0, result.output
    assert str(seen[0].checkpoints) == "memory://box/runs/run"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"output": "memory://a", "checkpoint": {"store": "memory://b"}}, "are two stores; give one of them"),
        ({"output": Path("s3://a/runs")}, "output = 's3:/a/runs' is a URL that has lost a slash"),
        ({"checkpoint": {"store": "/a/runs"}}, "is not a URL like s3://bucket/runs"),
        ({"output": "memory://a", "checkpoint": {"format": "full"}}, "cannot be read in part from a remote store"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(said)):
        read(settings(**changes))


# Checks


def test_a_check_tries_the_store_and_leaves_nothing(tmp_path: Path) -> None:
    addresses = [bucket.url(tmp_path / "b"), f"file://{tmp_path}/f/deep", "memory://checked"]
    for address in addresses:
        [found] = check(read(settings(output=address)).recipe, num_ranks=1)
        assert (found.level, found.check) == ("ok", "store"), found
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "b"]
    assert list(check(read(settings()).recipe, num_ranks=1)) == []


def test_a_store_that_does_not_answer_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_go = threading.Event()
    monkeypatch.setattr(bucket.Bucket, "_open", lambda *_, **__: let_go.wait(30))
    [found] = check(read(settings(output=bucket.url(tmp_path / "b"))).recipe, num_ranks=1, patience_s=0.2)
    let_go.set()
    assert found.level == "error"
    assert "writing and reading back a small file failed (TimeoutError: no answer within 0.2 s)" in found.text


def test_with_a_store_no_disk_space_is_needed_for_checkpoints(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=5_000))
    model = capacity.ModelSize(1_000, 1_000)
    [local] = capacity.disk(read(settings(output=str(tmp_path))).recipe, model)
    assert local.level == "error"
    away, here = capacity.disk(read(settings(output="memory://box")).recipe, model)
    assert "a checkpoint takes 11.7 KiB, 5 of them at memory://box" in away.text
    assert here.level == "ok"
    assert "needed for the export" in here.text
