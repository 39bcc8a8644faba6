"""Products in float8: what they compute, in training only; which layers; and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.nn import functional

from fullshard.dist.precision import check_word, resolve_for
from fullshard.errors import RecipeError, SetupError
from fullshard.kernels import float8
from fullshard.kernels.float8 import Float8, choose
from fullshard.recipes.read import read

EMULATED = Float8(gathered=False, emulated=True)


class Model(nn.Module):
    """One block of one layer."""

    def __init__(self, width: int = 32, out: int = 48, *, bias: bool = True) -> None:
        super().__init__()
        self.block = nn.ModuleDict({"layer": nn.Linear(width, out, bias=bias)})
        self.head = nn.Linear(out, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block["layer"](x)  # type: ignore[no-any-return]


def converted(**sizes: Any) -> Model:
    torch.manual_seed(0)
    model = Model(**sizes).bfloat16()
    EMULATED.convert(model, ["block"], [])
    return model


def rounded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """To 8 bits, with one scale for the tensor; in fp32."""
    scale = torch.finfo(dtype).max / tensor.abs().max().double()
    return (tensor.float() * scale.float()).clamp(-448 if dtype == E4M3 else -57344).to(dtype).float() / scale.float()


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize("tokens", [32, 7])
def test_a_layer_computes_the_products_of_rounded_factors(tokens: int) -> None:
    """Written out in plain PyTorch: forward, the gradient of the input and that of the weight."""
    model = converted()
    layer = model.block["layer"]
    x, gradient = torch.randn(tokens, 32).bfloat16().requires_grad_(), torch.randn(tokens, 48).bfloat16()
    model(x).backward(gradient)
    x8, w8, g8 = rounded(x.detach(), E4M3), rounded(layer.weight.detach(), E4M3), rounded(gradient, E5M2)
    output = (x8 @ w8.T).bfloat16() + layer.bias
    assert torch.equal(model(x), output)
    assert torch.equal(x.grad, (g8 @ w8).bfloat16())
    assert torch.equal(layer.weight.grad, (g8.T @ x8).bfloat16())
    assert torch.equal(layer.bias.grad, gradient.sum(0))


def test_outside_training_a_layer_computes_in_bf16() -> None:
    model, x = converted().eval(), torch.randn(5, 32).bfloat16()
    layer = model.block["layer"]
    assert torch.equal(model(x), functional.linear(x, layer.weight, layer.bias))
    assert not torch.equal(model(x), model.train()(x))


def test_names_and_parameters_stay() -> None:
    torch.manual_seed(0)
    model = Model()
    before = dict(model.named_parameters())
    EMULATED.convert(model, ["block"], [])
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in before.items()}
    assert type(model.head) is nn.Linear


def products(*, trained: bool) -> list[str]:
    """What a compiled training step of one layer multiplies."""
    torch._dynamo.reset()
    found: list[str] = []

    def look(graph: Any, _: Any) -> Any:
        found.extend(str(node.target) for node in graph.graph.nodes if "mm" in str(node.target))
        return make_boxed_func(graph)

    model = converted(bias=False)
    model.requires_grad_(trained)
    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=look), fullgraph=True)
    x = torch.randn(32, 32).bfloat16().requires_grad_()
    compiled(x).sum().backward()
    expected = converted(bias=False)
    other = x.detach().clone().requires_grad_()
    expected(other).sum().backward()
    assert torch.equal(x.grad, other.grad)
    return found


def test_a_compiled_step_is_one_graph_and_a_frozen_weight_gets_no_gradient() -> None:
    """The base of adapters costs two products in each step, not three."""
    assert len(products(trained=True)) == 3
    assert len(products(trained=False)) == 2


class Decoder(nn.Module):
    """The linear layers of a language model with adapters."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            adapted = nn.ModuleDict({"base_layer": nn.Linear(2048, 2048), "lora_A": nn.Linear(2048, 16)})
            parts = {
                "q_proj": adapted,
                "k_proj": nn.Linear(2048, 1024),
                "down_proj": nn.Linear(6144, 1024),
                "odd": nn.Linear(2048, 2050),
                "gate": nn.Linear(2048, 2048),
                "one": nn.Linear(2048, 2048),
                "other": nn.Linear(2048, 2048),
            }
            parts["other"].weight = parts["one"].weight
            self.layers = nn.ModuleList([nn.ModuleDict(parts)])
            self.lm_head = nn.Linear(2048, 32000)


def test_which_layers_are_left_out_and_why() -> None:
    chosen, left_out = choose(Decoder(), ["layers.0"], ["layers.0.gate"], emulated=False)
    assert chosen == ["layers.0.q_proj.base_layer", "layers.0.down_proj"]
    assert left_out == [
        "lora_A (adapter)",
        "k_proj (small)",
        "odd (sizes do not divide by 16)",
        "gate (fp32)",
        "one (tied)",
        "other (tied)",
        "lm_head (not in a block)",
    ]
    said = Float8(gathered=True, emulated=False).describe(Decoder(), ["layers.0"], ["layers.0.gate"])
    assert said.startswith("q_proj, down_proj (torchao, one scale per tensor; gathered in float8; training steps only)")


def test_a_model_without_large_layers_is_refused() -> None:
    with pytest.raises(
        RecipeError, match=r"no linear layer in the model's blocks is large enough.*Use precision: bf16"
    ):
        choose(Model(), ["block"], [], emulated=False)


@pytest.mark.parametrize(
    ("spelled", "word"), [("fp8", "float8"), ("FLOAT8", "float8"), ("float8_gather", "float8-gather")]
)
def test_spellings(spelled: str, word: str) -> None:
    assert check_word(spelled) == word
    assert float8.without(word) == "bf16"
    assert float8.packages(word) == {"torchao": "fullshard[float8]"}
    assert float8.without("fp16") == "fp16"
    assert float8.packages("bf16") == {}


def test_emulation_is_not_offered_to_users() -> None:
    with pytest.raises(RecipeError, match=r"allowed: auto, bf16, fp16, fp32, bf16-pure, float8, float8-gather\.$"):
        read({"model": "m", "data": {"train": "t"}, "precision": "float9x"})


def test_old_gpus_are_refused_with_what_to_do() -> None:
    for word in ("float8", "float8-gather"):
        said = rf"precision = {word}: NVIDIA A100 has compute capability 8\.0, and float8 needs 8\.9.*precision: bf16"
        with pytest.raises(SetupError, match=said):
            resolve_for(word, capability=(8, 0), name="NVIDIA A100")
        with pytest.raises(SetupError, match=r"CPU is no GPU"):
            resolve_for(word, capability=None)
    for capability in ((8, 9), (9, 0), (10, 0)):
        found = resolve_for("float8", capability=capability)
        assert (found.storage, found.compute, found.scaler) == (torch.float32, torch.bfloat16, False)
    assert resolve_for("float8-emulated", capability=None).word == "float8-emulated"
