"""The ops on PyTorch tensors: registered with `torch.library`, outputs allocated by PyTorch.

Tensors are `[batch, time, heads, dim]` here, with any strides: a head-first tensor comes as a transposed view.
"""

from __future__ import annotations

import math

import torch
from torch._C import _are_functorch_transforms_active as _transforms_are_active
from torch.autograd import forward_ad

from . import _checks, _core
from ._sinks import with_sinks

_TYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
LIBRARY = torch.library.Library("foxlm", "DEF")

_OPTIONS = (
    "Tensor? log_gates, Tensor? bounds, Tensor? seq_start, Tensor? cu_seqlens, "
    "float scale, bool causal, int? window, float? log_tolerance"
)
LIBRARY.define(f"attention(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)")
LIBRARY.define(
    f"attention_backward(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, {_OPTIONS})"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)


def describe(x: torch.Tensor):
    """`(address, type, shape, strides)` of a tensor; it must be held while this is used."""
    return x.data_ptr(), _TYPES[x.dtype], tuple(x.shape), x.stride()


def results(q, k, v, *_):
    """Room for the output `[B, M, H, dv]`, laid out as the queries are, and for the log sums `[B, M, H]`."""
    o = torch.empty_like(q) if v.shape[3] == q.shape[3] else q.new_empty((*q.shape[:3], v.shape[3]))
    return o, torch.empty_like(q.select(3, 0), dtype=torch.float32)


def _packed(k, bounds, seq_start, cu_seqlens, scale, causal, window, log_tolerance):
    starts, ends = _checks.segment_lists(seq_start, cu_seqlens, k.shape[1])
    described = None if bounds is None else describe(bounds)
    return scale, causal, window, log_tolerance, described, starts, ends


def _attention_cpu(q, k, v, log_gates, bounds, *options):
    o, lse = results(q, k, v)
    gates = None if log_gates is None else describe(log_gates)
    packed = _packed(k, bounds, *options)
    _core.attention_forward(describe(q), describe(k), describe(v), gates, describe(o), describe(lse), packed)
    return o, lse


def _attention_backward_cpu(d_out, q, k, v, o, lse, log_gates, bounds, *options):
    made = gradient_room(d_out, q, k, v, o, lse, log_gates)
    gates = None if log_gates is None else describe(log_gates)
    gradients = (*[describe(x) for x in made[:3]], None if log_gates is None else describe(made[3]))
    packed = _packed(k, bounds, *options)
    operands = [describe(x) for x in (d_out, q, k, v)]
    _core.attention_backward(*operands, gates, describe(o), describe(lse), gradients, packed)
    return made


def gradient_room(d_out, q, k, v, o, lse, log_gates, *_):
    """Room for gradients; one without elements where there are no gates."""
    d_gates = q.new_empty(0) if log_gates is None else torch.empty_like(log_gates)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), d_gates


def below_autograd(op, *arguments):
    """Runs the op itself, past what is registered for gradients."""
    with torch._C._AutoDispatchBelowAutograd():
        return op(*arguments)


def with_gradients(function, op):
    """What autograd calls: `function` where a gradient may be asked for, else the op alone. Tangents are refused: both
    would lose them.

    Registered directly: `torch.library.register_autograd` adds more to a call than all the rest of the way to the
    kernel.
    """

    def call(*arguments):
        _refuse_tangents(op, arguments)
        if torch.is_grad_enabled() and any(map(_needs_gradient, arguments)):
            return function.apply(*arguments)
        return below_autograd(op, *arguments)

    return call


def without_gradients(op):
    """The backward op without second derivatives: asking for them is an error, where they would silently be zero."""

    class Last(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*arguments):
            return below_autograd(op, *arguments)

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, *_):
            raise NotImplementedError(f"the results of {op.name()} have no gradients; there are no second derivatives")

    return Last


def entry(function, name):
    """What the package calls: the op, or under a transform of `torch.func`, which looks for a function with gradients
    before it looks at the op, that function."""

    def call(*arguments):
        op = getattr(torch.ops.foxlm, name).default
        if not torch.compiler.is_compiling() and _transforms_are_active():
            _refuse_tangents(op, arguments)
            return function.apply(*arguments)
        return op(*arguments)

    return call


def _needs_gradient(x):
    return isinstance(x, torch.Tensor) and x.requires_grad


def _refuse_tangents(op, arguments):
    if forward_ad._current_level >= 0 and any(map(_has_tangent, arguments)):
        raise NotImplementedError(f"{op.name()} has no forward-mode gradients; use backward ones")


def _has_tangent(x):
    return isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None


