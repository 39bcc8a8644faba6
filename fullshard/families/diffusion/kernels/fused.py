"""DiT and its blocks in fewer passes over memory: the same parameters and the same result, with our own kernels.

Norms are fused with gates, scales and shifts, GELU with its bias; queries, keys and values come from one product, and
gradients of biases are by-products. On CUDA in half precision; anything else runs diffusers' own code. Must not know
objectives, ranks or sharding.
"""

from __future__ import annotations

import importlib.util
import os
import types
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fullshard.kernels import custom

SWITCH = "FULLSHARD_DIT_KERNELS"
"""Set to 0 in the environment, diffusers' own code runs."""
LONGEST = 256
"""Our attention is used up to this many tokens, as far as it was measured; longer rows use the libraries' kernels."""


def fuse(module: nn.Module) -> str:
    """Replaces the forward of known blocks, and of DiT around them, in place; says what was done."""
    if os.environ.get(SWITCH) == "0":
        return f"diffusers' own ({SWITCH}=0)"
    from diffusers import DiTTransformer2DModel
    from diffusers.models.attention import BasicTransformerBlock

    if importlib.util.find_spec("triton") is None:
        return "diffusers' own (Triton is not installed)"
    blocks: list[Any] = [
        part for part in module.modules() if isinstance(part, BasicTransformerBlock) and _is_plain(part)
    ]
    done = Counter({"norms": len(blocks)} if blocks else {})
    for block in blocks:
        block.forward = types.MethodType(_block, block)
        block.fuses_gelu, block.fuses_attention = _is_plain_mlp(block.ff), _packs_qkv(block.attn1)
        done.update({"GELU": block.fuses_gelu, "attention": block.fuses_attention})
    if blocks and isinstance(module, DiTTransformer2DModel):
        embed: Any = module.pos_embed
        module.forward, embed.forward = types.MethodType(_denoise, module), types.MethodType(_embed, embed)
    words = ", ".join(f"{name} of {count} blocks" for name, count in done.items() if count)
    return f"our own kernels: {words}" if done else "diffusers' own"


def _is_plain(block: Any) -> bool:
    """As in DiT: norms without parameters, modulated by labels and times, and self-attention only."""
    return (
        block.norm_type == "ada_norm_zero"
        and all(type(norm) is nn.LayerNorm and norm.weight is None for norm in (block.norm1.norm, block.norm3))
        and block.norm1.emb is not None
        and block.attn2 is None
        and block.pos_embed is None
        and block._chunk_size is None
    )


def _is_plain_mlp(feed_forward: Any) -> bool:
    """Two plain projections with biases, and tanh GELU between them."""
    from diffusers.models.activations import GELU

    up, _, *down = feed_forward.net
    if type(up) is not GELU or up.approximate != "tanh" or len(down) != 1:
        return False
    return all(type(part) is nn.Linear and part.bias is not None for part in (up.proj, *down))


def _packs_qkv(attention: Any) -> bool:
    """Three plain projections of equal size, followed directly by the scores."""
    parts = (attention.to_q, attention.to_k, attention.to_v)
    if any(type(part) is not nn.Linear for part in parts):
        return False
    extras = (attention.norm_q, attention.norm_k, attention.group_norm, attention.spatial_norm)
    width = attention.to_q.out_features // attention.heads
    return (
        len({(part.weight.shape, part.bias is None) for part in parts}) == 1
        and all(extra is None for extra in extras)
        and not attention.residual_connection
        and attention.rescale_output_factor == 1
        # For powers of two the libraries' kernels need no padding.
        and width % 8 == 0
        and width & (width - 1) != 0
    )


