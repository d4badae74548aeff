"""Wall attention (Tilde Research) under the names and signatures of flash-linear-attention. Needs PyTorch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from . import _checks

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["build_wall_kv_cache", "parallel_wall_attn", "parallel_wall_attn_decode"]

# The widest heads of one call of the op.
_WIDEST = 256


def parallel_wall_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    g_scalar: Tensor | None = None,
    sink_bias: Tensor | None = None,
    scale: float | None = None,
    window_size: int | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Softmax attention whose keys decay in each channel.

    `o_i = sum_j softmax_j(scale sum_n q_in k_jn exp(G_in - G_jn) + c_i - c_j) v_j` over the keys `j <= i`, where `G`
    and `c` are sums of `g` and `g_scalar` over time. Every factor is at most 1, so any decay is computed without overflow.

    Args:
        q: queries `[B, T, HQ, K]`, `K` up to 256; float32, bfloat16 or float16 (float64 by the definition).
        k: keys `[B, T, H, K]`; query head `h` reads key head `h // (HQ / H)`.
        v: values `[B, T, H, V]`.
        g: logs of the decays `[B, T, HQ, K]`, at most 0, best in float32.
        g_scalar: logs of forget gates `[B, T, HQ]`, at most 0; not scaled.
        sink_bias: logits `[HQ]` of a key without a value that every query sees.
        scale: factor on `q . k`; `1 / sqrt(K)` when absent.
        window_size: a query sees only the last `window_size` keys.
        cu_seqlens: 0 and the ends of packed sequences `[N + 1]`; needs `B = 1`.

    Returns:
        `[B, T, HQ, V]`.
    """
    _checks.tensors(q=q, k=k, v=v, g=g, g_scalar=g_scalar, sink_bias=sink_bias, cu_seqlens=cu_seqlens)
    if v is not None and v.ndim == 4 and v.shape[3] > _WIDEST:
        import torch

        options = dict(g_scalar=g_scalar, sink_bias=sink_bias, scale=scale, window_size=window_size)
        parts = [parallel_wall_attn(q, k, x, g, cu_seqlens=cu_seqlens, **options) for x in v.split(_WIDEST, -1)]
        return torch.cat(parts, -1)
    _checks.causal_attention(q, k, v, cu_seqlens, window_size, _WIDEST)
    _checks.shaped("g", g, q.shape)
    _checks.shaped("g_scalar", g_scalar, q.shape[:3])
    _checks.shaped("sink_bias", sink_bias, q.shape[2:3])
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    import torch

    from . import _float64, _torch  # noqa: F401, the latter registers the ops
    from ._transition_torch import attention

    if q.dtype == torch.float64:
        step = lambda keys, t: keys * g[:, t, None].double().exp()
        return _float64.transition_attention(q, k, v, step, g_scalar, cu_seqlens, scale, window_size, sink_bias)
    return attention(q, k, v, g, g_scalar, cu_seqlens, False, scale, window_size, sink_bias)[0]


