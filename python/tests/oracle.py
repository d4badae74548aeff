"""Forgetting attention in float64 with obvious loops over matrices: forward and, by hand, backward."""

import numpy as np


def visible(m, n, causal=True, window=None, start=0):
    """`[M, N]`: which keys each query sees."""
    i, j = np.arange(n - m, n)[:, None], np.arange(n)[None]
    seen = (j >= start) & (i >= start)
    if causal:
        seen &= j <= i
    if window is not None:
        seen &= np.abs(i - j) < window
    return seen


def weights(q, k, gates, seen, scale, causal=True):
    """Softmax weights `[M, N]` of one head; zeros in rows that see nothing."""
    m, n = seen.shape
    s = scale * q @ k.T
    if gates is not None:
        c = np.cumsum(gates)
        decay = c[n - m :, None] - c[None]
        s = s + (decay if causal else -np.abs(decay))
    s = np.where(seen, s, -np.inf)
    top = np.max(s, axis=1, keepdims=True, initial=-1e300)
    p = np.exp(s - top)
    return p / np.maximum(p.sum(1, keepdims=True), 1e-300)


def heads(q, k):
    return [(b, h, h // (q.shape[2] // k.shape[2])) for b in range(q.shape[0]) for h in range(q.shape[2])]


def attention(q, k, v, gates=None, scale=None, causal=True, window=None, starts=None):
    """q `[B, M, H, d]`, k and v `[B, N, Hk, .]`, gates `[B, N, H]`: o `[B, M, H, dv]`."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    gates = None if gates is None else np.asarray(gates, np.float64)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    o = np.zeros((*q.shape[:3], v.shape[3]))
    for b, h, hk in heads(q, k):
        seen = visible(q.shape[1], k.shape[1], causal, window, 0 if starts is None else starts[b])
        g = None if gates is None else gates[b, :, h]
        o[b, :, h] = weights(q[b, :, h], k[b, :, hk], g, seen, scale, causal) @ v[b, :, hk]
    return o


def gradients(d_out, q, k, v, gates=None, scale=None, causal=True, window=None, starts=None):
    """Gradients of q, k, v and gates."""
    d_out, q, k, v = (np.asarray(x, np.float64) for x in (d_out, q, k, v))
    gates = None if gates is None else np.asarray(gates, np.float64)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    dg = None if gates is None else np.zeros_like(gates)
    m, n = q.shape[1], k.shape[1]
    for b, h, hk in heads(q, k):
        seen = visible(m, n, causal, window, 0 if starts is None else starts[b])
        g = None if gates is None else gates[b, :, h]
        p = weights(q[b, :, h], k[b, :, hk], g, seen, scale, causal)
        do = d_out[b, :, h]
        dp = do @ v[b, :, hk].T
        ds = p * (dp - (p * dp).sum(1, keepdims=True))
        dv[b, :, hk] += p.T @ do
        dq[b, :, h] += scale * ds @ k[b, :, hk]
        dk[b, :, hk] += scale * ds.T @ q[b, :, h]
        if dg is not None:
            i, j = np.arange(n - m, n)[:, None], np.arange(n)[None]
            sign = np.where(j <= i, 1.0, -1.0) if not causal else np.ones((m, n))
            dc = np.zeros(n)
            dc[n - m :] += (sign * ds).sum(1)
            dc -= (sign * ds).sum(0)
            dg[b, :, h] = np.cumsum(dc[::-1])[::-1]
    return dq, dk, dv, dg


def error(got, want):
    """Distance by norm and by largest element, relative to the size of what is right."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, (got.shape, want.shape)
    assert np.isfinite(got).all()
    size, largest = np.linalg.norm(want), np.abs(want).max(initial=0)
    difference = got - want
    return max(np.linalg.norm(difference) / max(size, 1e-30), np.abs(difference).max(initial=0) / max(largest, 1e-30))
