"""`fullshard.shard` against a plain PyTorch loop in one process: same losses and weights on any number of ranks."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn

import fullshard
from fullshard import RecipeError, SetupError
from fullshard.dist import world as worlds
from tests.near import assert_near
from tests.own_loop import loops
from tests.own_loop.loops import build, plain, sharded
from tests.ranks import RankPool

NEAR = 1e-6


def require_same(found: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    assert_near(found[0], expected[0], NEAR, what="losses")
    assert set(found[1]) == set(expected[1])
    for name, weight in expected[1].items():
        assert_near(found[1][name].reshape(weight.shape), weight, NEAR, what=name)


@pytest.fixture
def alone() -> Any:
    """A single rank in this process, without a launcher."""
    yield
    worlds.leave(at_exit=True)


@pytest.mark.parametrize("kind", ["mlp", "tied", "frozen"])
def test_any_number_of_ranks_trains_as_one_process(kind: str, ranks: RankPool) -> None:
    expected, first = plain(kind), dict(build(kind).named_parameters())
    for world in (1, 2, 4):
        found = ranks.run(sharded, kind, world=world)
        assert found[0][0] == found[-1][0]
        require_same(found[0], expected)
    moved = {
        name for name, weight in found[0][1].items() if not torch.equal(weight.reshape(first[name].shape), first[name])
    }
    assert moved == {name for name, parameter in first.items() if parameter.requires_grad}
    if kind == "frozen":
        assert found[0][1]["first.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "none"},
        {"strategy": "grad_op", "wrap": "Block"},
        {"wrap": loops.Block, "activation_checkpointing": "full", "forward_prefetch": True},
        {"wrap": 100, "activation_checkpointing": "selective"},
        {"wrap": "whole", "cpu_offload": True},
    ],
    ids=str,
)
def test_every_way_to_shard_trains_the_same(options: dict[str, Any], ranks: RankPool) -> None:
    require_same(ranks.run(sharded, "frozen", world=2, **options)[0], plain("frozen"))


def units_and_gradients(gradients: str) -> tuple[list[str], torch.Tensor]:
    from fullshard.dist.shard import fsdp_modules

    model = fullshard.shard(build("frozen"), device="cpu", gradients=gradients)
    rank = torch.distributed.get_rank()
    loops.loss_of("frozen", model, loops.batch("frozen", 0).chunk(2)[rank]).backward()
    return [type(unit).__name__ for unit in fsdp_modules(model)], loops.gradient_of_head(model)


def test_gradients_are_averaged_or_summed(ranks: RankPool) -> None:
    model = build("frozen")
    loops.loss_of("frozen", model, loops.batch("frozen", 0)).backward()
    units, mean = ranks.run(units_and_gradients, "mean", world=2)[0]
    assert sorted(units) == ["FSDPBlock", "FSDPBlock", "FSDPBlock", "FSDPBlocks"]
    assert_near(mean, model.head.weight.grad, NEAR)
    assert_near(ranks.run(units_and_gradients, "sum", world=2)[0][1], 2 * model.head.weight.grad, NEAR)


def test_values_of_rank_0_win(ranks: RankPool) -> None:
    """As in DDP, if each rank has drawn its own."""
    require_same(ranks.run(sharded, "frozen", world=2, seed_by_rank=True)[1], plain("frozen"))


def from_meta(meta_on: str) -> dict[str, torch.Tensor]:
    rank = torch.distributed.get_rank()
    on_meta = meta_on == "all" or rank > 0
    with torch.device("meta" if on_meta else "cpu"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
    return loops.weights(fullshard.shard(model, device="cpu", seed=3))


def test_parameters_on_meta(ranks: RankPool) -> None:
    """Only rank 0 needs the weights; without any they are drawn, the same for any number of ranks."""
    torch.manual_seed(0)
    real = dict(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)).named_parameters())
    assert all(torch.equal(weight, real[name]) for name, weight in ranks.run(from_meta, "others", world=2)[1].items())
    drawn = [ranks.run(from_meta, "all", world=world)[0] for world in (1, 2)]
    assert all(torch.equal(drawn[1][name], weight) for name, weight in drawn[0].items())
    assert float(drawn[0]["0.weight"].std()) > 0.1


def test_precision(alone: None) -> None:
    model = fullshard.shard(build("mlp").to(torch.bfloat16), precision="bf16-mixed", device="cpu")
    seen: list[torch.dtype] = []
    model[0].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model(torch.randn(2, 6)).dtype == torch.float32
    assert seen == [torch.bfloat16]


def different_models() -> str:
    model = nn.Linear(2, 3 + torch.distributed.get_rank())
    with pytest.raises(SetupError) as caught:
        fullshard.shard(model, device="cpu")
    return str(caught.value)


def test_different_models_are_refused_on_every_rank(ranks: RankPool) -> None:
    for said in ranks.run(different_models, world=2):
        assert "The ranks have built different models: bias is [3], trained on rank 0" in said


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile
def test_what_cannot_be_sharded(alone: None) -> None:
    model = build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(SetupError, match=r"SGD was built before fullshard\.shard.*Shard first"):
        fullshard.shard(model)
    assert not next(model.parameters()).is_meta
    del optimizer
    with pytest.raises(SetupError, match="takes an nn.Module, found dict"):
        fullshard.shard(cast(Any, {}))
    with pytest.raises(SetupError, match="Tanh has no parameters"):
        fullshard.shard(nn.Tanh())
    counts = nn.Linear(2, 2)
    counts.number = nn.Parameter(torch.tensor([1]), requires_grad=False)
    with pytest.raises(SetupError, match="number is stored as torch.int64"):
        fullshard.shard(counts)
    with pytest.raises(SetupError, match="weight has no shape yet: LazyLinear has lazy modules. Run one batch"):
        fullshard.shard(nn.LazyLinear(3))
    with pytest.raises(SetupError, match="is compiled as a whole.*compile=True"):
        fullshard.shard(cast(Any, torch.compile(build("mlp"))))
    fullshard.shard(model, device="cpu")
    with pytest.raises(SetupError, match="sharded already"):
        fullshard.shard(model)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"strategy": "fulll"}, r"fullshard\.shard\.strategy.*'fulll'.*full"),
        (
            {"precision": "bf17"},
            r"precision = 'bf17': not a precision \(did you mean|precision = 'bf17': not a precision",
        ),
        ({"wrap": "Blok"}, r"wrap = 'Blok': classes: Blocks has no module of class 'Blok'.*Block"),
        ({"wrap": 10**9}, 'wrap = 1000000000: min_params = 1,000,000,000: no module below Blocks.*wrap="whole"'),
        ({"gradients": "average"}, "gradients = 'average'; allowed: mean, sum"),
        ({"device": "tpu"}, "device = 'tpu': it must be one of auto, cuda, cpu"),
        ({"device": torch.device("cpu")}, "fullshard.init.device"),
        ({"seed": "a"}, "seed = 'a'; it must be a whole number"),
        *(({"wrap": wrap}, "wrap = .*Allowed: a class or its name") for wrap in (0, -1, True, 3.5, [], [3], int)),
    ],
)
def test_wrong_options(options: dict[str, Any], said: str, alone: None) -> None:
    fullshard.init(device="cpu")
    with pytest.raises((RecipeError, SetupError), match=said) as caught:
        fullshard.shard(build("frozen"), **{"device": "cpu", **options})
    assert "sharding.wrap" not in str(caught.value)


def test_half_of_a_launchers_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SetupError, match="RANK=1 is set, WORLD_SIZE is not"):
        fullshard.init()
    with pytest.raises(SetupError, match=r"clip_grad_norm: the model is not sharded\. Call model = fullshard\.shard"):
        fullshard.clip_grad_norm(build("mlp"), 1.0)


@pytest.mark.parametrize("norm", [-1.0, 0, float("nan"), "1", None])
def test_a_norm_that_would_turn_gradients_around(norm: Any, alone: None) -> None:
    model = fullshard.shard(build("mlp"), device="cpu")
    with pytest.raises(SetupError, match=r"max_norm = .*; it must be a number above 0"):
        fullshard.clip_grad_norm(model, norm)