def register(name, function, implementation, fake):
    """Registers an op: its implementation on the CPU, the shapes of its results, and `function` with its gradients, or
    None where there are none. Returns what the package calls."""
    op = getattr(torch.ops.foxlm, name).default
    function = without_gradients(op) if function is None else function
    LIBRARY.impl(name, implementation, "CPU")
    torch.library.register_fake(f"foxlm::{name}", fake, lib=LIBRARY)
    LIBRARY.impl(name, with_gradients(function, op), "Autograd")
    return entry(function, name)


def register_attention(name, forward, backward, results, gradient_room, operands, tensors):
    """Registers an op that returns `(o, lse)`, and its backward. It takes `operands` tensors, log gates, further tensors
    up to `tensors` in all, and options. Returns what the package calls: the op, its backward, and the op with a sink."""
    op = getattr(torch.ops.foxlm, name).default
    gradients = register(f"{name}_backward", None, backward, gradient_room)

    class Attention(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*arguments):
            return below_autograd(op, *arguments)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs[:operands], *output, *inputs[operands:tensors])
            ctx.options = inputs[tensors:]
            ctx.mark_non_differentiable(output[1])
            ctx.set_materialize_grads(False)

        @staticmethod
        def backward(ctx, d_out, _):
            nothing = (None,) * (tensors + len(ctx.options))
            if d_out is None:
                return nothing
            # Read once: activation checkpointing computes them when they are asked for, and refuses a second time.
            saved = ctx.saved_tensors
            grads = gradients(d_out, *saved, *ctx.options)
            return *grads[:operands], None if saved[operands + 2] is None else grads[operands], *nothing[operands + 1 :]

    call = register(name, Attention, forward, results)
    return call, gradients, with_sinks(lambda *x: op(*x), gradients, operands, tensors)


attention_forward, attention_backward, _with_sinks = register_attention(
    "attention", _attention_cpu, _attention_backward_cpu, results, gradient_room, 3, 7
)


def check(**tensors):
    """An error unless all tensors are of types that the library reads, and where the first is: an address says nothing
    without its device."""
    given = [(name, x) for name, x in tensors.items() if x is not None]
    first, where = given[0][0], given[0][1].device
    for name, x in given:
        if x.dtype not in _TYPES:
            kind = str(x.dtype).removeprefix("torch.")
            raise ValueError(f"{name} is {kind}; use float32, bfloat16 or float16, or float64 for all")
        if x.device != where:
            raise ValueError(f"{name} is on {x.device}, but {first} on {where}; move one of them")


def bounds_of(threshold, b, h, n, device, seq_start=None, cu_seqlens=None):
    """Bounds on the logits `[1, segments, H]` for which a block is skipped below `threshold`, broadcast to `[B, H]`."""
    threshold = torch.as_tensor(threshold, dtype=torch.float32, device=device)
    if cu_seqlens is None and seq_start is None:
        # One launch: this is on the way of every call.
        bounds = torch.rsub(threshold.detach(), -math.log(max(n, 1)) / 2, alpha=0.5)
        return bounds.expand(b, h)[None].contiguous()
    threshold = threshold.expand(b, h)
    lengths = n - seq_start if cu_seqlens is None else cu_seqlens.diff()
    logs = lengths.to(device).clamp(min=1).float().log()
    return (-(logs[:, None] + threshold.detach()) / 2)[None].contiguous()


def autocast(kind, q, k, v):
    """The operands as autocast wants them. The gates keep their precision: their sums over a long sequence need it."""
    if kind != "meta" and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        return q.to(dtype), k.to(dtype), v.to(dtype)
    return q, k, v


def attention(
    q, k, v, log_gates, *, seq_start, cu_seqlens, scale, causal, window, log_tolerance, threshold, sink_bias=None
):
    """Forgetting attention with gradients; shapes as in `foxlm.forgetting_attention`, time before heads."""
    q, k, v = autocast(q.device.type, q, k, v)
    if q.dtype == torch.float64:
        from . import _float64

        return _float64.attention(q, k, v, log_gates, seq_start, cu_seqlens, scale, causal, window, sink_bias)
    check(q=q, k=k, v=v, log_fgate=log_gates, sink_bias=sink_bias)
    bounds = None
    if threshold is not None:
        b, h, n = q.shape[0], q.shape[2], k.shape[1]
        bounds, log_tolerance = bounds_of(threshold, b, h, n, q.device, seq_start, cu_seqlens), 0.0
    options = scale, causal, window, log_tolerance
    if sink_bias is not None:
        return _with_sinks(sink_bias, q, k, v, log_gates, bounds, seq_start, cu_seqlens, *options)
    return attention_forward(q, k, v, log_gates, bounds, seq_start, cu_seqlens, *options)


# What follows adds to the library that is defined above.
from . import _cuda  # noqa: E402, F401
