"""Dtypes by rule, on real sharded modules: what computes in fp32 whatever the precision is, what is never cast, where
casts happen, and what is kept in which dtype."""

from __future__ import annotations

import ast
import json
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

import fullshard
from fullshard.config.part import decode
from fullshard.contracts.model import Family, Weights
from fullshard.dist import values
from fullshard.dist.shard import Unit
from fullshard.dist.wrap import find_blocks
from fullshard.optim.adamw import AdamW
from tests.dist.denoiser import CHANNELS
from tests.dist.sharded_model import HALVES, dtypes_of, half, spread, tokens, whole
from tests.ranks import RankPool
from tests.slow import only_first
from tests.small import curve, model_folder, recipe, token_file, train

world_of = pytest.mark.parametrize("world", [1, 2])
DENOISERS = "tests.dist.denoiser.Denoisers"


# What computes in fp32


class Seen:
    """What enters a unit, what it computes with, and what leaves it."""

    def __init__(self, part: nn.Module) -> None:
        self.raw = self.output = torch.empty(0)
        self.inside: set[str] = set()
        # FSDP has hung its own hooks on the unit: one of ours comes before them, the others after.
        part.register_forward_pre_hook(self._before, prepend=True)
        part.register_forward_pre_hook(self._inside)
        part.register_forward_hook(self._after)

    def _before(self, part: nn.Module, args: Any) -> None:
        self.raw = args[0].detach()

    def _inside(self, part: nn.Module, args: Any) -> None:
        self.inside = {*dtypes_of(args), *(str(p.dtype).removeprefix("torch.") for p in part.parameters())}

    def _after(self, part: nn.Module, args: Any, output: Any) -> None:
        self.output = output


def routed(architecture: str, compute: torch.dtype) -> list[dict[str, Any]]:
    """Of each router: dtypes, and its choice beside that of plain routers in fp32 and in the compute dtype."""
    module, plan, units = spread({"architecture": architecture, "size": "tiny"}, compute)
    seen = {name: Seen(module.get_submodule(name)) for name in plan.wrap.exact}
    reference = AutoModelForCausalLM.from_config(module.config)
    reference.load_state_dict(whole(module))
    module(input_ids=tokens())
    found = []
    for name, router in seen.items():
        exact = reference.get_submodule(name)
        with torch.no_grad():
            _, scores, experts = exact(router.raw.float())
            rounded = exact.to(compute)(router.raw)[2]
        found.append(
            {
                "inside": router.inside,
                "dtypes": (*dtypes_of(router.raw), *dtypes_of(router.output)),
                "same choice": torch.equal(router.output[2], experts),
                "same scores": torch.equal(router.output[1], scores.to(compute)),
                "rounding would show": bool((rounded != experts).any()),
                "unit": [unit.compute for unit in units if unit.name == name],
            }
        )
    return found


@half
@world_of
@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe"])
def test_routers_choose_in_fp32(ranks: RankPool, architecture: str, world: int, compute: torch.dtype) -> None:
    word = str(compute).removeprefix("torch.")
    rounding = []
    for found in ranks.run(routed, architecture, compute, world=world):
        assert len(found) == 2
        for router in found:
            rounding.append(router.pop("rounding would show"))
            assert router == {
                "inside": {"float32"},
                "dtypes": (word, word, word, "int64"),
                "same choice": True,
                "same scores": True,
                "unit": ["float32"],
            }
    assert any(rounding) or compute == torch.float16, "near ties, or a rounded router would pass as well"


def normed(compute: torch.dtype) -> dict[str, tuple[set[str], tuple[str, ...], bool]]:
    module, plan, _ = spread({"architecture": "gpt_oss", "size": "tiny"}, compute)
    norms = [name for name in plan.wrap.exact if "norm" in name]
    seen = {name: Seen(module.get_submodule(name)) for name in norms}
    reference = AutoModelForCausalLM.from_config(module.config)
    reference.load_state_dict(whole(module))
    module(input_ids=tokens(64))
    found = {}
    for name, norm in seen.items():
        with torch.no_grad():
            expected = reference.get_submodule(name)(norm.raw.float()).to(compute)
        found[name] = norm.inside, dtypes_of(norm.output), torch.equal(norm.output, expected)
    return found


