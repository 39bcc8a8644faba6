"""Where a sharded model's values come from, on real ranks: stored or fresh, tied, frozen, buffers; what a rank has."""

from __future__ import annotations

import ctypes
import gc
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from fullshard.config.part import decode
from fullshard.contracts.model import Family, Weights
from fullshard.contracts.world import World
from fullshard.dist.mesh import choose_layout, make_mesh
from fullshard.dist.shard import ShardPlan, Unit, shard
from fullshard.dist.world import join
from fullshard.dist.wrap import find_blocks
from fullshard.errors import FullshardError, RecipeError
from fullshard.hf.architecture.sizes import make_config
from fullshard.setup.sharded_model import sync_batchnorm
from tests.near import assert_near
from tests.ranks import RankPool
from tests.small import model_folder, recipe, token_file, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("values")
    model_folder(path / "model")
    token_file(path / "train.jsonl", records=32)
    return path


def spread(settings: dict[str, Any], *, seed: int = 0) -> tuple[Any, list[Unit], Weights | None]:
    """A model as a run spreads it over its ranks; its units; where its values came from."""
    world = join(device="cpu", backend="gloo", timeout_s=60)
    family = decode(Family, settings, where="model")
    module = family.build(processor=None)
    layout = choose_layout("full", world, state_bytes=0)
    plan = ShardPlan(find_blocks(module, hints=family.blocks(module)), layout, torch.float32)
    mesh, weights = make_mesh(layout, world), family.weights(module)
    units = shard(module, plan, mesh, family=family, weights=weights, device=world.device, seed=seed)
    return module, units, weights


