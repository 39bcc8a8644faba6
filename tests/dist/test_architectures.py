"""Many architectures on two ranks: decoders train as in a plain loop, towers give a plain module's gradients."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from fullshard.contracts.model import Family, Weights
from fullshard.dist.mesh import choose_layout, make_mesh
from fullshard.dist.shard import ShardPlan, Unit, shard
from fullshard.dist.world import join
from fullshard.dist.wrap import find_blocks
from fullshard.hf.architecture.sizes import make_config
from tests.ranks import RankPool
from tests.slow import only_first
from tests.small import VOCABULARY, curve, recipe, token_file, train
from tests.unit.hf.architectures import towers

DECODERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "phi": {},
    "phi3": {"pad_token_id": 0},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "gemma3_text": {},
    "mistral": {},
    "gpt2": {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "gpt_neox": {},
    "opt": {"dropout": 0.0},
}
"""Each with what switches its dropout off, so that losses can be compared."""
STEPS, GLOBAL, LR = 2, 16, 1e-2


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    path = tmp_path_factory.mktemp("architectures")
    return path, token_file(path / "train.jsonl", records=STEPS * GLOBAL)


def plain_loop(model: Any, rows: list[list[int]]) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step: one record at a time, mean over the tokens of the step."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    results = []
    for step in range(STEPS):
        batch = rows[step * GLOBAL : (step + 1) * GLOBAL]
        count, total = sum(len(row) - 1 for row in batch), 0.0
        for row in batch:
            ids = torch.tensor([row])
            loss = cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:], reduction="sum") / count
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        for group in optimizer.param_groups:
            group["lr"] = LR * (1 - step / STEPS)
        optimizer.step()
        optimizer.zero_grad()
        results.append((total, norm))
    return results


def train_quietly(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """One rank of a run in which torch warns of nothing about FSDP."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        records = train(settings)
    assert not [w for w in caught if "FSDP" in str(w.message)]
    log = Path(settings["output"]) / settings["name"] / "log.txt"
    assert "FSDP2-wrapped" not in log.read_text()
    return records


@pytest.mark.parametrize("architecture", only_first(DECODERS))
def test_a_decoder_trains_as_in_a_plain_loop(
    ranks: RankPool, rows: tuple[Path, list[list[int]]], architecture: str
) -> None:
    folder, data = rows
    torch.manual_seed(11)
    overrides = {"vocab_size": VOCABULARY, "pad_token_id": None, **DECODERS[architecture]}
    model = AutoModelForCausalLM.from_config(make_config(architecture, "tiny", overrides)).train()
    model.save_pretrained(folder / architecture)
    expected = plain_loop(model, data)
    settings = recipe(folder, name=architecture, model={"path": str(folder / architecture)}, duration={"steps": STEPS})
    found = curve(ranks.run(train_quietly, settings, world=2)[0], "loss", "grad_norm")
    losses, norms = zip(*found, strict=True)
    assert losses == pytest.approx([loss for loss, _ in expected], rel=1e-5)
    assert norms[0] == pytest.approx(expected[0][1], rel=1e-5)
    # The gradient of a key's bias is zero but for rounding, and Adam makes a full step of it.
    assert norms[1] == pytest.approx(expected[1][1], rel=1e-4)
    units = json.loads((folder / "runs" / architecture / "units.json").read_text())["units"]
    assert len(units) == model.config.num_hidden_layers + 1
    assert len({unit["class_name"] for unit in units[:-1]}) == 1
    assert units[-1]["name"] == "(root)"
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert bool(units[-1]["tied"]) == tied


def test_a_large_embedding_is_one_more_unit(ranks: RankPool, rows: tuple[Path, list[list[int]]]) -> None:
    model = {"path": None, "architecture": "llama", "size": "tiny", "overrides": {"vocab_size": 20_000}}
    settings = recipe(rows[0], name="large", model=model, duration={"steps": 1}, checkpoint={"at_end": False})
    ranks.run(train, settings, world=2)
    units = json.loads((rows[0] / "runs" / "large" / "units.json").read_text())["units"]
    assert [unit["class_name"] for unit in units] == [*["LlamaDecoderLayer"] * 2, "Embedding", "LlamaForCausalLM"]


