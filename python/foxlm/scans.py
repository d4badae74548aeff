"""Linear recurrences with a matrix as their state, under the names and signatures of flash-linear-attention.

`S_t` is `[K, V]` for each head. Gradients flow into initial states and out of final ones. Needs PyTorch.

Arguments that all ops have in common:
    scale: factor on the output; `1 / sqrt(K)` when absent.
    initial_state: `[N, H, K, V]` for N sequences, or `[N, H, V, K]` with `state_v_first`; zeros when absent.
    output_final_state: whether to return the last state.
    cu_seqlens: 0 and the ends of packed sequences `[N + 1]`; needs `B = 1`.
    cu_seqlens_cpu: the same in the memory of the host, which saves a copy from the GPU.
    chunk_size, chunk_indices: no effect on the result; the library chooses.
They return `[B, T, H, V]`, and the last state in float32, shaped as the first, or None.

`fused_recurrent_*` are the same ops: short sequences, as in decoding, are computed token by token.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, TypedDict

from . import _checks

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Unpack

__all__ = [
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_gla",
    "chunk_simple_gla",
    "fused_recurrent_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gla",
    "fused_recurrent_simple_gla",
]


class LayoutOptions(TypedDict, total=False):
    """Further keyword arguments of all scans; `transpose_state_layout` is the old name of `state_v_first`."""

    chunk_size: int | None
    chunk_indices: Tensor | None
    transpose_state_layout: bool


class DeltaOptions(LayoutOptions, total=False):
    """Further keyword arguments of the delta rule."""

    state_v_first: bool


class RecurrentOptions(LayoutOptions, total=False):
    """Further keyword arguments of the recurrent forms of the gated delta rules."""

    cu_seqlens_cpu: Tensor | None


def check_shapes(q, k, v, cu_seqlens, initial_state, names="qkv"):
    """An error unless queries and keys `[B, T, H, K]`, values `[B, T, HV, V]` and states `[N, HV, K, V]` fit."""
    _checks.tensors(**dict(zip(names, (q, k, v))), cu_seqlens=cu_seqlens, initial_state=initial_state)
    for name, x in zip(names, (q, k, v)):
        if len(x.shape) != 4:
            raise ValueError(f"{name} has shape {list(x.shape)}; it must be [batch, time, heads, dim]")
    if k.shape != q.shape:
        a, b = names[:2]
        raise ValueError(f"{a} has shape {list(q.shape)} and {b} {list(k.shape)}; they must be equal")
    if v.shape[:2] != q.shape[:2]:
        a, b = names[0], names[2]
        raise ValueError(f"{a} has shape {list(q.shape)} and {b} {list(v.shape)}; batch and time must be equal")
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


def check_gate(name, x, v, width=None):
    """An error unless a gate is `[B, T, HV]`, or `[B, T, HV, width]`."""
    _checks.tensors(**{name: x})
    expected = list(v.shape[:3]) + ([] if width is None else [width])
    if x is None or list(x.shape) != expected:
        shape = None if x is None else list(x.shape)
        raise ValueError(f"{name} has shape {shape}, expected {expected}")


def run(q, k, v, decay, write, skip, scale, initial_state, output_final_state, cu_seqlens, delta):
    """The recurrence of operands that were checked; decay `[B, T, H, 1]` or `[B, T, H, K]`."""
    from . import _torch  # noqa: F401, registers the ops
    from ._scan_torch import scan

    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    exact = str(q.dtype) == "torch.float64"
    state = initial_state if initial_state is None or exact else initial_state.float()
    o, last = scan(q, k, v, decay, write, skip, state, cu_seqlens, scale, delta, output_final_state)
    return o, last if output_final_state else None


def _turned(x):
    return None if x is None else x.transpose(-1, -2)


def _reversed(x):
    """Time and, with packed sequences, their order from the end."""
    return None if x is None else x.flip(1)


class Layout:
    """The layout of the states, and what further keyword arguments say; those that do not exist are refused."""

    def __init__(self, op, state_v_first, kwargs, cu_seqlens, cu_seqlens_cpu=None, reverse=False):
        if "transpose_state_layout" in kwargs:
            if state_v_first:
                raise ValueError("both state_v_first and transpose_state_layout are given; the latter is the old name")
            words = "transpose_state_layout is the old name of state_v_first"
            warnings.warn(words, DeprecationWarning, stacklevel=4)
            state_v_first = kwargs.pop("transpose_state_layout")
        kwargs.pop("chunk_indices", None)
        size = kwargs.pop("chunk_size", None)
        if size is not None and (not isinstance(size, int) or size < 16 or size & (size - 1)):
            raise ValueError(f"chunk_size is {size}; it must be a power of two from 16 on")
        _checks.no_more_arguments(op, kwargs)
        _checks.tensors(cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu)
        if cu_seqlens is not None and cu_seqlens_cpu is not None:
            _checks.shaped("cu_seqlens_cpu", cu_seqlens_cpu, cu_seqlens.shape)
        self.v_first, self.reverse = bool(state_v_first), bool(reverse)
        self.cu_seqlens = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu

    def run(self, q, k, v, decay, write, scale, initial_state, output_final_state, delta):
        """The op with states as the caller has them."""
        state, cu_seqlens = _turned(initial_state) if self.v_first else initial_state, self.cu_seqlens
        check_shapes(q, k, v, cu_seqlens, state)
        if self.reverse:
            q, k, v, decay, write = map(_reversed, (q, k, v, decay, write))
            if cu_seqlens is not None:
                cu_seqlens = cu_seqlens[-1] - cu_seqlens.flip(0)
                state = None if state is None else state.flip(0)
        o, last = run(q, k, v, decay, write, None, scale, state, output_final_state, cu_seqlens, delta)
        if self.reverse:
            o = _reversed(o)
            last = last if last is None or cu_seqlens is None else last.flip(0)
        return o, _turned(last) if self.v_first else last


def normalise(on, q, k):
    """Queries and keys divided by their lengths, if `on`."""
    if not on:
        return q, k

    def unit(x):
        wide = x.float()
        return (wide * (wide.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)

    return unit(q), unit(k)


def write_strength(beta, sigmoid, allow_neg_eigval):
    """The strengths of the writes: `beta`, or (twice) the sigmoid of it."""
    if allow_neg_eigval and not sigmoid:
        raise ValueError("allow_neg_eigval needs use_beta_sigmoid_in_kernel")
    return beta.float().sigmoid() * (2 if allow_neg_eigval else 1) if sigmoid else beta


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs: Unpack[DeltaOptions],
) -> tuple[Tensor, Tensor | None]:
    """The delta rule: `S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T`, `o_t = scale S_t^T q_t`.

    Args:
        q, k: `[B, T, H, K]`; keys should have length 1 (`use_qk_l2norm_in_kernel` divides both by theirs).
        v: `[B, T, H, V]`.
        beta: strength of the writes `[B, T, H]`.
        Others: see the module.
    """
    layout = Layout("chunk_delta_rule", kwargs.pop("state_v_first", False), kwargs, cu_seqlens, cu_seqlens_cpu)
    check_gate("beta", beta, v)
    q, k = normalise(use_qk_l2norm_in_kernel, q, k)
    return layout.run(q, k, v, None, beta, scale, initial_state, output_final_state, True)


def fused_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs: Unpack[DeltaOptions],
) -> tuple[Tensor, Tensor | None]:
    """As `chunk_delta_rule`; a strength of 1 where `beta` is absent."""
    beta = v.new_ones(v.shape[:3]) if beta is None else beta
    return chunk_delta_rule(
        q, k, v, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, cu_seqlens_cpu,
        **kwargs,
    )  # fmt: skip


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: None = None,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    **kwargs: Unpack[LayoutOptions],
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule: as `chunk_delta_rule`, with the state decayed by `exp(g_t)` before each token.

    Args:
        q, k: `[B, T, H, K]`.
        v: `[B, T, HV, V]`; `HV` is a multiple of `H`.
        g: logs of the decay, at most 0, `[B, T, HV]`; with `use_gate_in_kernel` they are
            `-exp(A_log) softplus(g + dt_bias)`, `A_log` and `dt_bias` `[HV]`.
        beta: strength of the writes `[B, T, HV]`; with `use_beta_sigmoid_in_kernel` its logits, and with
            `allow_neg_eigval` twice their sigmoid.
        Others: see the module. `cp_context` must be None.
    """
    layout = Layout("chunk_gated_delta_rule", state_v_first, kwargs, cu_seqlens, cu_seqlens_cpu)
    if cp_context is not None:
        raise ValueError("cp_context is given; context parallelism is not supported, pass None")
    check_gate("g", g, v)
    check_gate("beta", beta, v)
    q, k = normalise(use_qk_l2norm_in_kernel, q, k)
    if use_gate_in_kernel:
        g = _gate(g, A_log, dt_bias)
    elif A_log is not None or dt_bias is not None:
        raise ValueError("A_log and dt_bias need use_gate_in_kernel")
    beta = write_strength(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    return layout.run(q, k, v, g[..., None], beta, scale, initial_state, output_final_state, True)


def _gate(g, A_log, dt_bias):
    from torch.nn.functional import softplus

    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        if x is None and name == "A_log":
            raise ValueError("use_gate_in_kernel needs A_log")
        if x is not None and list(x.shape) != [g.shape[2]]:
            raise ValueError(f"{name} has shape {list(x.shape)}, expected {[g.shape[2]]}")
    g = g.float() if dt_bias is None else g.float() + dt_bias.float()
    return -A_log.float().exp() * softplus(g)


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: None = None,
    gv: None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Unpack[RecurrentOptions],
) -> tuple[Tensor, Tensor | None]:
    """As `chunk_gated_delta_rule`; nothing decays without `g`, and writes have strength 1 without `beta`. Decays for
    each channel (`gk`, `gv`) are refused."""
    for name, x in (("gk", gk), ("gv", gv)):
        if x is not None:
            raise ValueError(f"{name} is given; the delta rule has one decay for each head, pass g")
    g = v.new_zeros(v.shape[:3]) if g is None else g
    beta = v.new_ones(v.shape[:3]) if beta is None else beta
    return chunk_gated_delta_rule(
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, cu_seqlens, use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log, dt_bias=dt_bias, **kwargs,
    )  # fmt: skip


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs: Unpack[LayoutOptions],
) -> tuple[Tensor, Tensor | None]:
    """Gated linear attention: `S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T`, `o_t = scale S_t^T q_t`.

    HGRN2 is this with `k = 1 - exp(g)`.

    Args:
        q, k: `[B, T, H, K]`.
        v: `[B, T, H, V]`.
        g: logs of the decay for each channel of the keys, at most 0, `[B, T, H, K]`.
        Others: see the module.
    """
    layout = Layout("chunk_gla", state_v_first, kwargs, cu_seqlens, cu_seqlens_cpu)
    return _gla(layout, q, k, v, g, scale, initial_state, output_final_state)


