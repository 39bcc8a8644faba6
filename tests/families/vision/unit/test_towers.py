"""Towers: what a recipe may ask of each, and one attention call for all images of one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from fullshard.errors import RecipeError
from fullshard.families.vision.models.vlm import Vlm
from fullshard.families.vision.sizes import tiny_vision
from fullshard.kernels import varlen_attention
from fullshard.multimodal.tower_attention import use_bounds


@pytest.mark.parametrize("architecture", ["smolvlm", "qwen3_vl"])
def test_only_blocks_can_be_recomputed(architecture: str) -> None:
    model = Vlm(architecture=architecture, size="tiny", towers={"projector": {"recompute": "full"}})
    with pytest.raises(RecipeError) as caught:
        model.build(processor=None)
    assert str(caught.value).startswith("model.towers.projector.recompute = full: projector has no blocks")
    assert str(caught.value).endswith("Blocks are in: language, vision.")
    Vlm(architecture=architecture, size="tiny", towers={"vision": {"recompute": "full"}}).build(processor=None)


def test_an_unknown_tower_is_named() -> None:
    with pytest.raises(RecipeError, match=r"model\.towers\.visoin: .*did you mean 'vision'"):
        Vlm(architecture="llava", size="tiny", towers={"visoin": {"freeze": True}}).build(processor=None)


@pytest.mark.parametrize("architecture", ["gemma3", "paligemma", "llava"])
def test_a_kernel_without_a_mask_is_not_used_where_tokens_see_each_other(
    monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    """Packed rows on a GPU run without masks, but Gemma 3 reads images in both directions."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    model = Vlm(architecture=architecture, size="tiny")
    module = model.build(processor=None)
    on_gpu: dict[str, Any] = {"device": "cuda", "compute": torch.bfloat16, "packed": True}
    masked = architecture != "llava"
    assert model.choose_kernels(module, **on_gpu) == ("sdpa" if masked else varlen_attention.NAME)
    if masked:
        asked = model.model_copy(update={"attention": "varlen"})
        with pytest.raises(RecipeError, match="'varlen' has no mask, and .* reads some tokens in both directions"):
            asked.choose_kernels(module, **on_gpu)


def one_call_on_the_cpu(q: Any, k: Any, v: Any, bounds: Any, _: Any, longest: int, __: int, **settings: Any) -> Any:
    """What torch's kernel computes on a GPU: each sequence between two bounds attends to itself."""
    assert longest >= int(bounds.diff().max())
    assert settings["window_size"] == (-1, -1)
    pieces = [
        scaled_dot_product_attention(
            *(t[start:stop].transpose(0, 1)[None] for t in (q, k, v)), scale=settings["scale"]
        )[0].transpose(0, 1)
        for start, stop in zip(bounds.tolist(), bounds.tolist()[1:], strict=False)
    ]
    return torch.cat(pieces)


@pytest.mark.parametrize("architecture", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@torch.no_grad()
def test_one_attention_call_equals_transformers_own(monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    """Three images of unequal size in one sequence, with the windows of Qwen2.5-VL."""
    config = CONFIG_MAPPING[architecture](**tiny_vision(CONFIG_MAPPING[architecture]()))
    torch.manual_seed(0)
    tower = AutoModelForImageTextToText.from_config(config).eval().model.visual
    grid = torch.tensor([[1, 4, 8], [1, 2, 2], [1, 6, 4]])
    vision = config.vision_config
    pixels = torch.randn(int(grid.prod(1).sum()), 3 * vision.temporal_patch_size * vision.patch_size**2)
    expected = tower(pixels, grid_thw=grid).pooler_output
    calls = []
    monkeypatch.setattr(
        varlen_attention, "varlen_attn", lambda *given, **named: calls.append(1) or one_call_on_the_cpu(*given, **named)
    )
    assert use_bounds(tower)
    # Transformers hands the decoder's bounds to every part.
    found = tower(pixels, grid_thw=grid, cu_seq_lens_q=torch.tensor([0, 3])).pooler_output
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert len(calls) == len(tower.blocks)
