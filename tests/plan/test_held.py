"""Predicted bytes against what real gloo ranks hold: every kind, on every rank, exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fullshard.plan.hardware import gpu_named
from fullshard.plan.predict import Place, Planner
from fullshard.plan.sizes import TensorSize, held, optimizer_state
from fullshard.recipes.read import read_recipe
from tests import small
from tests.plan import real_bytes
from tests.ranks import RankPool

CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "one rank": (1, 1, {}),
    "full, 2 ranks, tied": (2, 1, {"sharding": {"strategy": "full"}, "ema": 0.9}),
    "LoRA on a bf16 base, 2 ranks": (2, 1, {"model": {"lora": {"r": 4}}, "precision": "bf16"}),
    "bf16-pure, 2 ranks, average": (2, 1, {"precision": "bf16-pure", "ema": 0.9, "model": {"freeze": ["*norm*"]}}),
    "grad_op, 4 ranks": (4, 1, {"sharding": {"strategy": "grad_op"}, "precision": "bf16"}),
    "hybrid, 2 nodes of 2, muon": (4, 2, {"sharding": {"strategy": "hybrid"}, "optimizer": {"kind": "muon"}}),
    "replicated, 2 ranks": (2, 1, {"sharding": {"strategy": "none"}}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import AutoModelForCausalLM

    place = tmp_path_factory.mktemp("plan")
    small.model_folder(place / "model")
    model = AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.bfloat16)
    model.save_pretrained(place / "half")
    small.token_file(place / "train.jsonl", records=64)
    return place


@pytest.mark.parametrize("case", CASES)
def test_every_byte_is_as_on_real_ranks(case: str, folder: Path, ranks: RankPool) -> None:
    world, nodes, changes = CASES[case]
    settings = small.recipe(folder, name=case.replace(" ", "-").replace(",", ""), **changes)
    if "lora" in settings["model"]:
        settings["model"]["path"] = str(folder / "half")
    real = ranks.run(real_bytes.after_a_step, settings, world=world, nodes=nodes)
    recipe = read_recipe(settings)
    found = Planner().predict(recipe, Place(world // nodes, nodes, None))
    shards = found.plan.layout.shards
    for rank, bytes_held in enumerate(real):
        mine = held(recipe, found.units, shards=shards, index=rank % shards, buffers=found.held.buffers)
        predicted: dict[str, Any] = {name: getattr(mine, name) for name in bytes_held if hasattr(mine, name)}
        predicted["gathered"] = sorted(unit.gathered(shards) for unit in found.units)
        assert predicted == bytes_held, f"rank {rank}"
    assert found.held == held(recipe, found.units, shards=shards, buffers=found.held.buffers)


def test_eight_bit_states_are_as_torchao_makes_them() -> None:
    import torch
    from torchao.optim import AdamW8bit

    recipe = read_recipe("quickstart", "optimizer.kind=adamw_8bit")
    for shape in ((64, 64), (4096,), (97, 32), (1024, 16), (16, 255)):
        parameter = torch.nn.Parameter(torch.zeros(shape))
        made = AdamW8bit([parameter])
        states = [made._new_buffer(parameter, signed) for signed in (True, False)]
        real = 4  # the step
        for state in states:
            parts = (
                [getattr(state, name) for name in ("codes", "scale", "qmap")] if hasattr(state, "codes") else [state]
            )
            real += sum(part.numel() * part.element_size() for part in parts)
        size = TensorSize("w", shape[0], parameter.numel() // shape[0], 4, trained=True, dims=len(shape))
        assert optimizer_state(recipe.optimizer, [size], shards=1) == real, shape


def test_rows_that_do_not_divide_are_padded_in_memory_only() -> None:
    size = TensorSize("w", rows=97, width=8, itemsize=4, trained=True, dims=2)
    assert size.chunk(4) == 25 * 8
    assert [size.mine(4, index) // 8 for index in range(4)] == [25, 25, 25, 22]
    assert [size.mine(64, index) // 8 for index in (0, 48, 49, 63)] == [2, 1, 0, 0]


def test_a_gpu_that_no_table_has_is_named_by_its_memory() -> None:
    assert gpu_named("48GiB").memory == 48 * 2**30
    assert gpu_named("H200").flops == 989e12