def whole(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter, gathered."""
    return {name: p.full_tensor().detach() for name, p in module.named_parameters() if isinstance(p, DTensor)}


def values(settings: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    gathered = whole(spread(settings, seed=seed)[0])
    return gathered if os.environ["RANK"] == "0" else {}


def problem(settings: dict[str, Any]) -> str:
    try:
        spread(settings)
    except FullshardError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


# No rank holds the whole model


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """427 MB in fp32; its largest unit has 51."""
    path = tmp_path_factory.mktemp("large")
    shape = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 7, "num_attention_heads": 8}
    config = LlamaConfig(**shape, vocab_size=8192, tie_word_embeddings=False, architectures=["LlamaForCausalLM"])
    config.save_pretrained(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    state = {name: torch.full(tensor.shape, 0.01) for name, tensor in model.state_dict().items()}
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    return path, sum(tensor.nbytes for tensor in state.values())


def growth(path: Path) -> tuple[int, int, int]:
    """How many bytes loading adds to this rank's peak memory: pages mapped from the file included, and without them;
    and the bytes it keeps."""
    spread({"architecture": "llama", "size": "tiny"})  # imports and first allocations are not the model's
    # What earlier work freed must not be counted as there already: the load would grow into it unseen.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    resident, mapped = status("VmRSS"), status("RssFile")
    module, units, weights = spread({"path": str(path)})
    assert weights is not None  # still open, so that what it has mapped still is
    peak, mapped = status("VmHWM") - resident, status("RssFile") - mapped
    assert max(unit.parameters for unit in units) * 4 < 60e6
    return peak, peak - mapped, sum(p.to_local().nbytes for p in module.parameters())


def status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def test_no_rank_ever_holds_the_whole_model(ranks: RankPool, large_model: tuple[Path, int]) -> None:
    """Of 4 ranks each keeps a quarter and may need 40 % of the model at any time; 30 % are seen. The file is mapped
    beside that, and the system maps more of it than is read: 78 % with it are seen, and 90 % allowed."""
    path, size = large_model
    for peak, own, kept in ranks.run(growth, path, world=4):
        assert kept == pytest.approx(size / 4, rel=0.01)
        assert own < 0.4 * size, f"{own / size:.0%} of the model"
        assert peak < 0.9 * size, f"{peak / size:.0%} of the model"
    [(_, alone, _)] = ranks.run(growth, path, world=1)
    assert alone > 0.95 * size, "the measurement must see a whole model"


# Fresh values


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_fresh_values_do_not_depend_on_the_number_of_ranks(ranks: RankPool, architecture: str) -> None:
    settings = {"architecture": architecture, "size": "tiny"}
    alone, *others = (ranks.run(values, settings, world=world)[0] for world in (1, 2, 4))
    for found in others:
        assert found.keys() == alone.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in alone.items())
    other_seed = ranks.run(values, settings, seed=1, world=1)[0]
    random = [name for name, tensor in alone.items() if tensor.std() > 0]
    assert random
    assert not any(torch.equal(alone[name], other_seed[name]) for name in random)


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2", "opt"])
def test_fresh_values_are_distributed_as_transformers_draws_them(ranks: RankPool, architecture: str) -> None:
    found = ranks.run(values, {"architecture": architecture, "size": "tiny"}, world=2)[0]
    expected = dict(AutoModelForCausalLM.from_config(make_config(architecture, "tiny", {})).named_parameters())
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        std, count = float(tensor.detach().std()) if tensor.numel() > 1 else 0.0, tensor.numel()
        if std == 0:
            assert torch.equal(found[name], tensor.detach()), name
        else:  # five standard errors of a standard deviation and of a difference of means
            assert float(found[name].std()) == pytest.approx(std, rel=5 / count**0.5), name
            assert float((found[name].mean() - tensor.detach().mean()).abs()) < 5 * std * (2 / count) ** 0.5, name


# A model of our own, for what Transformers' decoders do not have


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 7), nn.Linear(7, 6, bias=False)
        self.one_row = nn.Parameter(torch.randn(1, 6))
        self.scalar = nn.Parameter(torch.randn(()))
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.scalar * self.norm(self.down(torch.tanh(self.up(x))) * self.one_row)
        return out


class Odd(nn.Module):
    """Parameters of one row, of no dimension, and with sizes that no number of ranks divides; buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 13, bias=False)
        self.register_buffer("table", torch.linspace(0, 1, 6), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.table
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


class Stored:
    """Weights from memory."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        self._state = state

    def names(self) -> set[str]:
        return set(self._state)

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self._state[name][start:stop] if self._state[name].dim() else self._state[name]


def odd_model(*, tied: bool = False) -> Odd:
    torch.manual_seed(5)
    module = Odd()
    for norm in (part for part in module.modules() if isinstance(part, nn.BatchNorm1d)):
        norm.running_mean.uniform_()  # type: ignore[union-attr]
        norm.num_batches_tracked.fill_(17)  # type: ignore[union-attr, operator]
    if tied:
        module.head.weight = module.embed.weight
    return module


class OddFamily(Family):
    """The model above, from stored values; without those of `lost`, which nothing else sets either."""

    lost: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    tied: bool = False

    def build(self, *, processor: Any) -> nn.Module:
        module = odd_model(tied=self.tied)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not name.startswith(self.frozen) if self.frozen else True)
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        module.to("meta")
        if self.tied:  # moved one by one, they have come apart
            module.head.weight = module.embed.weight
        for name, buffer in buffers.items():
            owner, _, key = name.rpartition(".")
            # As a family gives them: real, but for stored ones not with their values.
            fresh = torch.zeros_like(buffer) if name != "table" else buffer
            module.get_submodule(owner)._buffers[key] = fresh
        return module

    def weights(self, module: nn.Module) -> Weights | None:
        return Stored({n: t for n, t in odd_model(tied=self.tied).state_dict().items() if n not in self.lost})

    def initialise(self, unit: nn.Module, *, root: nn.Module) -> None:
        """Sets nothing."""


ODD = f"{__name__}.OddFamily"


def odd_step(settings: dict[str, Any]) -> dict[str, Any]:
    """Output, gradients and values after one update, on this rank's share of the rows."""
    module = spread({"kind": ODD, **settings})[0]
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.1, fused=True)
    module.eval()
    rows = batch().chunk(int(os.environ["WORLD_SIZE"]))[int(os.environ["RANK"])]
    (module(rows).square().sum() / 24).backward()
    grads = {n: p.grad.full_tensor() if p.grad is not None else None for n, p in module.named_parameters()}
    held = {name: p.grad is not None for name, p in module.named_parameters()}
    optimizer.step()
    return {
        "grads": grads,
        "held": held,
        "state": {n for n, p in module.named_parameters() if p in optimizer.state},
        "values": whole(module),
        "buffers": dict(module.named_buffers()),
        "one": module.head.weight is module.embed.weight,
    }


def batch() -> torch.Tensor:
    return torch.arange(24) * 5 % 13


def plain_step(*, tied: bool = False) -> tuple[Odd, Odd]:
    """The model with its gradients before the update, and after it."""
    before, after = odd_model(tied=tied).eval(), odd_model(tied=tied).eval()
    optimizer = torch.optim.AdamW(after.parameters(), lr=0.1)
    for module in (before, after):
        (module(batch()).square().sum() / 24).backward()
    optimizer.step()
    return before, after


@pytest.mark.parametrize("world", [1, 2, 4])
def test_odd_sizes_give_the_gradients_and_the_update_of_a_plain_module(ranks: RankPool, world: int) -> None:
    plain, updated = plain_step()
    found = ranks.run(odd_step, {}, world=world)[0]
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        grad = found["grads"][name].reshape(parameter.shape)
        assert_near(grad, parameter.grad, what=name)
    for name, parameter in updated.named_parameters():
        assert_near(found["values"][name].reshape(parameter.shape), parameter, within=1e-4, what=name)


def test_buffers_are_those_of_the_plain_model(ranks: RankPool) -> None:
    plain = dict(odd_model().named_buffers())
    for found in ranks.run(odd_step, {}, world=4):
        assert found["buffers"].keys() == plain.keys()
        for name, buffer in plain.items():
            assert torch.equal(found["buffers"][name], buffer), name
    assert plain["blocks.0.norm.num_batches_tracked"] == 17


