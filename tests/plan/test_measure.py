"""`fullshard plan --measure`: blocks and the head really run, on this machine's CPU. No test depends on a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.errors import SetupError
from fullshard.plan import report
from fullshard.plan.hardware import gpu_named
from fullshard.plan.measured import Measured, Part, Pass
from fullshard.plan.predict import Place, Planner, Prediction
from fullshard.plan.remedies import with_settings
from fullshard.plan.speed import modelled, step_time
from fullshard.recipes.read import read_recipe
from tests.plan.test_command import SHAPE, settings

TINY = {**SHAPE, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "num_hidden_layers": 3, "vocab_size": 128}
MODEL = {"architecture": "qwen3", "overrides": TINY}
DATA = {"train": "nowhere.jsonl", "sequence_length": 16}
TWO_RANKS = {"device": "cpu", "devices": 2}
"""Two, so that each has one thread: tests share this machine."""


def tiny(**sections: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"model": MODEL, "data": DATA, "batch": {"per_device": 4}, "topology": TWO_RANKS}
    return settings(**{**base, **sections})


def embedding() -> dict[str, Any]:
    overrides = {**TINY, "vocab_size": 300}
    tokenizer = {"train": {"vocab_size": 300}}
    model = {"kind": "sentence_transformer", **MODEL, "overrides": overrides, "tokenizer": tokenizer}
    return tiny(model=model, objective={"kind": "contrastive", "cache": {"chunk": 2}})


def diffusion(rows: int) -> dict[str, Any]:
    shape = {"in_channels": 4, "out_channels": 4, "sample_size": 8}
    return tiny(
        model={"kind": "diffusers", "architecture": "dit", "size": "tiny", "classes": 10, "overrides": shape},
        objective={"kind": "flow_matching"},
        data={"train": "latents.csv", "encode": {"kind": "image", "root": "."}, "holdout": 0, "pack": False},
        batch={"per_device": rows},
    )


def run(folder: Path, recipe: dict[str, Any], *words: str) -> Any:
    (folder / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    return CliRunner().invoke(app, ["plan", str(folder / "tiny.yaml"), "--measure", *words])


def parts_of(folder: Path, recipe: dict[str, Any]) -> list[dict[str, Any]]:
    done = run(folder, recipe, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["measured"]
    assert (found["device"], found["counts_bytes"]) == ("a CPU", False)
    assert found["seconds"] > 0
    parts: list[dict[str, Any]] = found["parts"]
    for part in parts:
        for size in ("whole", "other"):
            assert set(part[size]) == {"tokens", "forward", "backward"}, "a CPU counts no bytes"
            assert min(part[size].values()) > 0
        assert part["modelled"]["kept"] >= 0
    return parts


def sizes(part: dict[str, Any]) -> tuple[int, int]:
    return part["whole"]["tokens"], part["other"]["tokens"]


@pytest.mark.parametrize("mode", ["none", "full"])
def test_a_block_of_each_kind_and_the_head_are_measured(mode: str, tmp_path: Path) -> None:
    blocks, outside = parts_of(tmp_path, tiny(sharding={"activation_checkpointing": mode}))
    assert (blocks["name"], blocks["calls"], sizes(blocks)) == ("Qwen3DecoderLayer", 3, (64, 32))
    assert (outside["name"], outside["calls"], sizes(outside)) == ("outside the blocks", 1, (64, 32))


def test_blocks_that_differ_are_measured_apart_and_a_single_row_is_halved(tmp_path: Path) -> None:
    # Nothing before the first block is trained, so that its input has no gradient.
    parts = parts_of(tmp_path, tiny(model={**MODEL, "lora": {"r": 4}}, batch={"per_device": 1}))
    assert [(part["name"], part["calls"]) for part in parts[:-1]] == [
        ("Qwen3DecoderLayer", 1),
        ("Qwen3DecoderLayer", 2),
    ]
    assert sizes(parts[0]) == (16, 8)


def test_an_embedding_model_is_measured_in_its_chunks(tmp_path: Path) -> None:
    assert [sizes(part) for part in parts_of(tmp_path, embedding())] == [(32, 16), (32, 16)]


@pytest.mark.parametrize(("rows", "measured"), [(4, (4, 2)), (1, (1, 2))])
def test_a_denoiser_is_measured_with_images(rows: int, measured: tuple[int, int], tmp_path: Path) -> None:
    blocks, outside = parts_of(tmp_path, diffusion(rows))
    assert (blocks["name"], sizes(blocks), sizes(outside)) == ("BasicTransformerBlock", measured, measured)


def test_the_report_says_what_was_measured_and_what_was_not(tmp_path: Path) -> None:
    done = run(tmp_path, tiny())
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert "Measured on a CPU with 4 x 16 tokens: 3 x Qwen3DecoderLayer forward " in said
    assert "outside the blocks forward " in said
    assert "a micro-batch computed in " in said
    assert "nothing counts the memory of a CPU" in said
    assert max(map(len, done.output.splitlines())) <= 80


def test_a_plan_without_it_measures_nothing(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny()))
    done = CliRunner().invoke(app, ["plan", str(tmp_path / "tiny.yaml"), "--json"])
    assert json.loads(done.stdout)["measured"] is None


@pytest.fixture(scope="module")
def modelled_plan() -> tuple[Planner, Prediction]:
    """For a GPU that is not here."""
    planner = Planner()
    recipe = read_recipe(tiny(topology={"devices": 2}, batch={"per_device": 64}))
    return planner, planner.predict(recipe, Place(2, 1, gpu_named("h100")))


Fixed = Callable[[], tuple[Planner, Prediction, Measured]]


@pytest.fixture
def fixed(modelled_plan: tuple[Planner, Prediction], monkeypatch: pytest.MonkeyPatch) -> Fixed:
    """The plan after a measurement whose numbers are known, as on a GPU."""
    planner, before = modelled_plan

    def measured() -> tuple[Planner, Prediction, Measured]:
        cpu = torch.device("cpu")
        planner.measure(before, cpu, modelled=modelled(before))
        real = planner._measured
        assert real is not None
        whole = Pass(1024, 1.0, 2.0, 4e6, 6e6, 5e6)
        part = Part("Block", 3, whole, replace(whole, tokens=512, forward=0.6, backward=1.2, kept=2e6))
        outside = Part("outside the blocks", 1, replace(whole, forward_needs=9.5e6), replace(whole, tokens=512))
        known = replace(real, counts_bytes=True, kinds=(part,), outside=outside)
        monkeypatch.setattr(planner, "_measured", known)
        return planner, planner.predict(before.recipe, before.place), known

    return measured


def test_time_and_activations_follow_what_was_measured(modelled_plan: tuple[Planner, Prediction], fixed: Fixed) -> None:
    before = modelled_plan[1]
    _, found, known = fixed()
    assert known.seconds(found.work) == pytest.approx(4 * 3.0)
    time = step_time(found)
    assert time is not None
    assert time.compute == pytest.approx(12.0)
    assert [block.cost.saved for block in found.activations.blocks] == [4_000_000] * 3
    assert [block.cost.forward for block in found.activations.blocks] == [6_000_000] * 3
    inputs = [block.kept - block.cost.saved for block in found.activations.blocks]
    assert inputs == [block.kept - block.cost.saved for block in before.activations.blocks]
    assert (found.activations.outside, found.activations.loss) == (4_000_000, 9_500_000)
    assert found.needed != before.needed


def test_other_rows_follow_a_line_through_both_sizes(fixed: Fixed) -> None:
    planner, found, known = fixed()
    part = known.kinds[0]
    assert part.at(1024) == part.whole
    assert part.at(512).forward == pytest.approx(0.6)
    assert part.at(256).forward == pytest.approx(0.4)
    assert part.at(256).kept == pytest.approx(1e6)
    half = planner.predict(with_settings(found.recipe, {"batch.per_device": 32}), found.place)
    assert [block.cost.saved for block in half.activations.blocks] == [2_000_000] * 3
    steep = replace(part, other=replace(part.whole, tokens=512, forward=0.1))
    assert steep.at(256).forward == pytest.approx(0.25), "no time is negative"


def test_other_settings_stay_modelled_and_are_corrected(fixed: Fixed) -> None:
    planner, found, known = fixed()
    again = planner.predict(with_settings(found.recipe, {"sharding.activation_checkpointing": "full"}), found.place)
    assert not known.holds(again.recipe, again.plan)
    guess, time = modelled(again), step_time(again)
    assert guess is not None
    assert time is not None
    assert time.compute == pytest.approx(guess * known.ratio())
    assert all(block.cost.saved != 4_000_000 for block in again.activations.blocks)


def test_the_report_has_measured_and_modelled_bytes_beside_each_other(fixed: Fixed) -> None:
    _, found, known = fixed()
    said = " ".join(" ".join(report.text(found, step_time(found), steps=None, price=None)).split())
    assert "and used above: 3 x Block forward 1.00 s, backward 2.00 s (600 ms and 1.20 s with 512 tokens)" in said
    assert "keeps 3.8 MiB, modelled " in said
    assert "not in proportion to the tokens: 3.8 MiB with 512" in said
    assert "computed in 12.00 s, modelled " in said
    data = report.data(found, step_time(found), [], None, [])["measured"]
    assert data["parts"][0]["whole"] == asdict(known.kinds[0].whole)
    assert data["modelled_seconds"] == known.modelled
    assert json.dumps(data)


def test_another_gpu_cannot_be_measured(tmp_path: Path) -> None:
    done = run(tmp_path, tiny(), "--gpu", "h100")
    assert done.exit_code == 2
    assert "--gpu h100 with --measure: only this machine can be measured" in " ".join(done.output.split())


class _Fails:
    """A block that cannot run."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise self.error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "64 x 16 tokens in one block, or in the head, do not fit into"),
        (RuntimeError("DefaultCPUAllocator: not enough memory"), "Use a smaller batch.per_device or data.sequence"),
        (ValueError("no such thing"), "cannot be run alone (ValueError: no such thing). Plan without --measure."),
    ],
)
def test_what_cannot_run_is_a_mistake_that_says_what_to_do(
    error: Exception, said: str, modelled_plan: tuple[Planner, Prediction], monkeypatch: pytest.MonkeyPatch
) -> None:
    planner, before = modelled_plan
    module: nn.Module = planner._shape(before.recipe, before.place).module
    monkeypatch.setattr(type(module.get_submodule("model.layers.0").mlp), "forward", _Fails(error))  # type: ignore[arg-type]
    with pytest.raises(SetupError, match="--measure: ") as raised:
        planner.measure(before, torch.device("cpu"), modelled=None)
    assert said in str(raised.value)


def test_a_model_that_does_not_run_without_data_is_refused() -> None:
    planner = Planner(run=False)
    found = planner.predict(read_recipe(tiny()), Place(2, 1, None))
    with pytest.raises(SetupError, match="no block of this model runs without data"):
        planner.measure(found, torch.device("cpu"), modelled=None)


def test_the_measured_model_is_a_copy(modelled_plan: tuple[Planner, Prediction]) -> None:
    planner, before = modelled_plan
    threads = torch.get_num_threads()
    planner.measure(before, torch.device("cpu"), modelled=None)
    assert torch.get_num_threads() == threads
    module = planner._shape(before.recipe, before.place).module
    assert all(parameter.is_meta for parameter in module.parameters())