@half
def test_what_a_model_keeps_in_fp32_computes_in_fp32(ranks: RankPool, compute: torch.dtype) -> None:
    expected = ({"float32"}, (str(compute).removeprefix("torch."),), True)
    found = ranks.run(normed, compute, world=2)[0]
    layers = [f"model.layers.{i}.{name}" for i in range(2) for name in ("input_layernorm", "post_attention_layernorm")]
    assert found == dict.fromkeys([*layers, "model.norm"], expected)


def test_single_parameters_that_cannot_stay_in_fp32_are_named() -> None:
    family = decode(Family, {"architecture": "rwkv", "size": "tiny"}, where="model")
    plan = find_blocks(family.build(processor=None))
    assert plan.exact == []
    assert plan.inexact == [
        f"rwkv.blocks.{layer}.attention.{name}" for layer in range(2) for name in ("time_decay", "time_first")
    ]


def test_a_gated_mlp_is_not_a_router() -> None:
    family = decode(Family, {"architecture": "moshi", "size": "tiny"}, where="model")
    assert find_blocks(family.build(processor=None)).exact == []


# What is never cast


class Mixed(nn.Module):
    """Buffers of every kind; a part inside a block that is fed fp32, and a block that is."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(99, 8)
        self.blocks = nn.ModuleList(Upcast() for _ in range(2))
        self.register_buffer("table", torch.linspace(0, 1, 8).sin(), persistent=False)
        self.register_buffer("fine", torch.linspace(0, 1, 8, dtype=torch.float64).cos())
        self.register_buffer("count", torch.tensor([2**24 + 1]))
        self.register_buffer("coarse", torch.linspace(0, 1, 8).bfloat16())
        self.register_buffer("mask", torch.arange(8) % 2 == 0)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embed(ids)
        for block in self.blocks:
            x = block(x.float(), ids)
        return x


class Upcast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.inner = nn.Identity()

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        inner = self.inner(self.up(x).float())
        out: torch.Tensor = self.down(inner.to(x.dtype)) + ids[..., None].to(x.dtype) / 99
        return out


class MixedFamily(Family):
    """The module above."""

    def build(self, *, processor: Any) -> nn.Module:
        with init_empty_weights(include_buffers=False):
            return Mixed()

    def weights(self, module: nn.Module) -> Weights | None:
        return None

    def initialise(self, unit: nn.Module, *, root: nn.Module) -> None:
        for part in unit.modules():
            if hasattr(part, "reset_parameters") and not any(p.is_meta for p in part.parameters()):
                part.reset_parameters()  # type: ignore[operator]


MIXED = {"kind": f"{__name__}.MixedFamily"}


def buffers(settings: dict[str, Any], compute: torch.dtype) -> dict[str, torch.Tensor]:
    module, _, _ = spread(settings, compute)
    module(tokens(64))
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


@half
@pytest.mark.parametrize("architecture", only_first(["qwen3", "gemma3_text", "gpt_oss", "deepseek_v3", "own"]))
def test_buffers_keep_dtype_and_value(ranks: RankPool, architecture: str, compute: torch.dtype) -> None:
    settings = MIXED if architecture == "own" else {"architecture": architecture, "size": "tiny"}
    if architecture == "own":
        expected = dict(Mixed().named_buffers())
    else:
        config = decode(Family, settings, where="model")._config()  # type: ignore[attr-defined]
        expected = dict(AutoModelForCausalLM.from_config(config).named_buffers())
    assert expected
    for found in ranks.run(buffers, settings, compute, world=2):
        assert found.keys() == expected.keys()
        for name, buffer in expected.items():
            assert found[name].dtype == buffer.dtype, name
            assert torch.equal(found[name], buffer), name


def turned(compute: torch.dtype, first: int) -> list[torch.Tensor]:
    module, _, _ = spread({"architecture": "qwen3", "size": "tiny"}, compute)
    kept: list[torch.Tensor] = []
    module.model.rotary_emb.register_forward_hook(lambda _, args, output: kept.extend([args[1], *output]))
    module(input_ids=torch.arange(64)[None] + 3, position_ids=torch.arange(first, first + 64)[None])
    return kept


@half
def test_rotary_embeddings_of_far_positions_are_as_in_fp32(ranks: RankPool, compute: torch.dtype) -> None:
    first = 100_000
    positions, *found = ranks.run(turned, compute, first, world=2)[0]
    assert torch.equal(positions, torch.arange(first, first + 64)[None])
    config = decode(Family, {"architecture": "qwen3", "size": "tiny"}, where="model")._config()  # type: ignore[attr-defined]
    rotary = AutoModelForCausalLM.from_config(config).model.rotary_emb
    for ours, exact in zip(found, rotary(torch.zeros(1), positions), strict=True):
        assert ours.dtype == compute
        assert torch.equal(ours, exact.to(compute))
    # Cast before the sinusoid, or with frequencies that were, these angles are noise.
    rotary.inv_freq = rotary.inv_freq.to(compute)
    blind = rotary(torch.zeros(1), positions)[0]
    assert float((blind - found[0].float()).abs().max()) > 0.5


def boundaries(compute: torch.dtype) -> dict[str, tuple[str, ...]]:
    module, _, _ = spread(MIXED, compute)
    found: dict[str, tuple[str, ...]] = {}
    for name, part in module.named_modules():
        part.register_forward_pre_hook(lambda _, args, name=name: found.update({name: dtypes_of(args)}))
    module(tokens(64))
    return found


@half
def test_inputs_are_cast_at_the_boundary_of_a_unit_and_nowhere_else(ranks: RankPool, compute: torch.dtype) -> None:
    word = str(compute).removeprefix("torch.")
    expected: dict[str, tuple[str, ...]] = {"": ("int64",), "embed": ("int64",)}
    for block in ("blocks.0", "blocks.1"):
        expected |= {block: (word, "int64"), f"{block}.up": (word,), f"{block}.inner": ("float32",)}
        expected[f"{block}.down"] = (word,)
    assert ranks.run(boundaries, compute, world=2)[0] == expected


def reduced(compute: torch.dtype) -> torch.Tensor:
    """A gradient that is large on one rank and 1 on the other."""
    module, _, _ = spread(MIXED, compute)
    large = 1 / torch.finfo(compute).eps * 2
    (module(torch.tensor([[5]])).float() * (large if os.environ["RANK"] == "0" else 1.0)).sum().backward()
    gradient: torch.Tensor = module.blocks[1].down.bias.grad.full_tensor()
    return gradient - large


@half
def test_gradients_are_added_up_in_fp32(ranks: RankPool, compute: torch.dtype) -> None:
    """256 + 1 is 256 in bf16, and 2048 + 1 is 2048 in fp16."""
    large = torch.tensor(1 / torch.finfo(compute).eps * 2, dtype=compute)
    assert large + 1 == large
    for found in ranks.run(reduced, compute, world=2):
        assert torch.equal(found, torch.ones(8))


def test_there_is_no_autocast_in_the_package() -> None:
    for path in Path(fullshard.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = (getattr(node, key, None) for key in ("id", "attr", "name", "module"))
            assert not any("autocast" in name for name in names if isinstance(name, str)), path


# Recomputed activations


def recomputed(settings: dict[str, Any], compute: torch.dtype, mode: str) -> dict[str, list[tuple[str, ...]]]:
    """The dtypes that every leaf saw, call by call: its inputs and its parameters."""
    module, plan, _ = spread(settings, compute, recompute=mode)
    found: dict[str, list[tuple[str, ...]]] = defaultdict(list)

    def noting(name: str) -> Callable[..., None]:
        def note(part: nn.Module, args: Any, kwargs: Any) -> None:
            found[name].append((*dtypes_of((args, kwargs)), *dtypes_of(list(part.parameters()))))

        return note

    for name, part in module.named_modules():
        if next(part.children(), None) is None:
            part.register_forward_pre_hook(noting(name), with_kwargs=True)
    module.train()
    if settings.get("kind") == DENOISERS:
        output = module(torch.randn(4, 6, CHANNELS), torch.rand(4) * 1000)
    else:
        output = module(input_ids=tokens(64)).logits
    output.float().square().sum().backward()
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in module.parameters())
    return {name: calls for name, calls in found.items() if any(name.startswith(f"{b}.") for b in plan.wrap.blocks)}


@half
@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("model", only_first(["qwen3", "gpt_oss", "embedder", "in_blocks"]))
def test_recompute_sees_the_dtypes_of_the_forward(ranks: RankPool, model: str, mode: str, compute: torch.dtype) -> None:
    own = model in ("embedder", "in_blocks")
    settings = {"kind": DENOISERS, "name": model} if own else {"architecture": model, "size": "tiny"}
    found = ranks.run(recomputed, settings, compute, mode, world=2)[0]
    assert found
    for name, calls in found.items():
        assert len(calls) == 2, f"{name} was not run again"
        assert calls[0] == calls[1], name
    if model == "gpt_oss":
        assert {calls[0] for name, calls in found.items() if "norm" in name} == {("float32", "float32")}


# What is kept in which dtype


def loaded(settings: dict[str, Any], compute: torch.dtype) -> tuple[dict[str, torch.Tensor], set[str], list[Unit]]:
    module, _, units = spread(settings, compute)
    return whole(module), {name for name, p in module.named_parameters() if p.requires_grad}, units


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in three dtypes, and data."""
    path = tmp_path_factory.mktemp("stored")
    model_folder(path / "model")
    for word, dtype in HALVES.items():
        AutoModelForCausalLM.from_pretrained(path / "model", dtype=dtype).save_pretrained(path / word)
    token_file(path / "train.jsonl", records=90)
    return path


