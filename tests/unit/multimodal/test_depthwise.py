"""Depthwise convolutions with torch's own kernel: values and gradients are those of the layer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fullshard.multimodal import depthwise

LAYERS = {
    "1d": (nn.Conv1d(6, 6, 3, padding=2, groups=6), (2, 6, 9)),
    "1d without bias": (nn.Conv1d(6, 12, 5, groups=6, bias=False), (2, 6, 9)),
    "2d strided": (nn.Conv2d(4, 4, 3, stride=2, padding=1, groups=4), (2, 4, 9, 7)),
    "2d dilated": (nn.Conv2d(4, 4, 3, dilation=2, groups=4), (1, 4, 9, 8)),
}


def switched(layer: nn.Module) -> nn.Module:
    ours = copy.deepcopy(layer)
    assert depthwise.use_own_kernel(ours, device="cuda", compute=torch.float16) == 1
    return ours


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_values_and_gradients_are_those_of_the_layer(name: str, backend: str | None) -> None:
    layer, shape = LAYERS[name]
    ours = switched(layer)
    run = torch.compile(ours, backend=backend, fullgraph=True) if backend else ours
    x = torch.randn(shape, requires_grad=True)
    theirs, mine = layer(x), run(x)
    torch.testing.assert_close(mine, theirs)
    wanted = torch.autograd.grad(theirs.square().sum(), [x, *layer.parameters()])
    found = torch.autograd.grad(mine.square().sum(), [x, *ours.parameters()])
    torch.testing.assert_close(found, wanted)


def test_a_frozen_layer_passes_the_gradient_on() -> None:
    layer, shape = LAYERS["1d"]
    ours = switched(layer).requires_grad_(False)
    x = torch.randn(shape, requires_grad=True)
    (found,) = torch.autograd.grad(ours(x).sum(), [x])
    (wanted,) = torch.autograd.grad(layer(x).sum(), [x])
    torch.testing.assert_close(found, wanted)


def test_only_depthwise_layers_that_compute_in_fp16_on_a_gpu_are_switched() -> None:
    model = nn.Sequential(
        nn.Conv1d(4, 4, 3, groups=4), nn.Conv1d(4, 4, 3), nn.Conv1d(4, 4, 3, groups=2), nn.Conv2d(1, 8, 3)
    )
    assert depthwise.use_own_kernel(model, device="cpu", compute=torch.float16) == 0
    assert depthwise.use_own_kernel(model, device="cuda", compute=torch.bfloat16) == 0
    assert depthwise.use_own_kernel(model, device="cuda", compute=torch.float16) == 1
    assert type(model[0]) is not nn.Conv1d
    assert all(type(part) in (nn.Conv1d, nn.Conv2d) for part in list(model)[1:])
    assert list(model.state_dict()) == [f"{i}.{p}" for i in range(4) for p in ("weight", "bias")]


def test_the_kernel_runs_without_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """What decides between the kernels is torch's own switch."""
    seen: list[bool] = []
    real = torch.convolution

    def convolution(*arguments: object) -> torch.Tensor:
        seen.append(torch.backends.cudnn.enabled)
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(torch, "convolution", convolution)
    layer, shape = LAYERS["1d"]
    switched(layer)(torch.randn(shape))
    assert seen == [False]
    assert torch.backends.cudnn.enabled
