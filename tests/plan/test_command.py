"""`fullshard plan`: its report, what it advises, and what it writes. No GPU and no data exist here."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.formatting.readable import size
from fullshard.plan.hardware import GIB, gpu_named
from fullshard.plan.picture import as_svg, in_characters
from fullshard.plan.predict import Place, Planner
from fullshard.plan.remedies import fitting, remedies
from fullshard.plan.scaling import scaling
from fullshard.plan.speed import step_time
from fullshard.recipes.read import read_recipe

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 8192,
}


def settings(**sections: Any) -> dict[str, Any]:
    """A recipe whose data does not exist."""
    base: dict[str, Any] = {
        "name": "small",
        "model": {"architecture": "qwen3", "overrides": SHAPE},
        "data": {"train": "nowhere.jsonl", "sequence_length": 512},
        "batch": {"per_device": 16},
        "duration": {"steps": 100},
        "precision": "bf16",
        "sharding": {"compile": False},
    }
    for name, values in sections.items():
        base[name] = {**base[name], **values} if name in ("sharding", "batch") else values
    return base


def run(folder: Path, *words: str, **sections: Any) -> Any:
    (folder / "small.yaml").write_text(yaml.safe_dump(settings(**sections)))
    return CliRunner().invoke(app, ["plan", str(folder / "small.yaml"), *words])


@pytest.fixture(scope="module")
def planner() -> Planner:
    """One for all tests: it looks at each block once."""
    return Planner()


def test_the_report_says_what_when_and_whether(tmp_path: Path) -> None:
    words = ("--gpu", "h100", "--devices", "8", "--nodes", "64", "--price", "2.5", "--scaling")
    done = run(tmp_path, *words, sharding={"compile": True})
    assert done.exit_code == 0, done.output
    assert "512 ranks on 64 nodes, h100; hybrid: 64 x 8" in done.output
    assert "at its peak, loss:" in done.output
    assert "It fits: " in done.output
    for part in ("optimizer state", "CUDA context", "NCCL", "blocks of", "checkpoint", "GPU hours", "at 2.5 per"):
        assert part in done.output, part
    assert "▒ activations" in done.output
    assert "(compiled)" in done.output
    assert "  hybrid: " in done.output


def test_json_has_every_number_in_bytes(tmp_path: Path) -> None:
    found = json.loads(run(tmp_path, "--gpu", "h100", "--json").stdout)
    kinds = ("parameters", "gradients", "optimizer", "ema", "buffers", "gathered", "reduced", "activations", "working")
    assert found["peak"]["allocated"] == sum(found["peak"][kind] for kind in kinds)
    assert found["peak"]["allocated"] == max(sum(m[kind] for kind in kinds) for m in found["moments"])
    assert found["needed"] == found["peak"]["allocated"] + sum(found["outside"].values())
    assert found["fits"] is True


def test_what_does_not_fit_ends_with_3_and_advice(tmp_path: Path) -> None:
    target = tmp_path / "fits.yaml"
    done = run(tmp_path, "--gpu", "1.1GiB")
    assert done.exit_code == 3, done.output
    assert "It does not fit: " in done.output
    assert "What helps, the cheapest first:" in done.output
    done = run(tmp_path, "--gpu", "1.1GiB", "--fit", str(target), "--svg", str(tmp_path / "a.svg"))
    assert done.exit_code == 0, done.output
    assert (tmp_path / "small.yaml").read_text() == yaml.safe_dump(settings())
    again = CliRunner().invoke(app, ["plan", str(target), "--gpu", "1.1GiB"])
    assert again.exit_code == 0, again.output
    ET.fromstring((tmp_path / "a.svg").read_text())


def test_an_unknown_gpu_is_a_mistake_without_a_traceback(tmp_path: Path) -> None:
    done = run(tmp_path, "--gpu", "h1000")
    assert done.exit_code == 2
    assert "--gpu h1000" in done.output
    assert "h100" in done.output


def test_cpu_ranks_need_no_gpu(tmp_path: Path) -> None:
    done = run(tmp_path, topology={"device": "cpu", "devices": 2})
    assert done.exit_code == 0, done.output
    assert "2 ranks, CPU" in done.output


def test_the_same_mathematics_comes_first_and_whole_parameters_are_never_advised(planner: Planner) -> None:
    recipe = read_recipe(settings(sharding={"strategy": "grad_op"}))
    gpu = gpu_named("1.1GiB")
    found = planner.predict(recipe, Place(8, 1, gpu))
    assert found.room is not None
    assert found.room < 0
    tried = remedies(planner, found)
    same = [remedy.change.same for remedy in tried]
    assert same == sorted(same, reverse=True)
    advised = [dict(remedy.change.settings) for remedy in tried]
    assert {"sharding.strategy": "full"} in advised
    assert not any(change.get("sharding.strategy") in ("grad_op", "none", "hybrid") for change in advised)
    assert {"batch.per_device": 8, "batch.accumulate": 2} in advised
    chosen = fitting(planner, found, tried)
    assert chosen is not None
    assert chosen.fits
    assert chosen.found.recipe.batch.per_device * chosen.found.accumulate == 16


def test_a_step_keeps_its_rows_when_the_micro_batch_shrinks(planner: Planner) -> None:
    recipe = read_recipe(settings(batch={"per_device": 16, "global": 64}))
    found = planner.predict(recipe, Place(1, 1, gpu_named("1.2GiB")))
    for remedy in remedies(planner, found):
        assert remedy.found.accumulate * remedy.found.recipe.batch.per_device == 64


def test_time_follows_operations_and_links(planner: Planner) -> None:
    from dataclasses import replace

    recipe, fast = read_recipe(settings(batch={"per_device": 64})), gpu_named("h100")
    slow = replace(fast, network_rate=fast.network_rate / 1000)
    near, far = (step_time(planner.predict(recipe, Place(8, 4, gpu))) for gpu in (fast, slow))
    alone = step_time(planner.predict(recipe, Place(1, 1, fast)))
    assert near is not None
    assert far is not None
    assert alone is not None
    assert alone.sent == alone.exposed == 0
    assert far.exposed > near.exposed
    assert far.tokens == near.tokens == 32 * alone.tokens == 32 * 64 * 512
    assert 0 < near.mfu < 1
    assert step_time(planner.predict(recipe, Place(1, 1, gpu_named("48GiB")))) is None


def test_recomputing_takes_time_and_saves_memory(planner: Planner) -> None:
    found = {}
    for mode in ("none", "selective", "full"):
        recipe = read_recipe(settings(batch={"per_device": 64}, sharding={"activation_checkpointing": mode}))
        found[mode] = planner.predict(recipe, Place(1, 1, gpu_named("h100")))
    times = [step_time(found[mode]) for mode in found]
    assert found["none"].needed > found["selective"].needed > found["full"].needed
    seconds = [time.total for time in times if time]
    assert len(seconds) == 3
    assert seconds == sorted(set(seconds))


def test_the_table_over_ranks_says_where_each_strategy_ends(planner: Planner) -> None:
    rows = scaling(planner, read_recipe(settings(batch={"per_device": 1})), gpu_named("h100"))
    assert [row.strategy for row in rows] == ["full", "hybrid", "grad_op"]
    full = rows[0]
    assert list(full.cells) == [2**power for power in range(13)]
    needed = [cell.found.held.parameters for cell in full.cells.values()]
    assert needed == sorted(needed, reverse=True)
    assert "stops at" in full.ends()
    assert "latency of the ring" in full.ends()
    hybrid = rows[1].cells
    assert hybrid[4096].found.held == hybrid[16].found.held
    assert rows[2].cells[8].found.needed > full.cells[8].found.needed


def test_the_picture_shows_the_peak_and_the_limit(planner: Planner) -> None:
    found = planner.predict(read_recipe(settings()), Place(1, 1, gpu_named("2GiB")))
    lines = in_characters(found.moments, 2 * GIB)
    assert any("-----" in line for line in lines)
    drawn = as_svg(found.moments, 2 * GIB, title="<script>alert(1)</script>")
    assert "<script>" not in drawn
    assert ET.fromstring(drawn).tag.endswith("svg")
    assert found.peak.name in drawn


@pytest.mark.slow
@pytest.mark.parametrize(
    ("measured", "named", "rows", "changes"),
    [
        (86.5, "1.7B", 8, {}),
        (72.0, "8B", 2, {"lora": True}),
        (66.0, "8B", 4, {"precision": "bf16-pure", "sharding": {"activation_checkpointing": "full"}}),
        (
            81.0,
            "8B",
            2,
            {"optimizer": {"kind": "adamw_8bit"}, "sharding": {"activation_checkpointing": "full"}},
        ),
    ],
)
def test_peaks_that_were_measured_on_an_h200(measured: float, named: str, rows: int, changes: dict[str, Any]) -> None:
    """torch.cuda.max_memory_allocated of real runs at length 4,096, packed and compiled, torch 2.11."""
    model: dict[str, Any] = {"architecture": "qwen3", "size": named}
    changes = dict(changes)
    if changes.pop("lora", False):
        model["lora"] = {"r": 16}
    data = {"train": "nowhere.jsonl", "sequence_length": 4096}
    recipe = read_recipe(settings(model=model, data=data, batch={"per_device": rows}, **changes))
    recipe = recipe.model_copy(update={"sharding": recipe.sharding.model_copy(update={"compile": True})})
    found = Planner().predict(recipe, Place(1, 1, gpu_named("h200")))
    assert found.peak.memory.total / GIB == pytest.approx(measured, rel=0.03)


def test_check_says_the_same(tmp_path: Path) -> None:
    from fullshard.contracts.launcher import Ranks
    from fullshard.plan.foreseen import foreseen
    from fullshard.plan.predict import empty_module

    recipe = read_recipe(settings(topology={"device": "cpu", "devices": 2}))
    text, remedy = foreseen(recipe, Ranks(2), empty_module(recipe)[0])
    found = json.loads(run(tmp_path, "--json", topology={"device": "cpu", "devices": 2}).stdout)
    assert remedy == ""
    assert f"at its peak, {found['peak']['moment']}, {size(found['peak']['allocated'])}" in text


def test_a_prediction_that_fails_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from fullshard.plan import foreseen as module

    def fails(*_: object) -> tuple[str, str]:
        raise RuntimeError("no such operator")

    monkeypatch.setattr(module, "_foreseen", fails)
    text, remedy = module.foreseen(None, None, None)
    assert text == "it cannot be predicted: RuntimeError: no such operator"
    assert remedy == "Watch the memory of the first steps."


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gpu", "0"), "--gpu 0: not known"),
        (("--gpu", "h100", "--price", "-1"), "--price -1: give what one GPU costs per hour, 0 or more."),
        (("--gpu", "h100", "--network", "0"), "--network 0: give the Gbit/s"),
        (("--scaling",), "--scaling needs a GPU whose speed is known, and this machine has no GPU. Add --gpu b200|"),
        (("--gpu", "48GiB", "--scaling"), "the speed of a GPU of 48 GiB is not known"),
    ],
)
def test_what_cannot_be_answered_is_refused(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    done = run(tmp_path, *words)
    assert done.exit_code == 2, done.output
    assert said in " ".join(done.output.split())


def test_it_can_be_read_in_80_columns(tmp_path: Path) -> None:
    words = ("--gpu", "h100", "--devices", "8", "--nodes", "512", "--price", "2.5", "--scaling")
    for done in (run(tmp_path, *words), run(tmp_path, "--gpu", "1.1GiB")):
        lines = [line for line in done.output.splitlines() if "model.lora" not in line]
        assert len(lines) > 20
        assert max(map(len, lines)) <= 80, [line for line in lines if len(line) > 80]


def embedding(rows: int) -> dict[str, Any]:
    return settings(
        model={
            "kind": "sentence_transformer",
            "architecture": "qwen3",
            "overrides": SHAPE,
            "tokenizer": {"train": {"vocab_size": 8192}},
        },
        objective={"kind": "contrastive"},
        batch={"per_device": rows},
    )


def test_fewer_texts_at_a_time_are_advised(planner: Planner) -> None:
    recipe = read_recipe(embedding(64))
    found = planner.predict(recipe, Place(1, 1, gpu_named("3GiB")))
    assert found.room is not None
    assert found.room < 0
    tried = {str(remedy.change): remedy for remedy in remedies(planner, found)}
    chunks = [tried["objective.cache={chunk: 64}"], tried["objective.cache={chunk: 16}"]]
    assert found.needed > chunks[0].found.needed > chunks[1].found.needed
    assert all(remedy.change.same for remedy in chunks)


def test_without_activations_a_plan_says_at_least(planner: Planner) -> None:
    from fullshard.plan import report
    from fullshard.plan.foreseen import sentence

    recipe, gpu = read_recipe(settings()), gpu_named("h100")
    found = Planner(run=False).predict(recipe, Place(1, 1, gpu))
    assert found.needed < planner.predict(recipe, Place(1, 1, gpu)).needed
    assert report.verdict(found).startswith("It may fit: at least ")
    assert "(activations are not predicted)" in sentence(found)
    small = Planner(run=False).predict(recipe, Place(1, 1, gpu_named("0.5")))
    assert report.verdict(small).startswith("It does not fit: at least ")
