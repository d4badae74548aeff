"""Linear recurrences on PyTorch tensors, registered with `torch.library`.

Queries and keys are `[B, T, G, dk]`, values `[B, T, H, dv]`, the log decay `[B, T, H, 1]` or `[B, T, H, dk]`, the
strength of a write `[B, T, H]`, the skip `[H]`, states `[sequences, H, dk, dv]`. Gradients flow through states.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from . import _checks, _core
from ._torch import LIBRARY, autocast, below_autograd, check, describe, register

_OPTIONS = "Tensor? decay, Tensor? write, Tensor? skip, Tensor? state, Tensor? cu_seqlens, float scale, bool delta"
LIBRARY.define(f"scan(Tensor q, Tensor k, Tensor v, {_OPTIONS}, bool keep_state) -> (Tensor, Tensor)")
LIBRARY.define(
    f"scan_backward(Tensor d_out, Tensor? d_last, Tensor q, Tensor k, Tensor v, {_OPTIONS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def results(q, k, v, decay, write, skip, state, cu_seqlens, scale, delta, keep_state):
    """Room for the output, laid out as the values, and for the last states in float32."""
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = (sequences, v.shape[2], q.shape[3], v.shape[3]) if keep_state else (0,)
    return torch.empty_like(v), v.new_empty(shape, dtype=torch.float32)


def gradient_room(d_out, d_last, q, k, v, decay, write, skip, state, *_):
    """Room for gradients; one without elements for what is absent."""
    operands = (q, k, v, decay, write, skip)
    made = [v.new_empty(0) if x is None else torch.empty_like(x) for x in operands]
    # Rows of states are flattened, so they must be contiguous.
    return *made, v.new_empty(0) if state is None else state.new_empty(state.shape)


def _flat(state):
    """States `[N, H, dk, dv]` as one row for each sequence."""
    return None if state is None else describe(state.flatten(1)[None])


def _extras(decay, write, skip, state):
    return [
        None if decay is None else describe(decay),
        None if write is None else describe(write),
        None if skip is None else describe(skip.reshape(1, 1, -1)),
        _flat(state),
    ]


def _options(q, cu_seqlens, scale, delta):
    return scale, delta, _checks.segment_lists(None, cu_seqlens, q.shape[1])[1]


def _scan_cpu(q, k, v, decay, write, skip, state, cu_seqlens, scale, delta, keep_state):
    o, last = results(q, k, v, decay, write, skip, state, cu_seqlens, scale, delta, keep_state)
    state = None if state is None else state.contiguous()
    operands, extras = [describe(x) for x in (q, k, v)], _extras(decay, write, skip, state)
    kept = _flat(last) if keep_state else None
    _core.scan_forward(operands, extras, describe(o), kept, _options(q, cu_seqlens, scale, delta))
    return o, last


def _scan_backward_cpu(d_out, d_last, q, k, v, decay, write, skip, state, cu_seqlens, scale, delta):
    made = gradient_room(d_out, d_last, q, k, v, decay, write, skip, state)
    state = None if state is None else state.contiguous()
    d_last = None if d_last is None else d_last.contiguous()
    gradients = [describe(x) for x in made[:3]]
    gradients.append(None if decay is None else describe(made[3]))
    gradients.append(None if write is None else describe(made[4]))
    gradients.append(None if skip is None else describe(made[5].reshape(1, 1, -1)))
    gradients.append(None if state is None else _flat(made[6]))
    operands, extras = [describe(x) for x in (q, k, v)], _extras(decay, write, skip, state)
    options = _options(q, cu_seqlens, scale, delta)
    _core.scan_backward(describe(d_out), _flat(d_last), operands, extras, gradients, options)
    return made


class _Scan(torch.autograd.Function):
    """The op with its gradients."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments):
        return below_autograd(torch.ops.foxlm.scan.default, *arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:8])
        ctx.options = inputs[8:10]
        if not inputs[10]:
            ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, d_out, d_last):
        nothing = (None,) * 11
        if d_out is None and d_last is None:
            return nothing
        tensors = ctx.saved_tensors
        d_out = torch.zeros_like(tensors[2]) if d_out is None else d_out
        grads = scan_backward(d_out, d_last, *tensors, *ctx.options)
        return (*[None if x is None else g for x, g in zip(tensors[:7], grads)], *nothing[7:])


scan_backward = register("scan_backward", None, _scan_backward_cpu, gradient_room)
_scan = register("scan", _Scan, _scan_cpu, results)


# The widest keys and values of additive scans on a GPU.
WIDEST = 128


def split_scan(run, q, k, v, decay, write, skip, state, cu_seqlens, scale, keep_state):
    """An additive scan of any width by `run`, which takes blocks of `WIDEST` columns: channels of keys and of values do
    not mix, so every pair of blocks is a separate head, and outputs are summed over the blocks of keys."""
    (rows, time, heads, value_dim), key_dim = v.shape, q.shape[3]
    keys, values = -(-key_dim // WIDEST), -(-value_dim // WIDEST)
    blocks = lambda x, count: pad(x, (0, count * WIDEST - x.shape[-1])).unflatten(-1, (count, WIDEST))
    spread = lambda x, *shape: x.expand(*x.shape[:2], heads, keys, values, *shape).flatten(2, 4)
    over_keys = lambda x: spread(blocks(x, keys)[:, :, :, :, None], WIDEST)
    q, k = (over_keys(x.repeat_interleave(heads // x.shape[2], 2)) for x in (q, k))
    parts = spread(blocks(v, values)[:, :, :, None], WIDEST)
    if decay is not None:
        decay = spread(decay[..., None, None, :], 1) if decay.shape[3] == 1 else over_keys(decay)
    write = None if write is None else spread(write[..., None, None])
    if state is not None:
        room = (0, values * WIDEST - value_dim, 0, keys * WIDEST - key_dim)
        state = pad(state, room).unflatten(3, (values, WIDEST)).unflatten(2, (keys, WIDEST))
        state = state.transpose(3, 4).flatten(1, 3)
    o, last = run(q, k, parts, decay, write, None, state, cu_seqlens, scale, False, keep_state)
    o = o.unflatten(2, (heads, keys, values)).float().sum(3).flatten(3)[..., :value_dim].to(v.dtype)
    if keep_state:
        last = last.unflatten(1, (heads, keys, values)).transpose(3, 4)
        last = last.flatten(4, 5).flatten(2, 3)[:, :, :key_dim, :value_dim]
    return o if skip is None else o + (skip[:, None] * v).to(o.dtype), last


def scan(q, k, v, decay, write, skip, state, cu_seqlens, scale, delta, keep_state):
    """The recurrence with gradients; the last states only if `keep_state`."""
    q, k, v = autocast(q.device.type, q, k, v)
    if q.dtype == torch.float64:
        from . import _float64

        return _float64.scan(q, k, v, decay, write, skip, state, cu_seqlens, scale, delta)
    check(q=q, k=k, v=v, g=decay, beta=write, D=skip, initial_state=state)
    if q.is_cuda and not delta and max(q.shape[3], v.shape[3]) > WIDEST:
        return split_scan(_scan, q, k, v, decay, write, skip, state, cu_seqlens, scale, keep_state)
    return _scan(q, k, v, decay, write, skip, state, cu_seqlens, scale, delta, keep_state)
