"""Attention under the names and signatures of flash-linear-attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import _checks
from ._arrays import is_tensor
from ._attention import forgetting_attention

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ._attention import Array

# The widest values of one call of the op.
_WIDEST = 256


def parallel_forgetting_attn(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    scale: float | None = None,
    window_size: int | None = None,
    cu_seqlens: Array | None = None,
    head_first: bool = False,
    *,
    sink_bias: Tensor | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
    chunk_indices: Tensor | None = None,
) -> Array:
    """Forgetting attention with the signature of flash-linear-attention.

    Args:
        q: queries `[B, T, HQ, K]`.
        k: keys `[B, T, H, K]`; `HQ` is a multiple of `H`.
        v: values `[B, T, H, V]`.
        g: logs of the forget gates `[B, T, HQ]`.
        scale: factor on `q . k`; `1 / sqrt(K)` when absent.
        window_size: a query sees only the last `window_size` keys.
        cu_seqlens: 0 and the ends of packed sequences `[sequences + 1]`; needs `B = 1`.
        sink_bias: logits `[HQ]` of a key without a value that every query sees.
        chunk_indices: no effect; the library chooses.
        group: process group over whose ranks the sequence is sharded, as in `foxlm.forgetting_attention`.

    Returns:
        `[B, T, HQ, V]`.
    """
    return forgetting_attention(
        q, k, v, g, head_first=head_first, sm_scale=scale, window=window_size, cu_seqlens=cu_seqlens,
        sink_bias=sink_bias, group=group,
    )  # fmt: skip


def parallel_attn(
    q: Array,
    k: Array,
    v: Array,
    g: Array | None = None,
    scale: float | None = None,
    window_size: int | None = None,
    cu_seqlens: Array | None = None,
    chunk_indices: Tensor | None = None,
    *,
    sink_bias: Tensor | None = None,
) -> Array:
    """Causal attention with the signature of flash-linear-attention: as `parallel_forgetting_attn`, gates optional. A
    query with a window of 0 sees nothing, and gives 0. `g` may be above 0; on a GPU this is computed in float32, and
    only outside of `torch.compile` and CUDA graphs."""
    if window_size != 0 and _is_above_0(q, g):
        return growing_attention(q, k, v, g, scale, window_size, cu_seqlens, sink_bias)
    if window_size == 0 and is_tensor(q):
        import torch

        padding = torch.full((q.shape[0],), q.shape[1])
        return forgetting_attention(q, k, v, g, sm_scale=scale, seq_start=padding, sink_bias=sink_bias)
    return forgetting_attention(
        q, k, v, g, sm_scale=scale, window=window_size, cu_seqlens=cu_seqlens, sink_bias=sink_bias
    )


def _is_above_0(q, g):
    """Whether a gate on a GPU is above 1, which the kernels there do not take. Waits for the GPU."""
    if not is_tensor(g) or not g.is_cuda:
        return False
    import torch

    if torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
        return False
    return is_tensor(q) and bool((g.detach() > 0).any())


def growing_attention(q, k, v, g, scale=None, window=None, cu_seqlens=None, sink_bias=None):
    """As `parallel_attn` with any `g`: sums of the gates are two more columns of queries and keys, in float32."""
    import torch

    _checks.tensors(q=q, k=k, v=v, g=g)
    _checks.attention_shapes(q, k, v, g, False)
    c = g.double().cumsum(1).float()[..., None]
    k, v = (x.float().repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    wide = q.float() * (q.shape[3] ** -0.5 if scale is None else float(scale))
    wide, k = torch.cat((wide, torch.ones_like(c), c), -1), torch.cat((k, -c, torch.ones_like(c)), -1)
    o = forgetting_attention(wide, k, v, sm_scale=1.0, window=window, cu_seqlens=cu_seqlens, sink_bias=sink_bias)
    return o.to(q.dtype)


def attn_decoding_one_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    do_gate_scale: bool = False,
    *,
    sink_bias: Tensor | None = None,
) -> Tensor:
    """Attention of one query for each packed sequence to all keys of its sequence, with the signature of
    flash-linear-attention.

    Args:
        q: queries `[1, N, HQ, K]`.
        k: keys of all sequences `[1, T, H, K]`.
        v: values `[1, T, H, V]`.
        g: logs of the forget gates `[1, T, HQ]`, or None.
        scale: factor on `q . k`; `1 / sqrt(K)` when absent.
        cu_seqlens: 0 and the ends of the sequences `[N + 1]`.
        do_gate_scale: whether the sums of the gates are scaled, too.
        sink_bias: logits `[HQ]` of a key without a value that every query sees.

    Returns:
        `[1, N, HQ, V]`; 0 for a sequence without keys.
    """
    _checks.tensors(q=q, k=k, v=v, g=g, cu_seqlens=cu_seqlens)
    import torch

    if cu_seqlens is None:
        raise ValueError("cu_seqlens is missing; it holds 0 and the end of each sequence")
    _checks.packed_shape(cu_seqlens)
    if q.ndim != 4 or k.ndim != 4 or q.shape[0] != 1 or q.shape[1] != cu_seqlens.shape[0] - 1 or k.shape[0] != 1:
        shapes = f"q has shape {list(q.shape)} and k {list(k.shape)}"
        raise ValueError(f"{shapes}; they must be [1, {cu_seqlens.shape[0] - 1}, heads, dim] and [1, time, heads, dim]")
    _checks.shaped("v", v[..., :1], [1, *k.shape[1:3], 1])
    _checks.shaped("g", g, [1, k.shape[1], q.shape[2]])
    _, ends = _checks.segment_lists(None, cu_seqlens, k.shape[1])
    ends = torch.tensor(ends)
    lengths = ends.diff()
    longest = int(lengths.max())
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    # Every sequence as a row, padded on the left.
    at = (ends[1:, None] - longest + torch.arange(longest)).clamp(min=0).to(k.device)
    rows = lambda x: None if x is None else x[0][at]
    gates = None if g is None else rows(g.float() * scale if do_gate_scale else g)
    query, keys, start = q[0][:, None], rows(k), longest - lengths
    parts = [
        forgetting_attention(query, keys, values, gates, sm_scale=scale, seq_start=start, sink_bias=sink_bias)
        for values in rows(v).split(_WIDEST, -1)
    ]
    return torch.cat(parts, -1)[:, 0][None]


def token_shift(
    x: Tensor,
    prev_weight: Tensor,
    curr_weight: Tensor,
) -> Tensor:
    """Mixing with the previous token, as the published model does: `prev_weight_t x_{t-1} + curr_weight_t x_t`, with
    zeros before the first token.

    Args:
        x: `[B, T, H, D]`.
        prev_weight, curr_weight: `[B, T, H]`.

    Returns:
        `[B, T, H, D]` of the type of `x`; sums are in float32.
    """
    _checks.tensors(x=x, prev_weight=prev_weight, curr_weight=curr_weight)
    from torch.nn.functional import pad

    for name, weight in (("prev_weight", prev_weight), ("curr_weight", curr_weight)):
        if x.ndim != 4 or weight.shape != x.shape[:3]:
            raise ValueError(f"x has shape {list(x.shape)} and {name} {list(weight.shape)}; they must fit")
    before = pad(x, (0, 0, 0, 0, 1, 0))[:, :-1].float()
    return (before * prev_weight.float()[..., None] + x.float() * curr_weight.float()[..., None]).to(x.dtype)
