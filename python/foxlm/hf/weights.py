"""Forgetting attention by PyTorch's own operations, from a bias `[B, H, T, N]`: where the weights are asked for, with
`attn_implementation="sdpa"`, with masks `[B, 1, T, N]`, and for new tokens after those in a static cache."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def visible(mask, fresh, pairs, window, at, batch, keys):
    """Which of `keys` keys each query sees `[B, T, N]`. Queries are at the positions `at` `[T]`; `mask` `[B, N]` or
    `pairs` `[B, T, N]` are the tokens that are there, packed sequences begin where `fresh` `[B, N]`."""
    j = torch.arange(keys, device=at.device)
    seen = (j <= at[:, None]).expand(batch, len(at), keys)
    if pairs is not None:
        seen = seen & pairs
    if mask is not None:
        seen = seen & mask[:, None]
    if fresh is not None:
        sequence = fresh.flatten().cumsum(0).view(fresh.shape)
        seen = seen & (sequence[:, at, None] == sequence[:, None])
    if window is not None:
        # Tokens that a query does not see do not count.
        count = seen.cumsum(-1)
        seen = seen & (count[..., -1:] - count < window)
    return seen


def decays(log_gates, mask, pairs, at):
    """Sums of log gates `[B, N, H]` between keys and queries `[B, H, T, N]`; gates of masked tokens do not count."""
    gates = log_gates if mask is None else log_gates.masked_fill(~mask[..., None], 0)
    gates = gates.transpose(1, 2).to(torch.float32 if gates.device.type == "mps" else torch.float64)
    if pairs is None:
        sums = gates.cumsum(-1)
        return (sums[..., at, None] - sums[:, :, None]).float()
    sums = torch.where(pairs[:, None], gates[:, :, None], 0).cumsum(-1)
    own = sums.gather(-1, at[:, None].expand(*sums.shape[:3], 1))
    return (own - sums).float()


def attention(q, k, v, log_gates, seen, mask, pairs, at, return_weights):
    """Outputs `[B, T, H, dv]` and, if asked for, weights `[B, H, T, N]`, of `q` `[B, T, H, d]`, `k` and `v`
    `[B, N, Hk, .]` and `seen` `[B, T, N]`. A query that sees nothing gives 0."""
    group = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), *(x.transpose(1, 2).repeat_interleave(group, 1) for x in (k, v))
    seen = seen[:, None]
    empty = ~seen.any(-1, keepdim=True)
    # Finite for these queries, too: gradients of a softmax over nothing are NaN.
    open_ = seen | empty
    if log_gates is None:
        bias = torch.zeros((), device=q.device).masked_fill(~open_, float("-inf"))
    else:
        bias = decays(log_gates, mask, pairs, at).masked_fill(~open_, float("-inf"))
    # bfloat16 is too coarse for sums of gates.
    x, y, z = (a.float() for a in (q, k, v))
    scale = q.shape[-1] ** -0.5
    if not return_weights:
        o = F.scaled_dot_product_attention(x, y, z, attn_mask=bias, scale=scale)
        return o.masked_fill(empty, 0).transpose(1, 2).to(q.dtype), None
    weights = (x @ y.mT * scale + bias).softmax(-1).masked_fill(empty, 0)
    return (weights @ z).transpose(1, 2).to(q.dtype), weights.to(q.dtype)