def build_wall_kv_cache(
    k: Tensor, g_cumsum: Tensor, chunk_size: int, *, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Keys for `parallel_wall_attn_decode`, in flash-linear-attention's layout: those of each chunk without their decay
    since its first token.

    Args:
        k: keys `[B, T, H, K]`.
        g_cumsum: sums of the decays' logs to base 2, `cumsum(g) / ln 2`, `[B, T, HQ, K]`.
        chunk_size: tokens of a chunk.
        out_dtype: of the keys; that of `k` when absent.

    Returns:
        `k[j] exp2(R_c - P[j])` `[B, T, HQ, K]`, and `R_c`, the sums at the first token of each chunk
        `[B, chunks, HQ, K]`.

    Raises:
        ValueError: decays within a chunk overflow the type; a shorter chunk does not.
    """
    _checks.tensors(k=k, g_cumsum=g_cumsum)
    import torch

    for name, x in (("k", k), ("g_cumsum", g_cumsum)):
        if x.ndim != 4:
            raise ValueError(f"{name} has shape {list(x.shape)}; it must be [batch, time, heads, dim]")
    (b, t, h, d), heads = k.shape, g_cumsum.shape[2]
    _checks.shaped("g_cumsum", g_cumsum, [b, t, heads, d])
    if h == 0 or heads % h:
        raise ValueError(f"{heads} query heads do not share {h} key heads; the first must be a multiple of the second")
    chunk = torch.arange(t, device=k.device) // chunk_size
    anchors = g_cumsum[:, ::chunk_size].contiguous()
    growth = torch.exp2(anchors[:, chunk].float() - g_cumsum.float())
    keys = (k.repeat_interleave(heads // h, 2).float() * growth).to(k.dtype if out_dtype is None else out_dtype)
    if not torch.compiler.is_compiling() and not bool(keys.isfinite().all()):
        words = f"keys without their decay overflow {str(keys.dtype).removeprefix('torch.')} within a chunk"
        raise ValueError(f"{words} of {chunk_size} tokens; use a smaller chunk_size, or k and g_cumsum that are finite")
    return keys, anchors


def parallel_wall_attn_decode(
    q: Tensor,
    v: Tensor,
    p_curr: Tensor,
    k_tilde: Tensor,
    r_cache: Tensor,
    sink_bias: Tensor | None,
    scale: float,
    cache_chunk_size: int,
    g_scalar_cumsum: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of new queries to all keys of a cache; no mask is applied.

    Args:
        q: queries `[B, M, HQ, K]`.
        v: values `[B, N, H, V]`.
        p_curr: sums of the decays' logs to base 2 at the queries `[B, M, HQ, K]`.
        k_tilde, r_cache: see `build_wall_kv_cache`.
        sink_bias: logits `[HQ]` of a key without a value, or None.
        scale: factor on `q . k`.
        cache_chunk_size: tokens of a chunk.
        g_scalar_cumsum: sums of the log gates to base 2 `[B, N, HQ]`; queries are at the last positions.

    Returns:
        `[B, M, HQ, V]` of the type of `v`, and the logs to base 2 of the softmax denominators `[B, M, HQ]`.
    """
    _checks.tensors(q=q, v=v, p_curr=p_curr, k_tilde=k_tilde, r_cache=r_cache, sink_bias=sink_bias)
    import torch
    from torch.nn.functional import pad

    for name, x in (("q", q), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} has shape {list(x.shape)}; it must be [batch, time, heads, dim]")
    (b, m, heads, d), (_, n, h, _) = q.shape, v.shape
    chunks, size = -(-n // cache_chunk_size), cache_chunk_size
    _checks.shaped("p_curr", p_curr, q.shape)
    _checks.shaped("k_tilde", k_tilde, [b, n, heads, d])
    if r_cache.shape[1] < chunks:
        raise ValueError(f"r_cache has {r_cache.shape[1]} chunks of {size} tokens; {n} keys need {chunks}")
    _checks.shaped("r_cache", r_cache[:, :chunks], [b, chunks, heads, d])
    _checks.shaped("sink_bias", sink_bias, [heads])
    _checks.shaped("g_scalar_cumsum", g_scalar_cumsum, [b, n, heads])
    if h == 0 or heads % h:
        raise ValueError(f"{heads} query heads do not share {h} key heads; the first must be a multiple of the second")
    x = q.float()[:, :, None] * torch.exp2(p_curr.float()[:, :, None] - r_cache[:, None, :chunks].float())
    keys = pad(k_tilde.float(), (0, 0, 0, 0, 0, chunks * size - n)).unflatten(1, (chunks, size))
    s = torch.einsum("bmchd,bcnhd->bmhcn", x, keys).flatten(3)[..., :n] * (scale / math.log(2))
    if g_scalar_cumsum is not None:
        c = g_scalar_cumsum.float().transpose(1, 2)
        s = s + c[:, :, n - m :, None].transpose(1, 2) - c[:, None]
    sums = s if sink_bias is None else torch.cat((s, (sink_bias / math.log(2)).expand(b, m, heads)[..., None]), -1)
    lse = torch.logsumexp(sums * math.log(2), -1) / math.log(2)
    weights = torch.exp2(s - lse[..., None]).unflatten(2, (h, heads // h))
    o = torch.einsum("bmhgn,bnhv->bmhgv", weights, v.float()).flatten(2, 3)
    return o.to(v.dtype), lse
