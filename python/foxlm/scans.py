"""Linear recurrences with a matrix as their state, under the names and shapes of flash-linear-attention and mamba-ssm.

`S_t` is `[dk, dv]` for each head. Gradients do not flow into initial states or out of final ones. Needs PyTorch.
"""

from __future__ import annotations

from . import _checks

__all__ = [
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_gla",
    "chunk_simple_gla",
    "mamba_chunk_scan_combined",
]


def _shapes(q, k, v, cu_seqlens, initial_state):
    _checks.tensors(q=q, k=k, v=v, cu_seqlens=cu_seqlens, initial_state=initial_state)
    for name, x in (("q", q), ("k", k), ("v", v)):
        shape = list(getattr(x, "shape", ()))
        if len(shape) != 4:
            raise ValueError(f"{name} has shape {shape}; it must be [batch, time, heads, dim]")
    if k.shape != q.shape:
        raise ValueError(f"q has shape {list(q.shape)} and k {list(k.shape)}; they must be equal")
    if v.shape[:2] != q.shape[:2]:
        raise ValueError(f"q has shape {list(q.shape)} and v {list(v.shape)}; batch and time must be equal")
    if v.shape[2] % max(q.shape[2], 1) != 0:
        raise ValueError(f"{v.shape[2]} heads of values do not share {q.shape[2]} heads of keys")
    if cu_seqlens is not None:
        _checks.packed_shape(cu_seqlens)
        if q.shape[0] != 1:
            raise ValueError(f"cu_seqlens with batch {q.shape[0]}; packed sequences need batch 1")
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    expected = [sequences, v.shape[2], q.shape[3], v.shape[3]]
    if initial_state is not None and list(initial_state.shape) != expected:
        raise ValueError(f"initial_state has shape {list(initial_state.shape)}, expected {expected}")


def _gate_shape(name, x, v, width=None):
    _checks.tensors(**{name: x})
    shape, expected = list(getattr(x, "shape", ())), list(v.shape[:3]) + ([] if width is None else [width])
    if shape != expected:
        raise ValueError(f"{name} has shape {shape}, expected {expected}")


def _run(q, k, v, decay, write, skip, scale, initial_state, output_final_state, cu_seqlens, delta):
    from . import _torch  # noqa: F401, registers the ops
    from ._scan_torch import scan

    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    state = None if initial_state is None else initial_state.float()
    o, last = scan(q, k, v, decay, write, skip, state, cu_seqlens, scale, delta, output_final_state)
    return o, last if output_final_state else None


