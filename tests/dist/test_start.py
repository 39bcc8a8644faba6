"""Where training can start from, on real ranks: the first loss is that of the source, by Transformers and peft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from tests.ranks import RankPool
from tests.small import curve, model_folder, recipe, token_file, train

LORA = {"r": 3, "alpha": 7.0, "targets": ["q_proj", "down_proj"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, ranks: RankPool) -> Path:
    """A trained model (`runs/whole`, a full checkpoint) and trained adapters (`runs/adapted`, a sharded one)."""
    path = tmp_path_factory.mktemp("start")
    model_folder(path / "model")
    token_file(path / "train.jsonl", records=64)
    full = {"format": "full", "every_epochs": None, "best": None}
    base = {"path": str(path / "model")}
    ranks.run(train, settings(path, "whole", base, steps=3, checkpoint=full), world=2)
    ranks.run(train, settings(path, "adapted", {**base, "lora": LORA}, steps=3), world=2)
    return path


def settings(folder: Path, name: str, model: dict[str, Any], *, steps: int = 1, **sections: Any) -> dict[str, Any]:
    constant = {"kind": "constant"}
    return {**recipe(folder, name=name, duration={"steps": steps}, schedule=constant, **sections), "model": model}


def loss_of(folder: Path, module: Any) -> float:
    """The mean over the tokens of the first step, 16 records in the order of the file."""
    total, count = 0.0, 0
    for line in (folder / "train.jsonl").read_text().splitlines()[:16]:
        ids = torch.tensor([json.loads(line)["input_ids"]])
        with torch.no_grad():
            logits = module(input_ids=ids).logits[0, :-1]
        total += float(cross_entropy(logits, ids[0, 1:], reduction="sum"))
        count += ids.shape[1] - 1
    return total / count


def adapted(base: Path, adapter: Path) -> Any:
    """Base and adapter as peft puts them together."""
    from peft import PeftModel

    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)


def first_loss(ranks: RankPool, values: dict[str, Any], *, world: int) -> float:
    return float(curve(ranks.run(train, values, world=world)[0], "loss")[0][0])


def test_an_adapter_is_trained_further(ranks: RankPool, folder: Path) -> None:
    base, source, written = folder / "model", folder / "runs/adapted/model", folder / "runs/continued/model"
    expected = loss_of(folder, adapted(base, source))
    assert abs(expected - loss_of(folder, AutoModelForCausalLM.from_pretrained(base))) > 0.01
    values = settings(folder, "continued", {"path": str(source)}, steps=2)
    found = curve(ranks.run(train, values, world=2)[0], "loss")
    assert found[0][0] == pytest.approx(expected, rel=1e-5)
    again = adapted(base, written)
    config = again.peft_config["default"]
    assert (config.r, config.lora_alpha, config.base_model_name_or_path) == (3, 7, str(base))
    loss = loss_of(folder, again)
    assert abs(loss - expected) > 1e-3, "it was trained, not only loaded"
    second = settings(folder, "continued-again", {"path": str(written)})
    assert first_loss(ranks, second, world=1) == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(
    ("world", "model"),
    [
        (1, {"from": "runs/whole"}),
        (2, {"from": "runs/whole/last", "path": "model"}),
        (2, {"from": "runs/whole/checkpoint-3", "path": "model", "lora": LORA}),
    ],
    ids=["alone", "beside a path", "under new adapters"],
)
def test_a_checkpoint_gives_its_weights(ranks: RankPool, folder: Path, world: int, model: dict[str, Any]) -> None:
    expected = loss_of(folder, AutoModelForCausalLM.from_pretrained(folder / "runs/whole/model"))
    placed = {key: str(folder / value) if isinstance(value, str) else value for key, value in model.items()}
    name = f"from-{'-'.join(model)}"
    assert first_loss(ranks, settings(folder, name, placed), world=world) == pytest.approx(expected, rel=1e-5)
    if "lora" in model:
        # Its base is in the checkpoint of another run, which may be deleted: this run's own must have everything.
        trained = loss_of(folder, adapted(folder / "runs/whole/model", folder / "runs" / name / "model"))
        again = settings(folder, "from-that", {"from": str(folder / "runs" / name)})
        assert first_loss(ranks, again, world=1) == pytest.approx(trained, rel=1e-5)


@pytest.mark.parametrize("world", [1, 2])
def test_a_checkpoint_of_adapters_starts_on_its_base(ranks: RankPool, folder: Path, world: int) -> None:
    expected = loss_of(folder, adapted(folder / "model", folder / "runs/adapted/model"))
    base = {"path": str(folder / "model"), "lora": LORA} if world == 1 else {}
    values = settings(folder, f"adapters-{world}", {"from": str(folder / "runs/adapted"), **base})
    assert first_loss(ranks, values, world=world) == pytest.approx(expected, rel=1e-5)


def test_a_torch_state_gives_its_values(ranks: RankPool, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "runs/whole/model")
    state = {f"module._orig_mod.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"model": state, "epoch": 3}, folder / "state.pt")
    values = settings(folder, "torch", {"path": str(folder / "model"), "from": str(folder / "state.pt")})
    assert first_loss(ranks, values, world=2) == pytest.approx(loss_of(folder, model), rel=1e-5)
