"""Damaged checkpoints on real ranks: a run falls back to the newest complete one, or names the files that are wrong."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from fullshard.checkpoint import folder as files
from fullshard.checkpoint.dcp_files import METADATA, Writer
from fullshard.checkpoint.reader import open_tensors
from fullshard.checkpoint.tensors import tree
from fullshard.commands.verify import problems
from fullshard.log.metrics import FILE, read
from tests.ranks import RankPool
from tests.slow import one_in
from tests.small import curve, model_folder, recipe, token_file, train
from tests.unit.checkpoint.handmade import FORMATS, seal

STEPS = 5
DATA = {"sharded": "__1_0.distcp", "full": "optimizer.safetensors"}
SMALL: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(scope="module")
def folder(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each format that nothing happened to, with a checkpoint at every step."""
    path = tmp_path_factory.mktemp("damage")
    model_folder(path / "model", **SMALL)
    token_file(path / "train.jsonl", records=90)
    for format in FORMATS:
        ranks.run(train, settings(path, format, format), world=2)
    return path


def settings(folder: Path, name: str, format: str) -> dict[str, Any]:
    return recipe(
        folder,
        name=name,
        duration={"steps": STEPS},
        batch={"per_device": 2, "global": 4},
        checkpoint={"every_steps": 1, "keep": None, "format": format},
    )


def stopped_run(folder: Path, name: str, format: str, steps: tuple[int, ...] = (2, 3)) -> Path:
    """A run that has ended after some checkpoints of the one that nothing happened to."""
    run = folder / "runs" / name
    for step in steps:
        shutil.copytree(folder / "runs" / format / f"checkpoint-{step}", run / f"checkpoint-{step}")
        files.point(run, "last", run / f"checkpoint-{step}")
    return run


def outcome(settings: dict[str, Any], resume: str = "auto") -> tuple[str, str]:
    """How a rank's run ended: the reason, or the class and text of the error."""
    from fullshard.recipes.read import read as read_recipe
    from fullshard.run import execute

    try:
        return "stopped", execute(read_recipe(settings), resume=resume).stopped
    except BaseException as error:
        return type(error).__name__, str(error)


def refused(ranks: RankPool, settings: dict[str, Any], resume: str = "auto") -> str:
    """What every rank says of a run that cannot begin."""
    ends: list[tuple[str, str]] = ranks.run(outcome, settings, resume=resume, world=2)
    assert [kind for kind, _ in ends] == ["CheckpointError"] * 2, ends
    assert ends[0] == ends[1]
    return ends[0][1]


def assert_straight(run: Path, straight: Path, *, begun: int) -> None:
    """The run has gone on after step `begun`, and ended where the straight one did."""
    keys = ("step", "loss", "grad_norm", "lr", "samples", "tokens")
    assert curve(read(run / FILE), *keys) == curve(read(straight / FILE), *keys)[begun:]
    ours, theirs = (open_tensors(path / f"checkpoint-{STEPS}") for path in (run, straight))
    assert ours.names() == theirs.names()
    for name in theirs.names():
        assert torch.equal(ours.whole(name), theirs.whole(name)), name


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DAMAGE: dict[int, tuple[Callable[[Path], None], str]] = {
    2: (flip, "was changed"),
    3: (cut, "bytes long, but was written with"),
    4: (Path.unlink, "is missing"),
}
"""What is done to the checkpoint of which step."""


@pytest.fixture(scope="module", params=FORMATS)
def damaged(folder: Path, request: pytest.FixtureRequest) -> tuple[Path, dict[str, Any]]:
    """A run whose newest checkpoints are damaged, each in another way."""
    format = str(request.param)
    chosen = settings(folder, f"{format}-damaged", format)
    run = stopped_run(folder, chosen["name"], format, steps=(1, *DAMAGE))
    for step, (harm, _) in DAMAGE.items():
        harm(run / f"checkpoint-{step}" / DATA[format])
    return run, chosen


@pytest.mark.parametrize("step", one_in(4, DAMAGE))
def test_a_requested_checkpoint_that_is_damaged_is_refused_with_the_file(
    ranks: RankPool, damaged: tuple[Path, dict[str, Any]], step: int
) -> None:
    run, chosen = damaged
    path = run / f"checkpoint-{step}"
    message = refused(ranks, chosen, resume=str(path))
    file = path / DATA[chosen["checkpoint"]["format"]]
    assert message.startswith(f"--resume {path}: {path} is damaged: {file} ")
    assert DAMAGE[step][1] in message
    assert "Resume from another one: --resume RUN/checkpoint-STEP" in message


