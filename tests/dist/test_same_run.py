"""If ranks disagree on the run, all of them stop before step 1 and name key, ranks and values."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fullshard.errors import SetupError
from fullshard.formatting.yaml_text import render
from tests.ranks import RankPool
from tests.small import model_folder, recipe, token_file, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("same_run")
    model_folder(path / "model")
    token_file(path / "train.jsonl", records=48)
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_two_nodes_with_different_recipes_exit_with_the_difference(folder: Path) -> None:
    """The command as it is typed on two nodes, one with a setting more."""
    path = folder / "recipe.yaml"
    path.write_text(render(recipe(folder, name="nodes", topology={"device": "cpu", "timeout_s": 300.0})))
    command = [sys.executable, "-m", "fullshard", "train", str(path), "--nodes", "2", "--devices", "1"]
    command += ["--master", f"127.0.0.1:{free_port()}"]
    nodes = [
        subprocess.Popen(
            [*command, "--node-rank", str(rank), *(["optimizer.lr=1e-3"] if rank else [])],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [node.communicate(timeout=300)[0] for node in nodes]
    for node, text in zip(nodes, said, strict=True):
        assert node.returncode == 2, text
        words = " ".join(text.split())
        host = re.escape(socket.gethostname())
        assert re.search(rf"optimizer\.lr is 0\.01 on rank 0 \({host}\), 0\.001 on rank 1 \({host}\)", words), text
        assert "Give every node the same recipe" in words
        assert "Traceback" not in text
    assert not (folder / "runs" / "nodes").exists()


def refusal(settings: dict[str, Any], others: dict[str, Any] | None, resume: str = "auto") -> str:
    """One rank of a run in which rank 1 may have different settings; returns the error."""
    rank = int(os.environ["RANK"])
    try:
        train(others if others and rank == 1 else settings, resume)
    except SetupError as error:
        return str(error)
    return ""


def test_different_data_on_a_rank_is_refused(folder: Path, ranks: RankPool, tmp_path: Path) -> None:
    """Two nodes have the same path and other files behind it: the second one's is a link into its own folder."""
    settings = recipe(folder, name="data", data={"cache": str(tmp_path / "cache")})
    texts = ranks.run(on_own_copy, settings, "train.jsonl", str(tmp_path), world=2)
    assert texts[0] == texts[1]
    assert "content of data.train is " in texts[0]
    assert "on rank 0" in texts[0]
    assert "on rank 1" in texts[0]
    assert "optimizer" not in texts[0]


@pytest.mark.parametrize("change", ["values", "config"])
def test_different_model_folders_are_refused(folder: Path, ranks: RankPool, tmp_path: Path, change: str) -> None:
    """The same names, shapes and sizes, and one tensor or one key of the config that is not the same."""
    texts = ranks.run(on_own_copy, recipe(folder, name=change), "model", str(tmp_path), change, world=2)
    assert texts[0] == texts[1]
    key = "model.layers.1.mlp.up_proj.weight" if change == "values" else "config.rms_norm_eps"
    assert re.search(rf"{key} is \S+ on rank 0 \(\S+\), \S+ on rank 1 \(\S+\)", texts[0]), texts[0]
    assert "same model folder" in texts[0]


def on_own_copy(settings: dict[str, Any], name: str, place: str, change: str = "") -> str:
    """One rank whose `name` has the same path on all ranks but its own content, as on nodes with local disks: here each
    rank has its own current folder and a relative path."""
    own = Path(place) / os.environ["RANK"]
    source = Path(settings["data"]["train"] if name == "train.jsonl" else settings["model"]["path"])
    own.mkdir()
    (shutil.copytree if source.is_dir() else shutil.copy)(source, own / name)
    if os.environ["RANK"] == "1":
        CHANGES[change](own / name)
    settings = {**settings}
    if name == "train.jsonl":
        settings["data"] = {**settings["data"], "train": name}
    else:
        settings["model"] = {**settings["model"], "path": name}
    before = Path.cwd()
    os.chdir(own)
    try:
        return refusal(settings, None)
    finally:
        os.chdir(before)


def _one_token(path: Path) -> None:
    text = path.read_text()
    path.write_text(text.replace("[", "[5, ", 1))


