"""DiT's blocks as our kernels compute them, against diffusers' own: the same prediction and the same gradients."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from concurrent.futures import Executor
from typing import Any

import pytest
import torch
from diffusers import DiTTransformer2DModel, UNet2DModel
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from fullshard.dist import recompute
from fullshard.families.diffusion.kernels.fused import fuse
from fullshard.families.diffusion.models.diffusers import Diffusers
from tests.triton_interpreter import far, interpreter


def _model(**settings: Any) -> DiTTransformer2DModel:
    torch.manual_seed(0)
    shape = {
        "num_attention_heads": 2,
        "attention_head_dim": 24,
        "num_layers": 1,
        "sample_size": 4,
        "norm_num_groups": 2,
    }
    model = DiTTransformer2DModel(in_channels=4, out_channels=4, num_embeds_ada_norm=10, **shape | settings)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    for block in model.transformer_blocks:
        block.norm1.emb.class_embedder.dropout_prob = 0.0
    return model


def _run(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    noisy, times = torch.randn(2, 4, 4, 4, generator=draw), torch.rand(2, generator=draw) * 1000
    found = model(noisy, times, torch.tensor([1, 10])).sample
    gradients = torch.autograd.grad(found.square().sum(), list(model.parameters()))
    return found, dict(zip(dict(model.named_parameters()), gradients, strict=True))


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Executor]:
    with interpreter() as process:
        yield process


def test_fused_blocks_compute_what_diffusers_computes(interpreted: Executor) -> None:
    interpreted.submit(fused_and_plain).result()


def fused_and_plain() -> None:
    plain = _model()
    fused = copy.deepcopy(plain)
    assert fuse(fused) == "our own kernels: norms of 1 blocks, GELU of 1 blocks, attention of 1 blocks"
    fused = copy.deepcopy(fused)  # a run copies its model before it shards it
    for block in fused.transformer_blocks:
        block.compile(backend="aot_eager", fullgraph=True)  # as they run; what kernels give is traced, not computed
    (expected, by_name), (found, ours) = _run(plain), _run(fused)
    assert far(found, expected) < 2e-6
    # A key's bias moves all scores of a row by as much, so its gradient is zero but for rounding.
    apart = {name: far(ours[name], by_name[name]) for name in by_name if "to_k.bias" not in name}
    assert max(apart.values()) < 2e-5, max(apart, key=lambda name: apart[name])
    assert all(ours[name].abs().max() < 1e-5 for name in by_name if "to_k.bias" in name)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputing_changes_no_gradient(interpreted: Executor, mode: str) -> None:
    interpreted.submit(recomputed, mode).result()


def recomputed(mode: str) -> None:
    from fullshard.families.diffusion.kernels import packed_attention

    model, calls, attend = _model(), [], packed_attention._forward
    fuse(model)
    expected, by_name = _run(model)
    again = copy.deepcopy(model)
    for block in again.transformer_blocks:
        recompute.apply(block, mode)
    packed_attention._forward = _Counted(attend, calls)
    try:
        found, ours = _run(again)
    finally:
        packed_attention._forward = attend
    assert len(calls) == (1 if mode == "selective" else 2), "attention's result is kept, or computed again"
    assert torch.equal(found, expected)
    assert all(torch.equal(ours[name], by_name[name]) for name in by_name)


class _Counted:
    """A kernel that notes when it is launched."""

    def __init__(self, kernel: Any, calls: list[int]) -> None:
        self.kernel, self.calls = kernel, calls

    def __getitem__(self, grid: Any) -> Any:
        self.calls.append(1)
        return self.kernel[grid]


def test_parameters_and_arguments_stay_as_they_are() -> None:
    plain = _model()
    fused = copy.deepcopy(plain)
    fuse(fused)
    assert list(fused.state_dict()) == list(plain.state_dict())
    blocks = fused.transformer_blocks[0], plain.transformer_blocks[0]
    # By their names sharding knows which inputs must stay exact.
    for ours, theirs in (blocks, (fused, plain), (fused.pos_embed, plain.pos_embed)):
        assert list(inspect.signature(ours.forward).parameters) == list(inspect.signature(theirs.forward).parameters)


def test_off_the_gpu_diffusers_own_code_runs() -> None:
    plain = _model()
    fused = copy.deepcopy(plain)
    fuse(fused)
    (expected, by_name), (found, ours) = _run(plain), _run(fused)
    assert torch.equal(found, expected)
    assert all(torch.equal(ours[name], by_name[name]) for name in by_name)


def test_adapters_keep_their_own_projections(interpreted: Executor) -> None:
    interpreted.submit(adapted).result()


def adapted() -> None:
    plain = _model()
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["to_q", "to_v", "net.0.proj"]), plain)
    for name, parameter in plain.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)  # at zero it would not be seen
    fused = copy.deepcopy(plain)
    assert fuse(fused) == "our own kernels: norms of 1 blocks"
    expected, found = plain.state_dict(), fused.state_dict()
    assert list(expected) == list(found)
    inputs = torch.randn(2, 4, 4, 4), torch.rand(2) * 1000, torch.tensor([1, 2])
    assert far(fused(*inputs).sample, plain(*inputs).sample) < 2e-6


def test_widths_that_libraries_know_keep_their_attention() -> None:
    model = _model(attention_head_dim=32)
    assert fuse(model) == "our own kernels: norms of 1 blocks, GELU of 1 blocks"


def test_other_models_are_left_alone() -> None:
    unet = UNet2DModel(sample_size=8, block_out_channels=(8,) * 4, norm_num_groups=4, layers_per_block=1)
    assert fuse(unet) == "diffusers' own"
    assert "forward" not in vars(unet.mid_block)


def test_kernels_are_chosen_for_cuda_in_half_precision_alone() -> None:
    family = Diffusers(architecture="dit", size="tiny")
    for device, compute in (("cpu", torch.bfloat16), ("cuda", torch.float32)):
        words = family.choose_kernels(_model(), device=device, compute=compute, packed=False)
        assert words == "the module's own"
    words = family.choose_kernels(_model(), device="cuda", compute=torch.bfloat16, packed=False)
    assert words.startswith("our own kernels: ")


def test_an_environment_variable_switches_the_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULLSHARD_DIT_KERNELS", "0")
    model = _model()
    assert fuse(model) == "diffusers' own (FULLSHARD_DIT_KERNELS=0)"
    assert "forward" not in vars(model)


def test_a_mask_is_not_lost(interpreted: Executor) -> None:
    interpreted.submit(masked).result()


def masked() -> None:
    """DiT has none; whoever calls a block with one gets diffusers' own block."""
    plain = _model()
    fused = copy.deepcopy(plain)
    fuse(fused)
    hidden, mask = torch.randn(2, 4, 48), torch.tensor([0.0, 0.0, -1e4, 0.0]).expand(2, 1, 4)
    settings = {"timestep": torch.tensor([1.0, 2.0]), "class_labels": torch.tensor([1, 2])}
    expected = plain.transformer_blocks[0](hidden, attention_mask=mask, **settings)
    assert not torch.equal(expected, plain.transformer_blocks[0](hidden, **settings))
    assert torch.equal(fused.transformer_blocks[0](hidden, attention_mask=mask, **settings), expected)