def test_auto_falls_back_to_the_newest_complete_checkpoint_and_says_so(
    ranks: RankPool, folder: Path, damaged: tuple[Path, dict[str, Any]]
) -> None:
    run, chosen = damaged
    format = chosen["checkpoint"]["format"]
    ranks.run(train, chosen, world=2)
    log = (run / "log.txt").read_text()
    for step in DAMAGE:
        path = run / f"checkpoint-{step}"
        assert f"warning: {path} is damaged: {path / DATA[format]} {'' if step != 4 else 'is missing'}" in log
    assert f"Resuming from {run / 'checkpoint-1'}, whose files are complete" in log
    assert_straight(run, folder / "runs" / format, begun=1)
    for path in files.published(run):
        assert problems(path) == [], "all saved anew"


MANIFESTS = {
    "half": '{"step": 3, "files": {"state.json": {"size_by',
    "other-kinds": '{"step": 3, "files": {"state.json": {"size_bytes": "long", "sha256": null}}}',
}


@pytest.mark.parametrize("kind", one_in(4, MANIFESTS))
def test_a_damaged_manifest_is_damage(ranks: RankPool, folder: Path, kind: str) -> None:
    chosen = settings(folder, f"manifest-{kind}", "sharded")
    run = stopped_run(folder, chosen["name"], "sharded", steps=(3, 4))
    manifest = run / "checkpoint-4" / files.MANIFEST
    manifest.write_text(MANIFESTS[kind])
    message = refused(ranks, chosen, resume=str(run / "checkpoint-4"))
    assert f"{run / 'checkpoint-4'} is damaged: {manifest} cannot be used" in message
    if kind == "half":
        ranks.run(train, chosen, world=2)
        assert f"Resuming from {run / 'checkpoint-3'}" in (run / "log.txt").read_text()
        assert_straight(run, folder / "runs" / "sharded", begun=3)


@pytest.mark.parametrize("format", FORMATS)
def test_with_every_checkpoint_damaged_the_run_is_refused_and_nothing_deleted(
    ranks: RankPool, folder: Path, format: str
) -> None:
    chosen = settings(folder, f"{format}-all", format)
    run = stopped_run(folder, chosen["name"], format, steps=(1, 2, 3))
    for step, harm in ((1, flip), (2, cut), (3, Path.unlink)):
        harm(run / f"checkpoint-{step}" / DATA[format])
    before = content(run)
    message = refused(ranks, chosen)
    assert message.startswith(f"No checkpoint in {run} is whole.")
    for step in (1, 2, 3):
        assert str(run / f"checkpoint-{step}" / DATA[format]) in message
    assert "--resume never" in message
    assert content(run) == before


def content(run: Path) -> dict[str, bytes]:
    """Every file of a run but its crash reports."""
    found = {str(path.relative_to(run)): path for path in run.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if not name.startswith("crash-")}


# Checkpoints whose files are what the manifest says, and yet not what the run has saved