def rotary(path: Path) -> dict[str, torch.Tensor]:
    return dict(spread({"path": str(path)})[0].named_buffers())


def test_buffers_that_are_not_stored_are_those_of_transformers(ranks: RankPool, folder: Path) -> None:
    plain = dict(AutoModelForCausalLM.from_pretrained(folder / "model").named_buffers())
    assert "model.rotary_emb.inv_freq" in plain
    for found in ranks.run(rotary, folder / "model", world=2):
        assert found.keys() == plain.keys()
        assert all(torch.equal(found[name], buffer) for name, buffer in plain.items())


@pytest.mark.parametrize("lost", ["head.weight", "blocks.1.one_row", "blocks.2.scalar"])
def test_an_unset_value_is_refused_by_name_on_every_rank(ranks: RankPool, lost: str) -> None:
    for said in ranks.run(problem, {"kind": ODD, "lost": [lost]}, world=2):
        assert said.startswith(
            "CheckpointError: After loading, values of 1 parameter are missing or NaN, first " + lost
        ), said


FROZEN = ("embed", "blocks.0", "blocks.1.up")


def test_frozen_parameters_cost_no_gradient_and_stay_bit_by_bit(ranks: RankPool) -> None:
    before, after = plain_step()
    for found in ranks.run(odd_step, {"frozen": FROZEN}, world=4):
        for name, parameter in before.named_parameters():
            frozen = name.startswith(FROZEN)
            assert found["held"][name] != frozen, name
            assert (name in found["state"]) != frozen, name
            kept = torch.equal(found["values"][name].reshape(parameter.shape), parameter.detach())
            assert kept == frozen, name
    assert not torch.equal(before.embed.weight, after.embed.weight), "unfrozen it would have moved"


def test_a_frozen_part_stays_bit_by_bit_through_a_run(ranks: RankPool, folder: Path) -> None:
    settings = recipe(folder, name="frozen", model={"freeze": ["model.layers.1.*", "model.embed_tokens.*"]})
    ranks.run(train, settings, world=2)
    before = load_file(folder / "model" / "model.safetensors")
    after = load_file(folder / "runs" / "frozen" / "model" / "model.safetensors")
    for name, tensor in before.items():
        frozen = name.startswith(("model.layers.1.", "model.embed_tokens."))
        assert torch.equal(after[name], tensor) == frozen, name


# Ties


def test_a_tied_weight_is_one_tensor_after_load_and_after_a_step(ranks: RankPool) -> None:
    plain, updated = plain_step(tied=True)
    for found in ranks.run(odd_step, {"tied": True}, world=2):
        assert found["one"]
        assert "head.weight" not in found["values"]
        assert_near(found["grads"]["embed.weight"], plain.embed.weight.grad)
        assert_near(found["values"]["embed.weight"], updated.embed.weight.detach(), within=1e-4)


@pytest.mark.parametrize(
    "model", [{}, {"path": None, "architecture": "gpt2", "size": "tiny", "overrides": {"vocab_size": 97}}]
)
def test_a_tied_weight_is_one_tensor_in_the_export(ranks: RankPool, folder: Path, model: dict[str, Any]) -> None:
    settings = recipe(folder, name=f"tied-{model.get('architecture')}", model=model, duration={"steps": 2})
    ranks.run(train, settings, world=2)
    exported = folder / "runs" / settings["name"] / "model"
    with safe_open(exported / "model.safetensors", framework="pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118  a handle, not a mapping
    loaded = AutoModelForCausalLM.from_pretrained(exported)
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert AutoConfig.from_pretrained(exported).tie_word_embeddings
    units = json.loads((exported.parent / "units.json").read_text())["units"]
    assert [len(group) for unit in units for group in unit["tied"]] == [2]


# Refusals


def test_a_truncated_weight_file_is_named_on_every_rank(ranks: RankPool, folder: Path) -> None:
    damaged = model_folder(folder / "damaged") / "model.safetensors"
    with damaged.open("r+b") as file:
        file.truncate(damaged.stat().st_size // 2)
    for said in ranks.run(problem, {"path": str(damaged.parent)}, world=2):
        assert said.startswith(f"CheckpointError: {damaged} (")
        assert "truncated" in said


def test_shared_batch_norm_is_refused_on_a_cpu() -> None:
    world = World(rank=0, size=2, local_rank=0, local_size=2, device=torch.device("cpu"), backend="gloo")
    with pytest.raises(RecipeError, match="sharding.sync_batchnorm = true needs GPUs.*Set it to false"):
        sync_batchnorm(odd_model(), world, say=print)
    plain = nn.Sequential(nn.Linear(2, 2))
    assert sync_batchnorm(plain, world, say=print) is plain
