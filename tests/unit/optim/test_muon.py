"""Muon on slices is torch's Muon in one process, and AdamW for the rest; which parameters go where; exact resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.errors import RecipeError
from fullshard.optim.muon import Muon
from tests.near import assert_near
from tests.ranks import RankPool

STEPS, LR = 3, 0.02
SETTINGS = {
    "as AdamW": {"lr": LR},
    "original": {"lr": LR, "adjust": "original", "nesterov": False, "momentum": 0.9, "iterations": 3},
    "own rate": {"lr": LR, "matrix_lr": 0.05, "weight_decay": 0.3},
}


class Model(nn.Module):
    """Tall, wide and square matrices, one with fewer rows than ranks, and what is not for Muon."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 3)) for _ in range(2))
        self.head = nn.Linear(3, 5, bias=False)


def made() -> tuple[Model, list[dict[str, torch.Tensor]]]:
    """The model and the gradients of every step, the same in every process."""
    generator = torch.Generator().manual_seed(5)
    model = Model()
    draws: list[dict[str, torch.Tensor]] = []
    for step in range(STEPS + 1):
        draws.append({n: torch.randn(p.shape, generator=generator) for n, p in model.named_parameters()})
        if step == 0:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(draws[0][name])
    return model, draws[1:]


def on_ranks(settings: dict[str, Any], strategy: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The parameters and the state after all steps on slices, gathered again."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, distribute_tensor

    from fullshard.checkpoint.tensors import materialise_state, optimizer_tensors
    from fullshard.dist.mesh import choose_layout, make_mesh
    from fullshard.dist.world import join

    world = join(device="cpu", backend="gloo", timeout_s=60)
    model, gradients = made()
    mesh = make_mesh(choose_layout(strategy, world, state_bytes=0), world)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = Muon(**settings).open(model.named_parameters())
    before = {name: p.detach().to_local().clone() for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    materialise_state(optimizer)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.detach().to_local(), before[name]), name  # type: ignore[attr-defined]
    optimizer.state.clear()
    for gradient in gradients:
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            parameter.grad = distribute_tensor(gradient[name], parameter.device_mesh, parameter.placements)
        optimizer.step()
    state = optimizer_tensors(model, optimizer)
    return (
        {name: p.detach().full_tensor() for name, p in model.named_parameters()},  # type: ignore[attr-defined]
        {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state.items()},
    )


def in_one_process(settings: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """torch's own optimizers, side by side."""
    model, gradients = made()
    parameters = dict(model.named_parameters())
    matrices = [p for n, p in parameters.items() if n.startswith("blocks") and p.dim() == 2]
    vectors = [p for n, p in parameters.items() if p.dim() == 1]
    decay, lr = settings.get("weight_decay", 0.1), settings["lr"]
    muon = torch.optim.Muon(
        matrices,
        lr=settings.get("matrix_lr", lr),
        weight_decay=decay,
        momentum=settings.get("momentum", 0.95),
        nesterov=settings.get("nesterov", True),
        ns_steps=settings.get("iterations", 5),
        adjust_lr_fn=settings.get("adjust", "match_rms_adamw"),
    )
    groups = [
        {"params": [model.embedding.weight, model.head.weight], "weight_decay": decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8)
    for gradient in gradients:
        for name, parameter in parameters.items():
            parameter.grad = gradient[name].clone()
        muon.step()
        adamw.step()
    state = {f"{n}/{key}": t for n, p in parameters.items() for key, t in {**muon.state[p], **adamw.state[p]}.items()}
    return {name: p.detach() for name, p in parameters.items()}, state


@pytest.mark.parametrize(
    ("settings", "world", "strategy"),
    [("as AdamW", 1, "full"), ("as AdamW", 2, "full"), ("as AdamW", 4, "full"), ("as AdamW", 2, "none")]
    + [("original", 2, "full"), ("own rate", 2, "full")],
)
def test_slices_are_updated_as_torch_updates_whole_matrices(
    ranks: RankPool, settings: str, world: int, strategy: str
) -> None:
    parameters, state = in_one_process(SETTINGS[settings])
    for found, kept in ranks.run(on_ranks, SETTINGS[settings], strategy, world=world):
        for name, expected in parameters.items():
            assert_near(found[name], expected, what=name)
        assert kept.keys() == state.keys()
        for name, tensor in state.items():
            assert_near(kept[name], tensor, within=1e-6, what=name)


def test_embeddings_and_output_layers_of_a_dit_use_adamw() -> None:
    from fullshard.families.diffusion.models.diffusers import Diffusers

    module = Diffusers(architecture="dit", size="tiny", classes=10).build(processor=None)
    shapes = [(name, p.dim()) for name, p in module.named_parameters()]
    taken = Muon().taken(shapes)
    assert {name.partition(".")[0] for name in taken} == {"transformer_blocks"}
    assert {"transformer_blocks.0.attn1.to_q.weight", "transformer_blocks.1.ff.net.0.proj.weight"} <= taken
    assert "transformer_blocks.0.norm1.linear.weight" in taken
    assert not [name for name in taken if "embed" in name or name.endswith("bias")]
    chosen = Muon(matrices=["*.attn1.*"]).taken(shapes)
    assert chosen == {name for name in taken if ".attn1." in name}


def test_every_parameter_has_one_group_and_vectors_do_not_decay() -> None:
    model, _ = made()
    optimizer = Muon(weight_decay=0.2).open(model.named_parameters())
    groups = [
        ({id(p) for p in group["params"]}, group["weight_decay"], group["lr"]) for group in optimizer.param_groups
    ]
    assert sum(len(members) for members, _, _ in groups) == len(list(model.parameters()))
    assert {id(p) for p in model.parameters()} == set().union(*(members for members, _, _ in groups))
    assert [decay for _, decay, _ in groups] == [0.2, 0.2, 0.0]
    assert groups[2][0] == {id(p) for p in model.parameters() if p.dim() == 1}


def test_no_matrix_or_no_match_is_an_error() -> None:
    with pytest.raises(RecipeError, match=r"no trained matrix is in a numbered block.*head\.weight"):
        Muon().taken([("head.weight", 2), ("norm.weight", 1)])
    with pytest.raises(RecipeError, match=r"optimizer\.matrices\[0\] = 'blocks\.\*' matches no trained matrix"):
        Muon(matrices=["blocks.*"]).taken([("layers.0.weight", 2)])


def test_a_resumed_run_equals_an_uninterrupted_one(ranks: RankPool, tmp_path: Path) -> None:
    from tests.small import curve, model_folder, recipe, token_file, train

    model_folder(tmp_path / "model")
    token_file(tmp_path / "train.jsonl", records=60)
    settings = {"optimizer": {"kind": "muon", "lr": 1e-2}, "schedule": {"kind": "constant"}}
    straight = ranks.run(train, recipe(tmp_path, name="straight", duration={"steps": 4}, **settings), world=2)[0]
    ranks.run(train, recipe(tmp_path, name="half", duration={"steps": 2}, **settings), world=2)
    resumed = ranks.run(train, recipe(tmp_path, name="half", duration={"steps": 4}, **settings), world=2)[0]
    assert curve(resumed, "loss", "grad_norm") == curve(straight, "loss", "grad_norm")
    assert len(curve(resumed, "loss")) == 4
    assert curve(straight, "loss")[3] < curve(straight, "loss")[0]