def _gla(layout, q, k, v, g, scale, initial_state, output_final_state):
    if g is not None:
        check_gate("g", g, v, q.shape[3])
        if q.shape[2] != v.shape[2]:
            heads = f"{v.shape[2]} heads of values and {q.shape[2]} of keys"
            raise ValueError(f"{heads}; a decay for each channel needs as many")
    return layout.run(q, k, v, g, None, scale, initial_state, output_final_state, False)


def fused_recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None = None,
    gv: None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Unpack[LayoutOptions],
) -> tuple[Tensor, Tensor | None]:
    """As `chunk_gla` with `g = gk`, or without decay; `reverse` reads from the last token to the first. Decays for each
    channel of the values (`gv`) are refused."""
    if gv is not None:
        raise ValueError("gv is given; decays are for channels of the keys, pass gk")
    layout = Layout("fused_recurrent_gla", state_v_first, kwargs, cu_seqlens, None, reverse)
    return _gla(layout, q, k, v, gk, scale, initial_state, output_final_state)


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs: Unpack[LayoutOptions],
) -> tuple[Tensor, Tensor | None]:
    """Linear attention with one decay for each head: as `chunk_gla`, with `g` `[B, T, H]` and, the same for all tokens,
    `g_gamma` `[H]`; they add up, and nothing decays without them."""
    layout = Layout("chunk_simple_gla", state_v_first, kwargs, cu_seqlens, cu_seqlens_cpu)
    return _simple_gla(layout, q, k, v, g, g_gamma, scale, initial_state, output_final_state)


def _simple_gla(layout, q, k, v, g, g_gamma, scale, initial_state, output_final_state):
    if g is not None:
        check_gate("g", g, v)
    if g_gamma is not None:
        _checks.tensors(g_gamma=g_gamma)
        if list(g_gamma.shape) != [v.shape[2]]:
            raise ValueError(f"g_gamma has shape {list(g_gamma.shape)}, expected {[v.shape[2]]}")
        g = g_gamma.float().expand(v.shape[:3]) if g is None else g + g_gamma
    decay = None if g is None else g[..., None]
    return layout.run(q, k, v, decay, None, scale, initial_state, output_final_state, False)


def fused_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Unpack[LayoutOptions],
) -> tuple[Tensor, Tensor | None]:
    """As `chunk_simple_gla`; `reverse` reads from the last token to the first."""
    layout = Layout("fused_recurrent_simple_gla", state_v_first, kwargs, cu_seqlens, None, reverse)
    return _simple_gla(layout, q, k, v, g, g_gamma, scale, initial_state, output_final_state)