@pytest.mark.parametrize("word", HALVES)
def test_a_half_checkpoint_is_trained_in_fp32_from_exactly_its_values(ranks: RankPool, stored: Path, word: str) -> None:
    values_stored = load_file(stored / word / "model.safetensors")
    assert {tensor.dtype for tensor in values_stored.values()} == {HALVES[word]}
    found, trainable, units = ranks.run(loaded, {"path": str(stored / word)}, HALVES[word], world=2)[0]
    assert found.keys() == trainable
    for name, tensor in found.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, values_stored[name].float()), name
    assert {tuple(unit.storage) for unit in units} == {("float32",)}


@pytest.mark.parametrize("word", HALVES)
def test_adapters_are_fp32_on_a_frozen_half_base(ranks: RankPool, stored: Path, word: str) -> None:
    settings = {"path": str(stored / word), "lora": {"r": 4}}
    found, trainable, units = ranks.run(loaded, settings, HALVES[word], world=2)[0]
    assert trainable == {name for name in found if ".lora_" in name}
    assert {tensor.dtype for name, tensor in found.items() if name in trainable} == {torch.float32}
    assert {tensor.dtype for name, tensor in found.items() if name not in trainable} == {HALVES[word]}
    block = str(HALVES[word]).removeprefix("torch.")
    assert [unit.storage for unit in units if unit.name != "(root)"] == [sorted([block, "float32"])] * 3


