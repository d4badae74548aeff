"""Kimi Delta Attention: the delta rule with a decay for each channel of the keys, under the names and signatures of
flash-linear-attention. Arguments that all scans have in common are described in `foxlm.scans`. Needs PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

from . import _checks
from .scans import Layout, LayoutOptions, RecurrentOptions, check_gate, normalise, write_strength

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from typing_extensions import Unpack

__all__ = ["chunk_kda", "fused_kda_gate", "fused_recurrent_kda"]


class KdaOptions(LayoutOptions, total=False):
    """Keyword arguments of `chunk_kda` behind its states; `A_log` and `dt_bias` are those of `fused_kda_gate`."""

    A_log: Tensor | None
    dt_bias: Tensor | None
    use_qk_l2norm_in_kernel: bool
    use_gate_in_kernel: bool
    use_beta_sigmoid_in_kernel: bool
    allow_neg_eigval: bool
    safe_gate: bool
    lower_bound: float | None
    disable_recompute: bool
    state_v_first: bool
    cu_seqlens: Tensor | None
    cu_seqlens_cpu: Tensor | None
    cp_context: None


def fused_kda_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Logs of the decays of Kimi Delta Attention from the outputs of a linear layer.

    `-exp(A_log) softplus(g + dt_bias)`, or with `lower_bound` `lower_bound sigmoid(exp(A_log) (g + dt_bias))`.

    Args:
        g: `[..., H, K]`.
        A_log: H numbers; None, for a factor of 1, only with `lower_bound`.
        dt_bias: H x K numbers, or None.
        lower_bound: the lowest result, a negative number.
        output_dtype: of the result; float32 when absent.

    Returns:
        `[..., H, K]`.
    """
    _checks.tensors(g=g, A_log=A_log, dt_bias=dt_bias)
    import torch
    from torch.nn.functional import softplus

    if g.ndim < 2:
        raise ValueError(f"g has shape {list(g.shape)}; it must be [..., heads, dim]")
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"lower_bound is {lower_bound}; it must be below 0")
    heads, width = g.shape[-2:]
    for name, x, count in (("A_log", A_log, heads), ("dt_bias", dt_bias, heads * width)):
        if x is not None and x.numel() != count:
            raise ValueError(f"{name} has shape {list(x.shape)}, expected {count} elements")
    wide = torch.float64 if g.dtype == torch.float64 else torch.float32
    g = g.to(wide) if dt_bias is None else g.to(wide) + dt_bias.to(wide).reshape(heads, width)
    rate = None if A_log is None else A_log.to(wide).reshape(heads, 1).exp()
    if lower_bound is not None:
        g = lower_bound * (g if rate is None else rate * g).sigmoid()
    elif rate is None:
        raise ValueError("A_log is missing; it may be None only with lower_bound")
    else:
        g = -rate * softplus(g)
    return g.to(wide if output_dtype is None else output_dtype)


