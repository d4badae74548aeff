"""The ops in float64, by their definitions in PyTorch: for `gradcheck` and as an oracle, on any device.

Attention makes the matrix of weights, scans go token by token. Second derivatives and forward-mode gradients exist.
"""

from __future__ import annotations

import torch

from . import _checks


def _segments(rows, time, seq_start, cu_seqlens):
    """Which sequence a key is of `[B, N]`, and whether it is there."""
    position = torch.arange(time)
    if cu_seqlens is not None:
        sequence = torch.searchsorted(cu_seqlens.cpu().long()[1:].contiguous(), position, right=True)
        return sequence[None], torch.ones(1, time, dtype=torch.bool)
    start = torch.zeros(rows, dtype=torch.long) if seq_start is None else seq_start.cpu().long()
    return torch.zeros(rows, time, dtype=torch.long), position[None] >= start[:, None]


def attention(q, k, v, log_gates, seq_start, cu_seqlens, scale, causal, window, sink_bias):
    """As `foxlm.forgetting_attention`, time before heads: the output and the log of the denominators."""
    (b, m, h, _), n = q.shape, k.shape[1]
    if not torch.compiler.is_compiling():
        _checks.segment_lists(seq_start, cu_seqlens, n)
    k, v = (x.double().repeat_interleave(h // x.shape[2], 2) for x in (k, v))
    s = scale * torch.einsum("bihd,bjhd->bhij", q, k)
    sequence, there = (x.to(q.device) for x in _segments(b, n, seq_start, cu_seqlens))
    i, j = (torch.arange(first, n, device=q.device) for first in (n - m, 0))
    if log_gates is not None:
        c = log_gates.double().transpose(1, 2).cumsum(-1)
        decay = c[:, :, n - m :, None] - c[:, :, None]
        s = s + (decay if causal else -decay.abs())
    seen = (sequence[:, n - m :, None] == sequence[:, None]) & there[:, None] & there[:, n - m :, None]
    if causal:
        seen = seen & (j[None] <= i[:, None])
    if window is not None:
        seen = seen & ((i[:, None] - j[None]).abs() < window)
    some = seen.any(-1)[:, None]
    # Rows that see nothing have finite logits, and weights of 0.
    s = torch.where(seen[:, None], s, s.new_tensor(float("-inf")))
    s = torch.where(some[..., None], s, s.new_zeros(()))
    lse = s.logsumexp(-1)
    if sink_bias is not None:
        lse = torch.logaddexp(lse, sink_bias.double()[None, :, None])
    weights = (s - lse[..., None]).exp() * some[..., None]
    lse = torch.where(some, lse, lse.new_tensor(float("-inf")))
    return torch.einsum("bhij,bjhd->bihd", weights, v), lse.transpose(1, 2).detach()


def scan(q, k, v, decay, write, skip, state, cu_seqlens, scale, delta):
    """As the op `foxlm::scan`: the output, and the last states."""
    wide = lambda x: None if x is None else x.double()
    q, k, v, decay, write, skip, state = map(wide, (q, k, v, decay, write, skip, state))
    if cu_seqlens is not None:
        ends, parts = _checks.segment_lists(None, cu_seqlens, q.shape[1])[1], []
        for n, (a, e) in enumerate(zip(ends, ends[1:])):
            cut = [None if x is None else x[:, a:e] for x in (q, k, v, decay, write)]
            first = None if state is None else state[n : n + 1]
            parts.append(scan(*cut, skip, first, None, scale, delta))
        return torch.cat([o for o, _ in parts], 1), torch.cat([s for _, s in parts])
    group = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(group, 2) for x in (q, k))
    s = q.new_zeros(q.shape[0], v.shape[2], q.shape[3], v.shape[3]) if state is None else state
    rows = []
    for t in range(q.shape[1]):
        if decay is not None:
            s = s * decay[:, t].exp()[..., None]
        value = v[:, t]
        if delta:
            value = value - torch.einsum("bhkv,bhk->bhv", s, k[:, t])
        if write is not None:
            value = value * write[:, t, :, None]
        s = s + k[:, t, :, :, None] * value[:, :, None]
        o = scale * torch.einsum("bhkv,bhk->bhv", s, q[:, t])
        rows.append(o if skip is None else o + skip[:, None] * v[:, t])
    return torch.stack(rows, 1) if rows else torch.zeros_like(v), s


def transition_attention(q, k, v, step, log_gates, cu_seqlens, scale, window=None, sink_bias=None):
    """Causal attention whose keys are transformed before each later query: `step(keys, t)` are the keys `[B, n, H, d]`
    of all heads after the transition of token `t`, which stands before the key of `t` is added."""
    time, heads = q.shape[1], q.shape[2]
    wide = lambda x: x.double().repeat_interleave(heads // x.shape[2], 2)
    k, v = wide(k), wide(v)
    c = torch.zeros(q.shape[:3], dtype=torch.float64, device=q.device)
    c = c if log_gates is None else log_gates.double().cumsum(1)
    ends = _checks.segment_lists(None, cu_seqlens, time)[1] or [0, time]
    rows = []
    for first, end in zip(ends, ends[1:]):
        keys = k[:, first:first]
        for t in range(first, end):
            keys = torch.cat((step(keys, t), k[:, t : t + 1]), 1)
            seen = slice(max(first, t + 1 - window) if window is not None else first, t + 1)
            s = scale * torch.einsum("bhd,bnhd->bnh", q[:, t], keys[:, seen.start - first :])
            s = s + c[:, t, None] - c[:, seen]
            if sink_bias is not None:
                s = torch.cat((s, sink_bias.double().expand(q.shape[0], 1, heads)), 1)
            weights = s.softmax(1)[:, : t + 1 - seen.start]
            rows.append(torch.einsum("bnh,bnhd->bhd", weights, v[:, seen]))
    return torch.stack(rows, 1) if rows else v.new_zeros(*q.shape[:3], v.shape[3])
