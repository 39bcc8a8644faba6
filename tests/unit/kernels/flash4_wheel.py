"""A stand-in for flash-attn-4's `flash_attn.cute.interface`, in plain PyTorch: the same two functions, with the names
of their arguments in version 4.0.0b36."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def _documents(bounds: torch.Tensor) -> Iterator[slice]:
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        yield slice(start, stop)


def _hidden(length: int, causal: bool, left: int | None, right: int | None) -> torch.Tensor:
    distance = torch.arange(length)[None] - torch.arange(length)[:, None]
    hidden = torch.zeros(length, length, dtype=torch.bool)
    if causal:
        right = 0 if right is None else min(right, 0)
    if right is not None:
        hidden |= distance > right
    if left is not None:
        hidden |= distance < -left
    return hidden


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float, hidden: torch.Tensor) -> torch.Tensor:
    """(heads, queries, keys) of one document; a group of query heads shares a key head."""
    shared = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), shared.float()) * scale
    return scores.masked_fill(hidden, -torch.inf)


def _flash_attn_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_q: None = None,
    seqused_k: None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    page_table: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, None, None, None]:
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[-1])
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    for place in _documents(cu_seqlens_q):
        length = place.stop - place.start
        assert length <= max_seqlen_q
        hidden = _hidden(length, causal, window_size_left, window_size_right)
        scores = _scores(q[place], k[place], softmax_scale, hidden)
        lse[:, place] = scores.logsumexp(-1)
        shared = v[place].repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        out[place] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), shared.float()).to(out.dtype)
    return out, lse if return_lse else None, None, None, None


def _flash_attn_bwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float = 0.0,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> tuple[torch.Tensor, ...]:
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    group = q.shape[1] // k.shape[1]
    for place in _documents(cu_seqlens_q):
        hidden = _hidden(place.stop - place.start, causal, window_size_left, window_size_right)
        weights = (_scores(q[place], k[place], softmax_scale, hidden) - lse[:, place, None]).exp()
        shared, gradient = v[place].repeat_interleave(group, dim=1).float(), dout[place].float()
        inner = (gradient * out[place].float()).sum(-1).T[..., None]
        scores = weights * (torch.einsum("qhd,khd->hqk", gradient, shared) - inner) * softmax_scale
        keys = k[place].repeat_interleave(group, dim=1).float()
        dq[place] = torch.einsum("hqk,khd->qhd", scores, keys).to(dq.dtype)
        for target, each in (
            (dk, torch.einsum("hqk,qhd->khd", scores, q[place].float())),
            (dv, torch.einsum("hqk,qhd->khd", weights, gradient)),
        ):
            target[place] = each.unflatten(1, (-1, group)).sum(2).to(target.dtype)
    return dq, dk, dv