@overload
def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    *,
    return_intermediate_states: Literal[False] = False,
    **kwargs: Unpack[KdaOptions],
) -> tuple[Tensor, Tensor | None]: ...
@overload
def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    *,
    return_intermediate_states: Literal[True],
    **kwargs: Unpack[KdaOptions],
) -> tuple[Tensor, Tensor | None, Tensor]: ...
def chunk_kda(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    safe_gate=False,
    lower_bound=None,
    disable_recompute=False,
    return_intermediate_states=False,
    state_v_first=False,
    cu_seqlens=None,
    cu_seqlens_cpu=None,
    cp_context=None,
    **kwargs,
):
    """Kimi Delta Attention: as `chunk_gated_delta_rule`, with a decay for each channel of the keys.

    `S_t = diag(exp(g_t)) S_{t-1}`, then `S_t += beta_t k_t (v_t - S_t^T k_t)^T`, `o_t = scale S_t^T q_t`.

    Args:
        q, k: `[B, T, H, K]`.
        v: `[B, T, HV, V]`; `HV` is a multiple of `H`.
        g: logs of the decays, at most 0, `[B, T, HV, K]`; with `use_gate_in_kernel` the argument of `fused_kda_gate`,
            which also takes `A_log`, `dt_bias` and `lower_bound`.
        beta: strength of the writes `[B, T, HV]`; with `use_beta_sigmoid_in_kernel` its logits, and with
            `allow_neg_eigval` twice their sigmoid.
        safe_gate: with `use_gate_in_kernel` it needs a `lower_bound` from -5 to 0; no other effect.
        disable_recompute: no effect; the library chooses.
        return_intermediate_states: also return the states before each chunk of `chunk_size` (32 or 64) tokens
            `[B, chunks, HV, K, V]`, of the type of `k`; only in `torch.inference_mode()`.
        Others: see `foxlm.scans`. `cp_context` must be None.
    """
    size = kwargs.pop("chunk_size", 64)
    if size not in (32, 64):
        raise ValueError(f"`chunk_size` must be either 32 or 64 for chunk_kda, got {size}")
    if cp_context is not None:
        raise ValueError("cp_context is given; context parallelism is not supported, pass None")
    if safe_gate and use_gate_in_kernel and (lower_bound is None or not -5 <= lower_bound < 0):
        raise ValueError(f"lower_bound is {lower_bound}; safe_gate needs one from -5 to 0 (exclusive)")
    a_log, dt_bias = kwargs.pop("A_log", None), kwargs.pop("dt_bias", None)
    layout = Layout("chunk_kda", state_v_first, kwargs, cu_seqlens, cu_seqlens_cpu)
    check_gate("g", g, v, q.shape[3])
    check_gate("beta", beta, v)
    q, k = normalise(use_qk_l2norm_in_kernel, q, k)
    if use_gate_in_kernel:
        g = fused_kda_gate(g, a_log, dt_bias, lower_bound)
    elif a_log is not None or dt_bias is not None:
        raise ValueError("A_log and dt_bias need use_gate_in_kernel")
    beta = write_strength(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    o, last = layout.run(q, k, v, g, beta, scale, initial_state, output_final_state, True)
    if not return_intermediate_states:
        return o, last
    return o, last, _chunk_states(layout, q, k, v, g, beta, initial_state, size)


def _chunk_states(layout, q, k, v, g, beta, initial_state, size):
    """The states before each chunk, `[B, chunks, HV, K, V]`; those of packed sequences one after the other."""
    import torch

    if not torch.is_inference_mode_enabled():
        raise ValueError("return_intermediate_states outside of torch.inference_mode(); it has no gradients")
    ends = [0, q.shape[1]] if layout.cu_seqlens is None else layout.cu_seqlens.tolist()
    alone = Layout("chunk_kda", layout.v_first, {}, None)
    shape = (q.shape[0], v.shape[2], *((v.shape[3], q.shape[3]) if layout.v_first else (q.shape[3], v.shape[3])))
    states = []
    for n, (first, end) in enumerate(zip(ends, ends[1:])):
        rows = slice(None) if layout.cu_seqlens is None else slice(n, n + 1)
        state = v.new_zeros(shape, dtype=torch.float32) if initial_state is None else initial_state[rows]
        for at in range(first, end, size):
            states.append(state.to(k.dtype))
            part = [x[:, at : min(at + size, end)] for x in (q, k, v, g, beta)]
            state = alone.run(*part, None, state, True, True)[1]
    return torch.stack(states, 1) if states else v.new_zeros(shape[0], 0, *shape[1:])


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Unpack[RecurrentOptions],
) -> tuple[Tensor, Tensor | None]:
    """As `chunk_kda`, with gradients, too."""
    return chunk_kda(
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel, use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval, lower_bound=lower_bound, state_v_first=state_v_first, cu_seqlens=cu_seqlens,
        A_log=A_log, dt_bias=dt_bias, **kwargs,
    )  # fmt: skip
