"""PaTH and Wall attention on PyTorch tensors, registered with `torch.library`.

Between query and key stands a product of one transition for each token: reflections `I - u u^T` of PaTH, or diagonal
matrices of decays of Wall. Queries are `[B, T, H, d]`, keys `[B, T, Hk, d]`, values `[B, T, Hk, dv]`; transitions are
the vectors `u` `[B, T, Hk, d]` with `reflections`, else log decays `[B, T, H, d]`; log gates `[B, T, H]`.
"""

from __future__ import annotations

import torch

from . import _checks, _core
from ._torch import LIBRARY, autocast, check, describe, register_attention
from ._torch import results as attention_results

_OPTIONS = "Tensor? log_gates, Tensor? cu_seqlens, bool reflections, float scale, int? window"
_OPERANDS = "Tensor q, Tensor k, Tensor v, Tensor transition"
LIBRARY.define(f"transition_attention({_OPERANDS}, {_OPTIONS}) -> (Tensor, Tensor)")
LIBRARY.define(
    f"transition_attention_backward(Tensor d_out, {_OPERANDS}, Tensor o, Tensor lse, {_OPTIONS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def results(q, k, v, *_):
    """Memory for the output `[B, T, H, dv]` and the log sums `[B, T, H]`."""
    return attention_results(q, k, v)


def gradient_room(d_out, q, k, v, transition, o, lse, log_gates, *_):
    """Memory for gradients; one without elements where there are no gates."""
    d_gates = q.new_empty(0) if log_gates is None else torch.empty_like(log_gates)
    return *map(torch.empty_like, (q, k, v, transition)), d_gates


def packed(q, cu_seqlens, reflections, scale, window):
    """The options as the library takes them."""
    return reflections, scale, window, _checks.segment_lists(None, cu_seqlens, q.shape[1])[1]


def _maybe(x):
    return None if x is None else describe(x)


def _forward_cpu(q, k, v, transition, log_gates, *options):
    o, lse = results(q, k, v)
    if q.numel() > 0:
        x = [describe(a) for a in (q, k, v, transition)]
        _core.transition_forward(x, _maybe(log_gates), [describe(o), describe(lse)], packed(q, *options))
    return o, lse


def _backward_cpu(d_out, q, k, v, transition, o, lse, log_gates, *options):
    made = gradient_room(d_out, q, k, v, transition, o, lse, log_gates)
    if q.numel() == 0:
        return tuple(x.zero_() for x in made)
    x = [describe(a) for a in (q, k, v, transition)]
    gradients = [describe(a) for a in made[:4]], None if log_gates is None else describe(made[4])
    saved = [describe(o), describe(lse)]
    _core.transition_backward(describe(d_out), x, _maybe(log_gates), saved, gradients, packed(q, *options))
    return made


forward, backward, _with_sinks = register_attention(
    "transition_attention", _forward_cpu, _backward_cpu, results, gradient_room, 4, 6
)


def attention(q, k, v, transition, log_gates, cu_seqlens, reflections, scale, window=None, sink=None):
    """`(o, lse)` with gradients of all operands that are not float64."""
    q, k, v = autocast(q.device.type, q, k, v)
    check(q=q, k=k, v=v, transition=transition, g=log_gates, sink_bias=sink)
    options = reflections, scale, window
    if sink is None:
        return forward(q, k, v, transition, log_gates, cu_seqlens, *options)
    return _with_sinks(sink, q, k, v, transition, log_gates, cu_seqlens, *options)
