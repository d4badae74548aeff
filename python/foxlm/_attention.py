"""Forgetting attention, under the names and signatures that people use already."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from . import _checks, _numpy
from ._arrays import is_tensor

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    NumpyArray = np.ndarray[Any, Any]
    # The result is an array of the library that the operands are from.
    Array = TypeVar("Array", NumpyArray, Tensor)

_direct = None


def _load_direct():
    """The path of plain calls to a GPU, which needs PyTorch; an import statement in each call takes longer."""
    global _direct
    from ._direct import attention

    _direct = attention
    return attention


@overload
def forgetting_attention(
    q: Array,
    k: Array,
    v: Array,
    log_fgate: Array | None = None,
    *,
    head_first: bool = False,
    seq_start: Array | None = None,
    sm_scale: float | None = None,
    adaptive_threshold: Literal["auto"] | float | Array | None = None,
    cu_seqlens: Array | None = None,
    window: int | None = None,
    causal: bool = True,
    log_tolerance: float | None = None,
    return_lse: Literal[False] = False,
    sink_bias: Tensor | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
) -> Array: ...
@overload
def forgetting_attention(
    q: Array,
    k: Array,
    v: Array,
    log_fgate: Array | None = None,
    *,
    head_first: bool = False,
    seq_start: Array | None = None,
    sm_scale: float | None = None,
    adaptive_threshold: Literal["auto"] | float | Array | None = None,
    cu_seqlens: Array | None = None,
    window: int | None = None,
    causal: bool = True,
    log_tolerance: float | None = None,
    return_lse: Literal[True],
    sink_bias: Tensor | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
) -> tuple[Array, Array]: ...
def forgetting_attention(
    q,
    k,
    v,
    log_fgate=None,
    *,
    head_first=False,
    seq_start=None,
    sm_scale=None,
    adaptive_threshold=None,
    cu_seqlens=None,
    window=None,
    causal=True,
    log_tolerance=None,
    return_lse=False,
    sink_bias=None,
    group=None,
):
    """Softmax attention with forget gates, as in the Forgetting Transformer (arXiv 2503.02130).

    `o_i = sum_j softmax_j(sm_scale q_i . k_j + c_i - c_j) v_j` over the keys `j` that query `i` sees, where `c_i` is
    the sum of the log gates up to and including `i`. Queries are the last `M` of the `N` positions.

    Takes tensors of PyTorch, with gradients, or arrays of NumPy. The first eight arguments are those of the published
    `forgetting_attention`.

    Args:
        q: queries `[B, M, H, d]`; `[B, H, M, d]` with `head_first`. float32, bfloat16 or float16, any
            strides; float64 is computed by the definition in PyTorch.
        k: keys `[B, N, Hk, d]`, `N >= M`; query head `h` reads key head `h // (H / Hk)`. `d` is from 1 to 256.
        v: values `[B, N, Hk, dv]`.
        log_fgate: logs of the forget gates, at most 0, `[B, N, H]`, best in float32; None for no forgetting.
        head_first: whether the axis of heads comes before that of time, in all operands and in the result.
        seq_start: `[B]` integers: keys before these are padding. A query that sees no key gives 0.
        sm_scale: factor on `q . k`; `1 / sqrt(d)` when absent.
        adaptive_threshold: skips blocks across which the gates decay by more than this (a negative number, or one for
            each sequence and head `[B, H]`); "auto" finds it from the norms of queries and keys, such that at most
            `e^-10` of a row's softmax is dropped.
        cu_seqlens: packed sequences: 0 and the end of each, `[sequences + 1]`. Needs `B = 1` and `M = N`.
        window: a query sees only the last `window` keys (with `causal=False` those nearer than `window`).
        causal: False lets queries see later keys, too, with a bias of `-|c_i - c_j|`.
        log_tolerance: as `adaptive_threshold="auto"`, with another natural logarithm of the softmax fraction than -10.
        return_lse: also return the log of the softmax denominators, `[B, M, H]` (or `[B, H, M]`), without gradient.
        sink_bias: logits `[H]` of an attention sink: a key without a value that every query sees. PyTorch only.
        group: a `torch.distributed` process group or `DeviceMesh` of one dimension over whose ranks the sequence is
            sharded: rank `r` has the `r`-th contiguous chunk in all operands (lengths may differ) and gets the output of
            its queries. `cu_seqlens` and `seq_start` are those of the whole sequence. Only keys that later ranks have not
            forgotten are sent. Under `torch.compile` the call is a graph break.

    Returns:
        `[B, M, H, dv]`, or `[B, H, M, dv]` with `head_first`, of the type of `q`.

    Raises:
        ValueError: an argument does not fit; the message says which, and what would.
    """
    if group is not None:
        if not is_tensor(q):
            raise ValueError("group is given with arrays of NumPy; sharded sequences need tensors of PyTorch")
        from . import _group

        if _group.size(group) > 1:
            o, lse = _group.attention(
                q, k, v, log_fgate, group, head_first, seq_start=seq_start, sm_scale=sm_scale, causal=causal,
                adaptive_threshold=adaptive_threshold, cu_seqlens=cu_seqlens, window=window,
                log_tolerance=log_tolerance, sink_bias=sink_bias,
            )  # fmt: skip
            return (o, lse) if return_lse else o
    if is_tensor(q):
        if seq_start is None and cu_seqlens is None and sink_bias is None and not return_lse:
            o = (_direct or _load_direct())(
                q, k, v, log_fgate, head_first, sm_scale, adaptive_threshold, window, causal, log_tolerance
            )
            if o is not None:
                return o
        _checks.tensors(k=k, v=v, log_fgate=log_fgate, seq_start=seq_start, cu_seqlens=cu_seqlens, sink_bias=sink_bias)
    else:
        if sink_bias is not None:
            raise ValueError("sink_bias is given with arrays of NumPy; attention sinks need tensors of PyTorch")
        q, k, v, log_fgate, seq_start, cu_seqlens = _numpy.arrays(q, k, v, log_fgate, seq_start, cu_seqlens)
    _checks.attention_shapes(q, k, v, log_fgate, head_first)
    _checks.attention_options(q, k, head_first, seq_start, cu_seqlens, window, log_tolerance, adaptive_threshold)
    if head_first:
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        log_fgate = None if log_fgate is None else log_fgate.swapaxes(1, 2)
    threshold = adaptive_threshold
    if isinstance(adaptive_threshold, str):
        threshold, log_tolerance = None, -10.0
    options = {
        "seq_start": seq_start,
        "cu_seqlens": cu_seqlens,
        "scale": q.shape[-1] ** -0.5 if sm_scale is None else float(sm_scale),
        "causal": causal,
        "window": window,
        "log_tolerance": log_tolerance,
        "threshold": threshold,
    }
    if is_tensor(q):
        from . import _torch

        o, lse = _torch.attention(q, k, v, log_fgate, sink_bias=sink_bias, **options)
    else:
        o, lse = _numpy.attention_forward(q, k, v, log_fgate, **options)
    if head_first:
        o, lse = o.swapaxes(1, 2), lse.swapaxes(1, 2)
    return (o, lse) if return_lse else o


def forgetting_attention_backward(
    d_out: NumpyArray,
    q: NumpyArray,
    k: NumpyArray,
    v: NumpyArray,
    log_fgate: NumpyArray | None,
    o: NumpyArray,
    lse: NumpyArray,
    *,
    sm_scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    seq_start: NumpyArray | None = None,
    cu_seqlens: NumpyArray | None = None,
    log_tolerance: float | None = None,
    adaptive_threshold: Literal["auto"] | float | NumpyArray | None = None,
) -> tuple[NumpyArray, NumpyArray, NumpyArray, NumpyArray | None]:
    """Gradients of `forgetting_attention` for NumPy arrays (PyTorch has its own way to ask for them).

    Args:
        d_out: gradient of the output `[B, M, H, dv]`.
        q, k, v, log_fgate: the operands, time before heads; the other options as in the forward.
        o, lse: what `forgetting_attention(..., return_lse=True)` gave.

    Returns:
        Gradients of q, k, v and log_fgate (None without gates), each shaped as what it belongs to.
    """
    d_out, q, k, v, log_fgate, o, lse = _numpy.arrays(d_out, q, k, v, log_fgate, o, lse)
    seq_start, cu_seqlens = _numpy.arrays(seq_start, cu_seqlens)
    _checks.attention_shapes(q, k, v, log_fgate, False)
    _checks.attention_options(q, k, False, seq_start, cu_seqlens, window, log_tolerance, adaptive_threshold)
    threshold = adaptive_threshold
    if isinstance(adaptive_threshold, str):
        threshold, log_tolerance = None, -10.0
    scale = q.shape[-1] ** -0.5 if sm_scale is None else float(sm_scale)
    return _numpy.attention_backward(
        d_out, q, k, v, log_fgate, o, lse, seq_start=seq_start, cu_seqlens=cu_seqlens, scale=scale, causal=causal,
        window=window, log_tolerance=log_tolerance, threshold=threshold,
    )  # fmt: skip