def _one_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] += 1.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _one_key(folder: Path) -> None:
    path = folder / "config.json"
    text = path.read_text()
    assert '"rms_norm_eps": 1e-06' in text
    path.write_text(text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))


CHANGES: dict[str, Callable[[Path], None]] = {"": _one_token, "values": _one_tensor, "config": _one_key}


def test_options_and_resuming_are_compared_too(folder: Path, ranks: RankPool) -> None:
    """A run that resumes from a checkpoint, with another rate on one node."""
    settings = recipe(folder, name="resumed", duration={"steps": 2}, checkpoint={"every_steps": 1})
    assert ranks.run(refusal, settings, None, world=2) == ["", ""]
    longer = {**settings, "duration": {"steps": 4}}
    texts = ranks.run(refusal, longer, {**longer, "optimizer": {"lr": 0.5, "weight_decay": 0.1}}, world=2)
    assert texts[0] == texts[1]
    assert "optimizer.lr is 0.01 on rank 0" in texts[0]
    assert ranks.run(by_rank, longer, ["auto", "never"], world=2)[0].count("--resume is auto on rank 0") == 1
    assert ranks.run(refusal, longer, None, world=2) == ["", ""]


def by_rank(settings: dict[str, Any], resume: list[str]) -> str:
    return refusal(settings, None, resume[int(os.environ["RANK"])])


def test_a_module_imported_by_one_rank_only_is_not_a_difference(ranks: RankPool) -> None:
    assert ranks.run(code_that_differs, world=2) == [[], []]


def code_that_differs() -> list[str]:
    """Rank 0 has loaded the module of a part, as the rank does that encodes the data; rank 1 has not."""
    import importlib

    from fullshard.dist.agreement import differences
    from fullshard.proofs.same_run import code

    sys.modules.pop("colorsys", None)
    if os.environ["RANK"] == "0":
        importlib.import_module("colorsys")
    found = code({"data": {"encode": {"kind": "colorsys.Hue"}}}, torch.nn.Linear(1, 1))
    assert (found["colorsys"] is None) == (os.environ["RANK"] == "1")
    return differences(found)


def test_different_replicas_and_buffers_are_refused(ranks: RankPool) -> None:
    found = ranks.run(differing_values, world=2)
    assert found[0] == found[1]
    copies, buffers = found[0]
    assert re.search(r"0\.weight is \S+ on rank 0 \(\S+\), \S+ on rank 1", copies)
    assert "inner.table is " in buffers


def differing_values() -> list[str]:
    """The errors about replicas that a rank has changed, and about a buffer."""
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    from fullshard.dist.mesh import choose_layout, make_mesh
    from fullshard.dist.world import join
    from fullshard.proofs.same_run import require_equal_values

    world = join(device="cpu", backend="gloo", timeout_s=60)
    said = []
    for what in ("copies", "buffer"):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        module.inner = nn.Module()  # type: ignore[assignment]
        module.inner.register_buffer("table", torch.arange(3.0))
        if what == "copies" and world.rank == 1:
            module[0].weight.data[0, 0] += 1
        if what == "buffer" and world.rank == 1:
            module.inner.table[1] = 7
        fully_shard(module, mesh=make_mesh(choose_layout("none", world, state_bytes=0), world))
        with pytest.raises(SetupError) as refused:
            require_equal_values(module)
        said.append(str(refused.value))
    return said


def test_the_order_of_a_set_is_not_a_difference() -> None:
    """Strings hash differently in every process; diffusers' config and a user's part both make lists of sets."""
    code = (
        "from diffusers import DiTTransformer2DModel\n"
        "from fullshard.config.part import Section, plain\n"
        "from fullshard.proofs.same_run import _model\n"
        "class Own(Section):\n    words: set[str]\n"
        "model = DiTTransformer2DModel(num_layers=1, num_attention_heads=2, attention_head_dim=4, sample_size=4)\n"
        "print(_model(model, model.config), plain(Own(words=set('abcdefgh'))))\n"
    )
    command = [sys.executable, "-c", code]
    found = {
        subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(found) == 1, found
    assert "config.num_layers" in found.pop()
