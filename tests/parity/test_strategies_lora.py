"""LoRA on a frozen bf16 base, sharded: what is kept in which dtype, what moves, and that the number of ranks does not
show, up to the adapter that peft loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.near import assert_near
from tests.parity.sharded_model_probe import PROMPT, train_and_look
from tests.ranks import RankPool
from tests.small import curve, model_folder, recipe, token_file

LORA = {"r": 4, "alpha": 8, "dropout": 0.0, "targets": "all-linear"}
SHAPE: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 192, "head_dim": 24}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lora")
    model_folder(path / "float32", **SHAPE)
    base = AutoModelForCausalLM.from_pretrained(path / "float32", dtype=torch.bfloat16)
    base.save_pretrained(path / "model")
    token_file(path / "train.jsonl", records=90)
    return path


@pytest.fixture(scope="module")
def runs(ranks: RankPool, folder: Path) -> dict[int, list[dict[str, Any]]]:
    """What every rank saw, by world size."""
    return {
        world: ranks.run(
            train_and_look,
            recipe(
                folder,
                name=f"world-{world}",
                model={"lora": LORA},
                batch={"per_device": 4, "global": 16},
                optimizer={"kind": "tests.parity.sharded_model_probe.LookingAdamW"},
                evaluate={"parts": ["tests.parity.sharded_model_probe.Look"]},
            ),
            world=world,
        )
        for world in (1, 2, 4)
    }


def test_adapters_are_fp32_beside_a_bf16_base(runs: dict[int, list[dict[str, Any]]]) -> None:
    for seen in runs[2]:
        kept = {name: ("float32" if ".lora_" in name else "bfloat16") for name in seen["dtypes"]}
        assert seen["dtypes"] == kept
        assert seen["trainable"] == {name for name in kept if ".lora_" in name}
    for name, (_, whole) in runs[2][0]["sizes"].items():
        assert sum(seen["sizes"][name][0] for seen in runs[2]) == whole


def test_only_adapters_are_trained(runs: dict[int, list[dict[str, Any]]]) -> None:
    for seen in runs[2]:
        assert seen["gradients"] == seen["trainable"]
        assert seen["moved"] == []
    sizes = {name: whole for name, (_, whole) in runs[2][0]["sizes"].items()}
    trained = sum(sizes[name] for name in runs[2][0]["trainable"])
    assert 0 < trained < 0.1 * sum(sizes.values())
    losses = curve(runs[2][0]["records"], "loss")
    assert losses[-1] < losses[0]


def test_the_adapter_does_not_depend_on_the_number_of_ranks(runs: dict[int, list[dict[str, Any]]]) -> None:
    reference = torch.tensor(curve(runs[1][0]["records"], "loss", "grad_norm"), dtype=torch.float64)
    for world in (2, 4):
        found = torch.tensor(curve(runs[world][0]["records"], "loss", "grad_norm"), dtype=torch.float64)
        torch.testing.assert_close(found, reference, rtol=2e-6, atol=0)


def test_the_adapter_of_two_ranks_loads_with_peft(folder: Path, runs: dict[int, list[dict[str, Any]]]) -> None:
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        untrained = base(input_ids=ids).logits
        model = PeftModel.from_pretrained(base, folder / "runs" / "world-2" / "model")
        found = model(input_ids=ids).logits
    for seen in runs[2]:
        assert_near(seen["logits"], found)
    assert (found - untrained).abs().max() > 0.1
