"""The recipe section of a check: what it comes to, what contradicts, what cannot act; healthy ones have ticks only."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fullshard.check import settings
from fullshard.check.findings import Finding
from fullshard.config import families
from fullshard.contracts.launcher import Ranks
from fullshard.log.console import Console
from fullshard.recipes.read import Reading, read
from fullshard.setup.inputs import RunInputs
from fullshard.setup.run_inputs import prepare_inputs
from tests import small
from tests.families.audio import small as audio
from tests.families.audio.readings import write_readings
from tests.families.embedding import vision
from tests.families.vision import small as vlm

Look = Callable[..., list[Finding]]


def ground_of(reading: Reading, ranks: Ranks) -> RunInputs:
    return prepare_inputs(reading.recipe, world_size=ranks.per_node * ranks.nodes, console=Console(silent=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("settings")
    small.model_folder(folder / "model")
    small.token_file(folder / "train.jsonl", records=64)
    small.token_file(folder / "validation.jsonl", records=8, seed=1)
    return folder


@pytest.fixture
def look(folder: Path) -> Look:
    def look(*, ranks: Ranks | None = None, data_known: bool = True, **sections: Any) -> list[Finding]:
        ranks = ranks or Ranks(1)
        reading = read(small.recipe(folder, **sections))
        inputs = ground_of(reading, ranks) if data_known else None
        return list(settings.look(reading, ranks, inputs))

    return look


def bad(findings: list[Finding]) -> list[Finding]:
    assert all(f.text and (f.level == "ok" or f.remedy) for f in findings)
    return [f for f in findings if f.level != "ok"]


def test_a_healthy_recipe_has_ticks_only_and_shows_its_arithmetic(look: Look) -> None:
    findings = look()
    assert not bad(findings)
    said = {(f.check, f.text) for f in findings}
    assert ("batch", "16 samples per step = 4 per device x 4 accumulated x 1 rank") in said
    assert ("steps", "6 = 1.5 epochs x 4 per epoch (64 samples)") in said
    assert ("recipe", "a mapping: every key is known and every value is valid") in said
    assert ("settings", "no conflicts, and every setting has an effect") in said


def test_source_preset_and_overrides_are_reported(folder: Path) -> None:
    overrides = [f"model.path={folder}/model", f"data.train={folder}/train.jsonl", "optimizer.lr=1e-4"]
    reading = read("sft", *overrides, preset="single_node_fsdp")
    texts = [f.text for f in settings.look(reading, Ranks(8), None) if f.check == "recipe"]
    assert texts[0] == "built-in recipe sft, preset single_node_fsdp: every key is known and every value is valid"
    assert any("optimizer.lr" in text and "command line" in text for text in texts[1:])


@pytest.mark.parametrize(
    ("strategy", "ranks", "says"),
    [
        ("full", Ranks(1), "1 rank (CPU); full: nothing to shard"),
        ("auto", Ranks(2), "2 ranks (CPU); full: 1 x 2 (replicate x shard); auto: CPU ranks"),
        ("hybrid", Ranks(2), "hybrid: 1 x 2 (replicate x shard); one node, so hybrid is the same as full"),
        ("hybrid", Ranks(2, nodes=2), "4 ranks on 2 nodes (CPU); hybrid: 2 x 2 (replicate x shard)"),
        ("none", Ranks(4), "none: 4 x 1 (replicate x shard); every rank holds the whole model"),
        ("grad_op", Ranks(2), "parameters stay gathered from forward to backward"),
    ],
)
def test_what_the_strategy_becomes(look: Look, strategy: str, ranks: Ranks, says: str) -> None:
    findings = look(ranks=ranks, sharding={"strategy": strategy})
    assert not bad(findings)
    assert says in next(f.text for f in findings if f.check == "mesh")


def test_a_global_batch_that_does_not_divide(look: Look) -> None:
    # Such data cannot be laid out in steps, so there is no inputs.
    findings = look(ranks=Ranks(2), data_known=False, batch={"per_device": 4, "global": 18})
    (finding,) = [f for f in findings if f.level != "ok"]
    assert (finding.level, finding.check) == ("error", "batch")
    assert "18 is not a multiple of 8. Use batch.global = 16 or 24" in finding.text
    assert not bad(look(ranks=Ranks(2), data_known=False, batch={"per_device": 3, "global": 18}))


CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "nccl on a CPU": ({"topology": {"backend": "nccl"}}, "error", "NCCL connects GPUs only"),
    "export best without best": (
        {"checkpoint": {"export": "best"}},
        "error",
        "checkpoint.export = best, but checkpoint.best = null",
    ),
    "export best without validation": (
        {"checkpoint": {"export": "best", "best": "loss"}, "evaluate": {"parts": ["loss"]}},
        "error",
        "checkpoint.export = best, but nothing is validated",
    ),
    "best the wrong way": (
        {
            "checkpoint": {"best": {"metric": "accuracy", "mode": "min"}},
            "evaluate": {"parts": ["loss"]},
            "data": {"holdout": 0.1},
        },
        "warning",
        "checkpoint.best.mode = min keeps the model with the lowest accuracy, the worst one: a higher",
    ),
    "batch beyond the data": ({"batch": {"global": 128}}, "warning", "128 samples per step"),
    "lr without its minus sign": ({"optimizer": {"lr": 2e5}}, "warning", "optimizer.lr = 200000: adamw would move"),
    "lr too large": ({"optimizer": {"lr": 0.5, "weight_decay": 0}}, "warning", "usual rates are up to 0.1"),
    "lr too small": ({"optimizer": {"lr": 1e-12}}, "warning", "optimizer.lr = 1e-12: below 1e-09"),
    "decay too large": ({"optimizer": {"weight_decay": 20.0}}, "warning", "optimizer.weight_decay = 20"),
    "floor of 1": ({"schedule": {"floor": 1}}, "warning", "schedule.floor = 1: the learning rate never falls"),
    "step size": ({"schedule": {"kind": "step", "step_size": 50}}, "warning", "schedule.step_size = 50, and the run"),
    "warm-up": ({"schedule": {"warmup": 10}}, "warning", "schedule.warmup = 10 is as long as the run"),
    "workers": ({"data": {"workers": 5000}}, "warning", "5,000 x 1 rank is 5,000 processes"),
    "offload on a CPU": ({"sharding": {"cpu_offload": True}}, "warning", "sharding.cpu_offload has no effect on a CPU"),
    "prefetch on one rank": ({"sharding": {"forward_prefetch": True}}, "warning", "sharding.forward_prefetch has no"),
    "use_orig_params": ({"sharding": {"use_orig_params": False}}, "warning", "use_orig_params has no effect"),
    "limit_all_gathers": ({"sharding": {"limit_all_gathers": True}}, "warning", "limit_all_gathers has no effect"),
    "backward_prefetch": ({"sharding": {"backward_prefetch": "NONE"}}, "warning", "backward_prefetch = NONE is not"),
    "recompute without blocks": (
        {"sharding": {"wrap": {"whole": True}, "activation_checkpointing": "full"}},
        "warning",
        "sharding.activation_checkpointing has no effect with sharding.wrap.whole",
    ),
    "patience without validation": ({"evaluate": {"patience": 2}}, "warning", "evaluate.patience has no effect"),
    "patience without best": (
        {"evaluate": {"patience": 2, "every_steps": 1, "parts": ["loss"]}, "data": {"holdout": 0.1}},
        "warning",
        "evaluate.patience has no effect: checkpoint.best is null",
    ),
    "patience beyond the run": (
        {
            "evaluate": {"patience": 3, "every_steps": 3, "parts": ["loss"]},
            "data": {"holdout": 0.1},
            "checkpoint": {"best": "loss"},
        },
        "warning",
        "evaluate.patience = 3 has no effect: the run has 3 validations",
    ),
    "validation interval without data": ({"evaluate": {"every_steps": 2}}, "warning", "there is no validation data"),
    "held out but never used": ({"data": {"holdout": 0.1}}, "warning", "data.holdout = 0.1 is held out but never used"),
    "save interval": ({"checkpoint": {"every_steps": 500}}, "warning", "checkpoint.every_steps = 500 has no effect"),
    "epoch interval": ({"checkpoint": {"every_epochs": 4}}, "warning", "checkpoint.every_epochs = 4 has no effect"),
    "log interval": (
        {"log": {"every_steps": 50}},
        "warning",
        "log.every_steps = 50 has no effect: the run has only 6 steps",
    ),
    "evaluate interval": (
        {"evaluate": {"every_steps": 50, "parts": ["loss"]}, "data": {"holdout": 0.1}},
        "warning",
        "evaluate.every_steps = 50 has no effect",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_mistake_is_one_finding(look: Look, case: str) -> None:
    sections, level, text = CASES[case]
    (finding,) = bad(look(**sections))
    assert finding.level == level
    assert text in finding.text


def test_holdout_beside_validation(look: Look, folder: Path) -> None:
    data = {"validation": str(folder / "validation.jsonl"), "holdout": 0.2}
    (finding,) = bad(look(data=data, evaluate={"parts": ["loss"]}))
    assert "data.holdout has no effect: data.validation is set" in finding.text
    assert not bad(look(data={**data, "holdout": 0.05}, evaluate={"parts": ["loss"]}))


def test_defaults_are_never_findings_not_even_written_out(look: Look) -> None:
    sections: dict[str, Any] = {
        "log": {"every_steps": 10, "sinks": []},
        "checkpoint": {"every_epochs": 1, "best": {"metric": "loss"}},
        "schedule": {"kind": "cosine"},
        "evaluate": {"every_epochs": 1, "parts": ["loss"]},
        "optimizer": {"lr": 3e-4},
    }
    assert not bad(look(**sections))
    assert not bad(look(data_known=False, **sections))


def test_prefetch_acts_where_parameters_are_gathered(look: Look) -> None:
    sharding = {"forward_prefetch": True, "strategy": "full"}
    assert not bad(look(ranks=Ranks(2), sharding=sharding))
    assert len(bad(look(ranks=Ranks(2), sharding={**sharding, "strategy": "none"}))) == 1


@pytest.mark.parametrize("name", sorted(families.recipes()))
def test_built_in_recipes_are_without_findings(name: str, folder: Path, tmp_path: Path) -> None:
    records = [{"question": f"What is {i} and {i}?", "answer": f"It is {2 * i}, of course."} for i in range(400)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": r["question"] * 9}) + "\n" for r in records))
    file = "texts.jsonl" if name == "llm" else "pairs.jsonl"
    overrides = [
        f"data.train={tmp_path / file}",
        "data.sequence_length=48",
        "model.tokenizer={train: {vocab_size: 300}}",
        "model.resize_embedding=true",
    ]
    overrides += ["model.size=tiny", "duration.steps=1000"] if name == "llm" else [f"model.path={folder / 'model'}"]
    if name == "embedding-8b":  # takes pictures; those of this test are its own
        vision.vision_folder(tmp_path / "vision", kind="qwen3_vl")
        overrides = [f"model.path={tmp_path / 'vision'}", "model.max_pixels=3136", "objective.matryoshka=[64]"]
        overrides += [f"data.train={vision.pictures(tmp_path / 'seen', records=40)}", "data.validation=null"]
        overrides += [f"data.encode.image_root={tmp_path / 'seen' / 'images'}", "data.holdout=0.1", "batch.global=32"]
        overrides += ["duration.epochs=120"]
    if name == "paper_r64":
        audio.model_folder(tmp_path / "phi4", "phi4_multimodal")
        overrides = [f"model.path={tmp_path / 'phi4'}", "model.revision=null", "data.validation=null"]
        overrides += [f"data.train={write_readings(tmp_path, 128)}", "batch.accumulate=1", "data.holdout=0.1"]
    if name == "desktop-smolvlm":
        vlm.model_folder(tmp_path / "smolvlm", "smolvlm")
        overrides = [f"model.path={tmp_path / 'smolvlm'}", "data.sequence_length=128", "data.holdout=0.2"]
        overrides += [f"data.train={vlm.write_recordings(tmp_path / 'recordings.jsonl', episodes=40)}"]
    brings = name not in ("audio", "desktop", "diffusion", "embedding", "quickstart", "vision")
    reading = read(name, *(overrides if brings else []), "topology.device=cpu")
    ranks = Ranks(2)
    findings = list(settings.look(reading, ranks, ground_of(reading, ranks)))
    # Their data is the user's; 256 rows of 48 tokens are more than these have.
    assert [f.text for f in bad(findings) if f.check != "batch"] == []
