"""The wrap plan, on real architectures built small."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fullshard.dist.wrap import WrapPlan, find_blocks, tied_groups, unit_parameters
from fullshard.errors import RecipeError
from tests.unit.hf.architectures import CAUSAL, TIED, build, towers


def covers_once(module: nn.Module, plan: WrapPlan) -> None:
    owned = [name for names in unit_parameters(module, plan).values() for name in names]
    assert sorted(owned) == sorted(name for name, _ in module.named_parameters())
    assert len(owned) == len(set(owned))


@pytest.mark.parametrize("architecture", sorted(CAUSAL))
def test_blocks_of_a_decoder_are_its_layers(architecture: str) -> None:
    module = build(architecture)
    plan = find_blocks(module)
    assert len(plan.blocks) == CAUSAL[architecture]
    assert [name.rpartition(".")[2] for name in plan.blocks] == ["0", "1"]
    covers_once(module, plan)
    assert bool(tied_groups(module)) == (architecture in TIED)
    units = unit_parameters(module, plan)
    assert all(units[block] for block in plan.blocks), "every block owns parameters"


@pytest.mark.parametrize("architecture", ["clip", "siglip"])
def test_both_towers_are_found(architecture: str) -> None:
    module = towers(architecture)
    plan = find_blocks(module)
    assert sum("text" in name for name in plan.blocks) == 3
    assert sum("vision" in name for name in plan.blocks) == 2
    assert len(plan.blocks) == 5
    covers_once(module, plan)


def test_the_full_gemma3_has_blocks_in_both_towers() -> None:
    module = build("gemma3")
    plan = find_blocks(module)
    assert sum("vision_tower" in name for name in plan.blocks) == 2
    assert sum("language_model" in name for name in plan.blocks) == 2
    covers_once(module, plan)


def test_blocks_of_bert() -> None:
    module = towers("bert")
    assert find_blocks(module).blocks == [f"encoder.layer.{i}" for i in range(3)]


def test_structure_alone_finds_the_same_blocks() -> None:
    for module in (build("llama"), towers("clip"), towers("bert")):
        assert find_blocks(module, hints=[]).blocks == find_blocks(module).blocks


class Block(nn.Module):
    def __init__(self, width: int, inner: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.inner = nn.ModuleList(Block(width) for _ in range(inner))


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module, vocabulary: int = 10) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 8)
        self.layers = nn.ModuleList(blocks)
        self.head = nn.Linear(8, vocabulary, bias=False)


def test_nested_lists_give_the_outermost_stack() -> None:
    module = Stack(*(Block(8, inner=3) for _ in range(2)))
    assert find_blocks(module).blocks == ["layers.0", "layers.1"]


def test_a_block_that_shares_a_parameter_with_the_outside_stays_in_the_root() -> None:
    module = Stack(*(Block(8) for _ in range(3)))
    module.layers[1].linear.weight = module.layers[2].linear.weight  # type: ignore[union-attr]
    plan = find_blocks(module)
    assert plan.blocks == ["layers.0"]
    assert "share parameters" in plan.reason
    covers_once(module, plan)


def test_a_large_embedding_is_a_unit_unless_it_is_tied() -> None:
    with torch.device("meta"):
        module = Stack(Block(8), Block(8), vocabulary=200_000)
    assert find_blocks(module).separate == ["embed"]
    module.head.weight = module.embed.weight
    assert find_blocks(module).separate == []
    assert tied_groups(module) == [["embed.weight", "head.weight"]]


def test_a_model_without_blocks_is_one_unit_only_on_request() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(RecipeError, match="no repeated blocks.*sharding.wrap.whole"):
        find_blocks(module)
    assert find_blocks(module, whole=True).blocks == []


def test_classes_override_and_unknown_ones_name_candidates() -> None:
    module = build("llama")
    assert len(find_blocks(module, classes=["LlamaMLP"]).blocks) == 2
    covers_once(module, find_blocks(module, classes=["LlamaMLP", "LlamaDecoderLayer"]))
    with pytest.raises(RecipeError, match=r"did you mean 'LlamaDecoderLayer'.*Candidates: .*LlamaDecoderLayer"):
        find_blocks(module, classes=["LlamaDecoderLayr"])


def test_min_params_wraps_by_size() -> None:
    module = build("llama")
    layer = sum(p.numel() for p in module.get_submodule("model.layers.0").parameters())
    plan = find_blocks(module, min_params=layer)
    assert plan.blocks[:2] == ["model.layers.0", "model.layers.1"]
    covers_once(module, plan)
    with pytest.raises(RecipeError, match="min_params = 1,000,000,000.*no module"):
        find_blocks(module, min_params=10**9)


def test_min_params_leaves_a_tied_pair_in_one_unit() -> None:
    module = build("gpt2")
    plan = find_blocks(module, min_params=1000)
    assert tied_groups(module) == [["transformer.wte.weight", "lm_head.weight"]]
    assert "transformer.wte.weight" in unit_parameters(module, plan)[""]
    assert not {"transformer.wte", "lm_head", "transformer"} & set(plan.blocks)
