"""Named sizes hold what their names say, and every architecture has a tiny one."""

from __future__ import annotations

import re

import pytest
import torch

from fullshard.errors import RecipeError
from fullshard.families.language.models.hf import Hf
from fullshard.hf.architecture.sizes import SIZES, UNFIT, architectures, check_architecture, check_size, make_config

NAMED = [(architecture, size) for architecture, sizes in SIZES.items() for size in sizes]


def promised(architecture: str, size: str) -> float:
    if size == "mini":
        return 3.8e9
    number, unit = re.fullmatch(r"([\d.]+)([MB])", size).groups()  # type: ignore[union-attr]
    return float(number) * {"M": 1e6, "B": 1e9}[unit]


@pytest.mark.parametrize(("architecture", "size"), NAMED)
def test_parameter_count_is_near_the_name(architecture: str, size: str) -> None:
    from transformers import AutoModelForCausalLM

    config = make_config(architecture, size, {})
    layers = config.num_hidden_layers
    config.num_hidden_layers = 1
    for name in ("layer_types",):
        if getattr(config, name, None):
            setattr(config, name, getattr(config, name)[:1])
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    total = sum(p.numel() for p in module.parameters())
    block = sum(p.numel() for name, p in module.named_parameters() if re.search(r"\.(layers|h)\.0\.", name))
    count = total + (layers - 1) * block
    # Gemma 7B and Llama 3.2 1B are famous for names that leave the embedding out.
    slack = 0.26 if (architecture, size) in {("gemma", "7B"), ("gemma", "2B"), ("llama", "1B")} else 0.1
    assert abs(count / promised(architecture, size) - 1) < slack, f"{count:,}"


@pytest.mark.parametrize(
    "architecture",
    [
        *("qwen3_moe", "deepseek_v3", "mixtral", "falcon", "gptj", "gemma3", "bloom"),
        # Those whose keys follow from one another.
        *("dbrx", "dots1", "zamba", "zamba2", "gemma3n_text", "lfm2_moe", "cohere_compass_text", "longcat_flash"),
        *("emu3", "mllama", "plbart", "reformer", "whisper", "xmod"),
    ],
)
def test_tiny_trains(architecture: str) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(make_config(architecture, "tiny", {}))
    assert sum(p.numel() for p in module.parameters()) < 5_000_000
    ids = torch.arange(12)[None] + 5
    output = (
        module(input_ids=ids, labels=ids, token_type_ids=torch.zeros_like(ids))
        if architecture == "gemma3"
        else (module(input_ids=ids, labels=ids))
    )
    output.loss.backward()
    assert torch.isfinite(output.loss)


def test_every_architecture_has_a_config_of_size_tiny() -> None:
    for architecture in architectures():
        config = make_config(architecture, "tiny", {})
        text = config.get_text_config(decoder=True)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            one = getattr(text, name, None)
            assert not isinstance(one, int) or one < text.vocab_size, (architecture, name)


@pytest.mark.parametrize("architecture", UNFIT)
def test_what_cannot_be_trained_on_tokens_is_refused_with_the_reason(architecture: str) -> None:
    assert architecture not in architectures()
    with pytest.raises(RecipeError, match=f"'{architecture}' cannot be trained as a language model: it "):
        check_architecture(architecture)


def test_a_config_that_transformers_cannot_build_is_refused_with_a_reason() -> None:
    with pytest.raises(RecipeError, match="cannot build dots1 with these settings .TypeError: .*model.overrides"):
        Hf(architecture="dots1", size="tiny", overrides={"n_shared_experts": None}).build(processor=None)


def test_overrides_win_over_the_size() -> None:
    config = make_config("qwen3", "tiny", {"num_hidden_layers": 3, "vocab_size": 77})
    assert (config.num_hidden_layers, config.vocab_size, config.hidden_size) == (3, 77, 128)


def test_an_unknown_override_is_an_error() -> None:
    with pytest.raises(RecipeError, match=r"model.overrides.num_hiden_layers.*did you mean 'num_hidden_layers'"):
        make_config("qwen3", "tiny", {"num_hiden_layers": 3})


def test_a_shape_that_transformers_refuses_is_explained() -> None:
    with pytest.raises(RecipeError, match="does not accept this shape"):
        make_config("llama", "tiny", {"hidden_size": 130})


def test_names_are_forgiving_in_spelling_only() -> None:
    assert check_architecture("Qwen3") == "qwen3"
    assert check_size("llama", "8b") == "8B"
    assert check_size("llama", "4B") == "4.0B"
    with pytest.raises(RecipeError, match=r"'qwen33' is not a causal language model.*did you mean 'qwen3'"):
        check_architecture("qwen33")
    with pytest.raises(
        RecipeError, match=r"'1.9B' is not a known size of llama.*Known: tiny, 89M, 243M.*model.overrides"
    ):
        check_size("llama", "1.9B")


def test_the_model_types_come_from_transformers() -> None:
    assert {"llama", "gpt2", "mamba"} <= set(architectures())
    assert set(SIZES) <= set(architectures())