def rewrite(checkpoint: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Stores other tensors in a checkpoint, with a manifest that fits them."""
    stored, manifest = open_tensors(checkpoint), files.read_manifest(checkpoint)
    tensors = {name: stored.whole(name).clone() for name in sorted(stored.names())}
    change(tensors)
    if manifest["format"] == "full":
        for section in ("model", "optimizer"):
            part = {
                name.removeprefix(f"{section}/"): t for name, t in tensors.items() if name.startswith(f"{section}/")
            }
            save_file(part, checkpoint / f"{section}.safetensors")
    else:
        for path in [*checkpoint.glob("*.distcp"), checkpoint / METADATA]:
            path.unlink()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save(dict(tensors), storage_writer=Writer(checkpoint, threads=1), no_dist=True)
    seal(checkpoint, tensors=tree(tensors))
    assert problems(checkpoint) == [], "no file gives it away"
    return checkpoint


def nothing(tensors: dict[str, torch.Tensor]) -> None:
    pass


def no_moments(tensors: dict[str, torch.Tensor]) -> None:
    for name in tensors:
        if name.endswith("exp_avg"):
            tensors[name].zero_()


def no_squares(tensors: dict[str, torch.Tensor]) -> None:
    for name in tensors:
        if name.endswith("exp_avg_sq"):
            tensors[name].zero_()


def no_steps(tensors: dict[str, torch.Tensor]) -> None:
    for name in tensors:
        if name.endswith("/step"):
            tensors[name].zero_()


def one_tensor_less(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model/model.norm.weight"]


def one_state_less(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["optimizer/model.norm.weight/exp_avg"]


def one_tensor_more(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model/model.extra.weight"] = torch.zeros(2)


def another_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model/model.norm.weight"] = torch.zeros(17)


REWRITTEN: dict[Callable[[dict[str, torch.Tensor]], None], str] = {
    no_moments: r"optimizer's state is not what was saved \(a norm of 0\.\d+ was saved for exp_avg, 0\.0 was read\)",
    no_squares: r"a norm of [\d.e-]+ was saved for exp_avg_sq, 0\.0 was read",
    no_steps: r"step counts \[3\.0, 3\.0\] were saved, \[0\.0, 0\.0\] were read",
    one_tensor_less: "1 tensor missing from it, first model/model.norm.weight",
    one_state_less: "1 tensor missing from it, first optimizer/model.norm.weight/exp_avg",
    one_tensor_more: "1 tensor not part of this run, first model/model.extra.weight",
    another_shape: r"1 tensor of another shape, first model/model.norm.weight \[17\] \(this run has \[16\]\)",
}


@pytest.mark.parametrize(
    ("format", "change"),
    [*(("sharded", change) for change in REWRITTEN), ("full", no_moments), ("full", one_tensor_more)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_other_tensors_than_were_saved_are_refused(
    ranks: RankPool, folder: Path, format: str, change: Callable[[dict[str, torch.Tensor]], None]
) -> None:
    chosen = settings(folder, f"{format}-{change.__name__}", format)
    run = stopped_run(folder, chosen["name"], format, steps=(3,))
    rewrite(run / "checkpoint-3", change)
    message = refused(ranks, chosen)
    assert re.search(REWRITTEN[change], message), message


@pytest.mark.parametrize("format", FORMATS)
def test_the_same_tensors_written_by_one_process_are_resumed(ranks: RankPool, folder: Path, format: str) -> None:
    """Otherwise the refusals above would prove less than they say."""
    chosen = settings(folder, f"{format}-same", format)
    run = stopped_run(folder, chosen["name"], format, steps=(3,))
    rewrite(run / "checkpoint-3", nothing)
    ranks.run(train, chosen, world=2)
    assert_straight(run, folder / "runs" / format, begun=3)


# Checkpoints that were made to do harm


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self.path}'",)


def hostile(run: Path, kind: str) -> Path:
    """Hides a payload in a checkpoint, in its metadata or in the bytes of a tensor; gives the file that it would make.

    DCP itself loads bytes without `weights_only` where the metadata does not call them a tensor."""
    checkpoint, made = run / "checkpoint-3", run / "it-ran"
    metadata = pickle.loads((checkpoint / METADATA).read_bytes())
    if kind == "metadata":
        metadata.planner_data = Touch(made)
    else:
        name = "model/model.norm.weight"
        if kind == "bytes":
            posing: Any = BytesStorageMetadata()
            posing.__dict__.update(vars(metadata.state_dict_metadata[name]))
            metadata.state_dict_metadata[name] = posing
        for index in [index for index in metadata.storage_data if index.fqn == name]:
            info = metadata.storage_data.pop(index)
            file = checkpoint / info.relative_path
            offset = file.stat().st_size
            with file.open("ab") as end:
                torch.save(Touch(made), end)
                info = type(info)(info.relative_path, offset, end.tell() - offset)
            metadata.storage_data[type(index)(name, None if kind == "bytes" else index.offset)] = info
    (checkpoint / METADATA).write_bytes(pickle.dumps(metadata))
    seal(checkpoint)
    return made


HOSTILE = {
    "metadata": "would run code when it is loaded: it asks for posix.system",
    "bytes": "describes model/model.norm.weight as BytesStorageMetadata, which would run code when it is loaded",
    "piece": "Weights only load failed",
}


@pytest.mark.parametrize("kind", one_in(4, HOSTILE))
def test_a_hostile_checkpoint_is_not_resumed_and_runs_nothing(ranks: RankPool, folder: Path, kind: str) -> None:
    chosen = settings(folder, f"hostile-{kind}", "sharded")
    run = stopped_run(folder, chosen["name"], "sharded", steps=(3,))
    made = hostile(run, kind)
    message = refused(ranks, chosen)
    assert HOSTILE[kind] in message
    assert "weights_only=False" not in message, "no advice to load it all the same"
    assert not made.exists()


def test_the_command_reports_a_hostile_checkpoint_without_a_traceback(folder: Path) -> None:
    chosen = settings(folder, "hostile-command", "sharded") | {"batch": {"per_device": 4, "global": 4}}
    run = stopped_run(folder, chosen["name"], "sharded", steps=(3,))
    made = hostile(run, "metadata")
    (folder / "hostile.yaml").write_text(yaml.safe_dump(chosen))
    command = [sys.executable, "-m", "fullshard", "train", str(folder / "hostile.yaml"), "--devices", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Do not use this checkpoint, and find out where it came from." in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert not made.exists()