def _normalise(x):
    wide = x.float()
    return (wide * (wide.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)


def chunk_delta_rule(
    q,
    k,
    v,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    cu_seqlens=None,
):
    """The delta rule: `S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T`, `o_t = scale S_t^T q_t`.

    Args:
        q, k: `[B, T, H, K]`; keys should have length 1 (`use_qk_l2norm_in_kernel` divides both by theirs).
        v: `[B, T, H, V]`.
        beta: strength of the writes `[B, T, H]`.
        scale: factor on the output; `1 / sqrt(K)` when absent.
        initial_state: `[N, H, K, V]` for N sequences.
        output_final_state: whether to return the last state.
        cu_seqlens: 0 and the ends of packed sequences `[N + 1]`; needs `B = 1`.

    Returns:
        `[B, T, H, V]`, and the last state `[N, H, K, V]` in float32, or None.
    """
    _shapes(q, k, v, cu_seqlens, initial_state)
    _gate_shape("beta", beta, v)
    if use_qk_l2norm_in_kernel:
        q, k = _normalise(q), _normalise(k)
    return _run(q, k, v, None, beta, None, scale, initial_state, output_final_state, cu_seqlens, True)


def chunk_gated_delta_rule(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    cu_seqlens=None,
):
    """The gated delta rule: as `chunk_delta_rule`, with the state decayed by `exp(g_t)` before each token.

    Args:
        q, k: `[B, T, H, K]`.
        v: `[B, T, HV, V]`; `HV` is a multiple of `H`.
        g: logs of the decay, at most 0, `[B, T, HV]`.
        beta: strength of the writes `[B, T, HV]`.
        scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens: as in `chunk_delta_rule`.

    Returns:
        `[B, T, HV, V]`, and the last state `[N, HV, K, V]` in float32, or None.
    """
    _shapes(q, k, v, cu_seqlens, initial_state)
    _gate_shape("g", g, v)
    _gate_shape("beta", beta, v)
    if use_qk_l2norm_in_kernel:
        q, k = _normalise(q), _normalise(k)
    return _run(q, k, v, g[..., None], beta, None, scale, initial_state, output_final_state, cu_seqlens, True)


def chunk_gla(q, k, v, g, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None):
    """Gated linear attention: `S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T`, `o_t = scale S_t^T q_t`.

    HGRN2 is this with `k = 1 - exp(g)`.

    Args:
        q, k: `[B, T, H, K]`.
        v: `[B, T, H, V]`.
        g: logs of the decay for each channel of the keys, at most 0, `[B, T, H, K]`.
        scale, initial_state, output_final_state, cu_seqlens: as in `chunk_delta_rule`.

    Returns:
        `[B, T, H, V]`, and the last state `[N, H, K, V]` in float32, or None.
    """
    _shapes(q, k, v, cu_seqlens, initial_state)
    _gate_shape("g", g, v, q.shape[3])
    if q.shape[2] != v.shape[2]:
        raise ValueError(
            f"{v.shape[2]} heads of values and {q.shape[2]} of keys; a decay for each channel needs as many"
        )
    return _run(q, k, v, g, None, None, scale, initial_state, output_final_state, cu_seqlens, False)


def chunk_simple_gla(q, k, v, g=None, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None):
    """Linear attention with one decay for each head: as `chunk_gla`, with `g` `[B, T, H]`, or None for no decay."""
    _shapes(q, k, v, cu_seqlens, initial_state)
    if g is not None:
        _gate_shape("g", g, v)
        g = g[..., None]
    return _run(q, k, v, g, None, None, scale, initial_state, output_final_state, cu_seqlens, False)


def mamba_chunk_scan_combined(
    x,
    dt,
    A,
    B,
    C,
    chunk_size=None,
    D=None,
    z=None,
    dt_bias=None,
    initial_states=None,
    seq_idx=None,
    cu_seqlens=None,
    dt_softplus=False,
    dt_limit=(0.0, float("inf")),
    return_final_states=False,
):
    """Mamba-2: `S_t = exp(A dt_t) S_{t-1} + dt_t x_t B_t^T`, `y_t = S_t C_t + D x_t`, times `silu(z_t)` where `z` is
    given.

    Args:
        x: `[batch, time, heads, headdim]`.
        dt: steps `[batch, time, heads]`, plus `dt_bias` `[heads]`, through softplus if `dt_softplus`, within
        `dt_limit`.
        A: `[heads]`, negative.
        B, C: `[batch, time, groups, dstate]`; `heads` is a multiple of `groups`.
        chunk_size: no effect; the library chooses.
        D: `[heads]`.
        z: `[batch, time, heads, headdim]`.
        initial_states: `[N, heads, headdim, dstate]`.
        seq_idx: only None; `cu_seqlens` says which tokens belong together.
        cu_seqlens: 0 and the ends of packed sequences `[N + 1]`; needs batch 1.
        return_final_states: whether to return the last states, too.

    Returns:
        `[batch, time, heads, headdim]`, and with `return_final_states` the last states, shaped as the first.
    """
    import torch

    if seq_idx is not None:
        raise ValueError("seq_idx is given; pass packed sequences with cu_seqlens")
    _checks.tensors(initial_states=initial_states)
    state = None if initial_states is None else initial_states.transpose(2, 3)
    _shapes(C, B, x, cu_seqlens, state)
    _gate_shape("dt", dt, x)
    for name, given in (("A", A), ("D", D), ("dt_bias", dt_bias)):
        if given is not None and list(given.shape) != [x.shape[2]]:
            raise ValueError(f"{name} has shape {list(given.shape)}, expected {[x.shape[2]]}")
    dt = dt.float()
    if dt_bias is not None:
        dt = dt + dt_bias.float()
    if dt_softplus:
        dt = torch.nn.functional.softplus(dt)
    dt = dt.clamp(*dt_limit)
    decay = (A.float() * dt)[..., None]
    skip = None if D is None else D.float()
    o, last = _run(C, B, x, decay, dt, skip, 1.0, state, return_final_states, cu_seqlens, False)
    if z is not None:
        o = o * torch.nn.functional.silu(z)
    return (o, last.transpose(2, 3)) if return_final_states else o