def recast(settings: dict[str, Any], change: str) -> str:
    """What the proof says after somebody has cast."""
    module, _, _ = spread(settings, torch.bfloat16)
    planned = {name: p.dtype for name, p in module.named_parameters()}
    trainable = {name for name, p in module.named_parameters() if p.requires_grad}
    values.prove(module, trainable, planned)
    if change == "all":
        module.to(torch.bfloat16)
    else:
        module.get_submodule(change).half()
    try:
        values.prove(module, trainable, planned)
    except AssertionError as error:
        return str(error)
    return "none"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("all", "model.embed_tokens.weight is stored in torch.bfloat16, the plan says torch.float32"),
        ("model.layers.1.mlp.down_proj", "down_proj.weight is stored in torch.float16, the plan says torch.float32"),
    ],
)
def test_a_parameter_that_was_cast_is_found(ranks: RankPool, stored: Path, change: str, said: str) -> None:
    for found in ranks.run(recast, {"path": str(stored / "model")}, change, world=2):
        assert said in found


STATE: dict[str, set[str]] = {}


class StateAdamW(AdamW):
    """AdamW that notes the dtypes of what is trained, of gradients and of its own state."""

    def open(self, named_parameters: Any) -> torch.optim.Optimizer:
        optimizer = super().open(named_parameters)
        STATE.clear()

        def look(*_: Any) -> None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            state = [t for p in parameters for key, t in optimizer.state[p].items() if key != "step"]
            STATE["parameters"], STATE["state"] = set(dtypes_of(parameters)), set(dtypes_of(state))
            STATE["gradients"] = set(dtypes_of([p.grad for p in parameters]))

        optimizer.register_step_post_hook(look)
        return optimizer