def _denoise(
    model: Any,
    hidden_states: torch.Tensor,
    timestep: torch.Tensor | None = None,
    class_labels: torch.Tensor | None = None,
    cross_attention_kwargs: dict[str, Any] | None = None,
    return_dict: bool = True,
) -> Any:
    """In place of `DiTTransformer2DModel.forward`, with its arguments: the last norm is fused too."""
    from diffusers import DiTTransformer2DModel
    from diffusers.models.modeling_outputs import Transformer2DModelOutput

    if cross_attention_kwargs or model.gradient_checkpointing:
        own: Any = DiTTransformer2DModel.forward
        return own(model, hidden_states, timestep, class_labels, cross_attention_kwargs, return_dict)
    size, side = model.patch_size, [length // model.patch_size for length in hidden_states.shape[-2:]]
    hidden = model.pos_embed(hidden_states)
    for block in model.transformer_blocks:
        hidden = block(hidden, timestep=timestep, class_labels=class_labels)
    embedded = model.transformer_blocks[0].norm1.emb(timestep, class_labels, hidden_dtype=hidden.dtype)
    shift, scale = model.proj_out_1(F.silu(embedded)).chunk(2, dim=1)
    patches = model.proj_out_2(_last_norm(model.norm_out, hidden, scale, shift))
    pictures = patches.reshape(-1, *side, size, size, model.out_channels).permute(0, 5, 1, 3, 2, 4)
    found = pictures.reshape(-1, model.out_channels, side[0] * size, side[1] * size)
    return Transformer2DModelOutput(sample=found) if return_dict else (found,)


def _last_norm(norm: Any, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> Any:
    if not custom.runs(x):
        return norm(x) * (1 + scale[:, None]) + shift[:, None]
    from fullshard.families.diffusion.kernels.modulated_norm import modulated_norm

    return modulated_norm(x, scale, shift, eps=norm.eps)[1]


def _embed(embed: Any, latent: torch.Tensor) -> Any:
    """In place of `PatchEmbed.forward`: patches do not overlap, so the convolution is a matrix product."""
    from diffusers.models.embeddings import PatchEmbed

    size, (height, width) = embed.patch_size, latent.shape[-2:]
    rows, columns = height // size, width // size
    fits = (rows, columns, height % size, width % size) == (embed.height, embed.width, 0, 0)
    plain = embed.flatten and not embed.layer_norm and embed.pos_embed is not None and not embed.pos_embed_max_size
    if not (custom.runs(latent) and fits and plain and type(embed.proj) is nn.Conv2d):
        own: Any = PatchEmbed.forward
        return own(embed, latent)
    patches = latent.reshape(len(latent), -1, rows, size, columns, size).permute(0, 2, 4, 1, 3, 5)
    found = F.linear(patches.reshape(len(latent), rows * columns, -1), embed.proj.weight.flatten(1), embed.proj.bias)
    return found.add_(embed.pos_embed)  # in fp32, then rounded


def _block(
    block: Any,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    encoder_hidden_states: torch.Tensor | None = None,
    encoder_attention_mask: torch.Tensor | None = None,
    timestep: torch.Tensor | None = None,
    cross_attention_kwargs: dict[str, Any] | None = None,
    class_labels: torch.Tensor | None = None,
    added_cond_kwargs: dict[str, torch.Tensor] | None = None,
) -> Any:
    """In place of `BasicTransformerBlock.forward`, with its arguments."""
    from diffusers.models.attention import BasicTransformerBlock

    others = (attention_mask, encoder_hidden_states, encoder_attention_mask)
    if not custom.runs(hidden_states) or cross_attention_kwargs or any(other is not None for other in others):
        own: Any = BasicTransformerBlock.forward
        return own(block, hidden_states, *others, timestep, cross_attention_kwargs, class_labels, added_cond_kwargs)
    from fullshard.families.diffusion.kernels.gated_sum import gated_sum
    from fullshard.families.diffusion.kernels.modulated_norm import gated_norm, modulated_norm

    first, second, hidden_states = block.norm1, block.norm3, hidden_states.contiguous()
    embedded = first.emb(timestep, class_labels, hidden_dtype=hidden_states.dtype)
    modulation = first.linear(first.silu(embedded)).chunk(6, dim=1)
    shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = modulation
    hidden, normed = modulated_norm(hidden_states, scale, shift, eps=first.norm.eps)
    packs = block.fuses_attention and normed.shape[1] <= LONGEST
    branch, bias = _attend(block.attn1, normed) if packs else (block.attn1(normed), None)
    hidden, normed = gated_norm(hidden, branch, gate, scale_mlp, shift_mlp, bias, eps=second.eps)
    branch, bias = _feed_forward(block.ff, normed) if block.fuses_gelu else (block.ff(normed), None)
    return gated_sum(hidden, branch, gate_mlp, bias)


Branch = tuple[torch.Tensor, torch.Tensor | None]
"""A result, and the bias that was added without a gradient: the next kernel computes that gradient for free."""


def _feed_forward(feed_forward: Any, x: torch.Tensor) -> Branch:
    from fullshard.families.diffusion.kernels.biased_gelu import biased_gelu

    up, dropout, down = feed_forward.net
    activated: torch.Tensor = dropout(biased_gelu(F.linear(x, up.proj.weight), up.proj.bias))
    found = torch.addmm(down.bias.detach(), activated.flatten(0, -2), _Transposed.apply(down.weight))
    return found.reshape(x.shape), down.bias


class _Transposed(torch.autograd.Function):
    """Copies a weight to its transpose, and its gradient back: autograd computes the gradient in the layout of the
    weight, and with the long side first that is a sixth faster."""

    @staticmethod
    def forward(ctx: Any, weight: Any) -> Any:
        return weight.t().contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # type: ignore[override]
        return gradient.t().contiguous()


def _attend(attention: Any, x: torch.Tensor) -> Branch:
    """One product for queries, keys and values, side by side."""
    from fullshard.families.diffusion.kernels.packed_attention import packed_attention

    parts = (attention.to_q, attention.to_k, attention.to_v)
    weight = torch.cat([part.weight for part in parts])
    bias = None if attention.to_q.bias is None else torch.cat([part.bias for part in parts])
    qkv = F.linear(x, weight, None if bias is None else bias.detach())
    attended = packed_attention(qkv.unflatten(-1, (3, attention.heads, -1)), bias).flatten(2)
    projection, dropout = attention.to_out
    if type(projection) is not nn.Linear or projection.bias is None or dropout.p:
        return dropout(projection(attended)), None
    return F.linear(attended, projection.weight, projection.bias.detach()), projection.bias