# Modules that are not decoders: sharded by the same file, without a recipe


class Given(Family):
    """A module of the tests with fixed values, given out as a family does: on meta, read in slices."""

    name: str

    def build(self, *, processor: Any) -> nn.Module:
        from accelerate import init_empty_weights

        with init_empty_weights(include_buffers=False):
            module: nn.Module = plain_module(self.name)
        return module

    def weights(self, module: nn.Module) -> Weights | None:
        state: dict[str, torch.Tensor] = plain_module(self.name).state_dict()

        class Stored:
            def names(self) -> set[str]:
                return set(state)

            def read(self, name: str, start: int, stop: int) -> torch.Tensor:
                return state[name][start:stop] if state[name].dim() else state[name]

        return Stored()


def plain_module(name: str) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return (InPlace() if name == "in_place" else towers(name)).eval()


class InPlace(nn.Module):
    """Blocks that return views, in-place additions to which would drop FSDP's hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Viewing() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            x += 1.0
        return x


class Viewing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.tanh(self.up(x).square()))
        return out.view(out.shape)


def summed_loss(module: Any, name: str, rows: slice) -> Any:
    """A sum over samples, so that ranks with half of them each add up to the whole."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(3, 99, (4, 12), generator=generator)[rows]
    images = torch.randn(4, 3, 16, 16, generator=generator)[rows]
    if name == "in_place":
        return module(torch.randn(4, 8, generator=generator)[rows]).square().sum()
    if name == "bert":
        output = module(input_ids=ids)
        direction = torch.linspace(-1, 1, 32)
        return (output.last_hidden_state * direction).square().sum() + (output.pooler_output * direction).sum()
    output = module(input_ids=ids, pixel_values=images)
    direction = torch.linspace(-1, 1, output.text_embeds.shape[-1])
    # The diagonal: each pair by itself, through the model's own scale (and bias).
    return output.logits_per_image.diagonal().sum() + ((output.text_embeds - output.image_embeds) @ direction).sum()


def sharded_gradients(name: str) -> tuple[float, dict[str, torch.Tensor | None], list[Unit]]:
    world = join(device="cpu", backend="gloo", timeout_s=60)
    family = Given(name=name)
    module = family.build(processor=None).eval()
    layout = choose_layout("full", world, state_bytes=0)
    plan = ShardPlan(find_blocks(module), layout, torch.float32)
    mesh, weights = make_mesh(layout, world), family.weights(module)
    units = shard(module, plan, mesh, family=family, weights=weights, device=world.device, seed=0)
    half = slice(2 * world.rank, 2 * world.rank + 2) if world.size == 2 else slice(None)
    loss = summed_loss(module, name, half)
    loss.backward()
    grads = {n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else None for n, p in module.named_parameters()}
    return float(loss.detach()), grads, units


@pytest.mark.parametrize(("name", "num_blocks"), [("bert", 3), ("clip", 5), ("siglip", 5), ("in_place", 3)])
def test_forward_and_backward_are_those_of_the_plain_module(ranks: RankPool, name: str, num_blocks: int) -> None:
    plain = plain_module(name)
    loss = summed_loss(plain, name, slice(None))
    loss.backward()
    results = ranks.run(sharded_gradients, name, world=2)
    assert sum(found for found, _, _ in results) == pytest.approx(float(loss.detach()), rel=1e-5)
    _, grads, units = results[0]
    largest = max(float(p.grad.abs().max()) for p in plain.parameters() if p.grad is not None)
    assert sum(unit.name != "(root)" for unit in units) == num_blocks
    for key, parameter in plain.named_parameters():
        if parameter.grad is None:
            assert grads[key] is None or not grads[key].any(), key  # type: ignore[union-attr]
        else:
            found = grads[key]
            assert found is not None, key
            # The gradient of a key's bias is zero but for rounding.
            allowed = max(1e-5 * float(parameter.grad.abs().max()), 1e-6 * largest)
            apart = float((found.reshape(parameter.shape) - parameter.grad).abs().max())
            assert apart <= allowed, f"{key}: {apart:.1e}, allowed {allowed:.1e}"