def train_and_state(settings: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, set[str]]]:
    return train(settings), dict(STATE)


@pytest.mark.parametrize(("precision", "kept"), [("bf16-pure", "bfloat16"), ("bf16", "float32"), ("fp16", "float32")])
def test_parameters_gradients_and_optimizer_state_have_the_storage_dtype(
    ranks: RankPool, stored: Path, precision: str, kept: str
) -> None:
    settings = recipe(
        stored, name=precision, precision=precision, optimizer={"kind": f"{__name__}.StateAdamW", "lr": 1e-2}
    )
    results = ranks.run(train_and_state, settings, world=2)
    for _, state in results:
        assert state["parameters"] == state["state"] == {kept}
        assert state["gradients"] == {kept}
    losses = [loss for (loss,) in curve(results[0][0], "loss")]
    assert losses[-1] < losses[0] - 0.5
    run = stored / "runs" / precision
    log = (run / "log.txt").read_text().splitlines()
    warned = [line for line in log if "rank 0" in line and "an update smaller than 1/256 of a weight is lost" in line]
    assert len(warned) == (precision == "bf16-pure")
    units = json.loads((run / "units.json").read_text())["units"]
    assert {tuple(unit["storage"]) for unit in units} == {(kept,)}
    assert {unit["reduce"] for unit in units} == {"float32"}


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16-pure"])
def test_a_mixture_trains_with_routers_in_fp32(ranks: RankPool, stored: Path, precision: str) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "vocab_size": 97}
    settings = recipe(
        stored,
        name=f"mixture-{precision}",
        precision=precision,
        model={"path": None, "architecture": "mixtral", "size": "tiny", "overrides": shape},
        checkpoint={"at_end": False},
    )
    losses = [loss for (loss,) in curve(ranks.run(train, settings, world=2)[0], "loss")]
    assert losses[-1] < losses[0] - 0.3
    units = json.loads((stored / "runs" / settings["name"] / "units.json").read_text())["units"]
    compute = {"fp16": "float16"}.get(precision, "bfloat16")
    storage = "bfloat16" if precision == "bf16-pure" else "float32"
    routers = [unit for unit in units if unit["class_name"] == "MixtralTopKRouter"]
    assert [(unit["compute"], unit["storage"]) for unit in routers] == [("float32", ["float32"])] * 2
    others = [unit for unit in units if unit not in routers]
    assert {(unit["compute"], *unit["storage"]) for unit in others} == {(compute, storage)}
