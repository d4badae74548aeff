"""Attention sinks: a key for each head whose logit is given and which has no value.

The sink changes only the denominator of the softmax: with `lse` the log of the denominators without it, outputs are
multiplied by `sigmoid(lse - sink)` and the log becomes `logaddexp(lse, sink)`. The backward kernels compute
probabilities from logits and these logs, so they need nothing but the new outputs and logs.
"""

from __future__ import annotations

import torch

from ._torch import attention_backward


class _WithSink(torch.autograd.Function):
    """`(o, lse)` of attention with a sink `[H]`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q, k, v, log_gates, bounds, seq_start, cu_seqlens, sink, *options):
        o, lse = torch.ops.foxlm.attention.default(q, k, v, log_gates, bounds, seq_start, cu_seqlens, *options)
        sink = sink.to(lse.dtype)
        o = (o.to(lse.dtype) * torch.sigmoid(lse - sink)[..., None]).to(o.dtype)
        return o, torch.logaddexp(lse, sink)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:8], *output)
        ctx.options = inputs[8:]
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, d_out, _):
        if d_out is None:
            return (None,) * (8 + len(ctx.options))
        q, k, v, log_gates, *tensors, sink, o, lse = ctx.saved_tensors
        grads = attention_backward(d_out, q, k, v, o, lse, log_gates, *tensors, *ctx.options)
        weight = torch.exp(sink.to(lse.dtype) - lse)
        d_sink = -(weight * (d_out.to(lse.dtype) * o.to(lse.dtype)).sum(-1)).sum((0, 1)).to(sink.dtype)
        d_gates = None if log_gates is None else grads[3]
        return *grads[:3], d_gates, None, None, None, d_sink, *[None] * len(ctx.options)


def attention(q, k, v, log_gates, bounds, seq_start, cu_seqlens, sink, *options):
    """As the op `foxlm::attention`, with a sink `[H]`."""
    if list(sink.shape) != [q.shape[2]]:
        raise ValueError(f"sink_bias has shape {list(sink.shape)}, expected {[q.shape[2]]}: one for each query head")
    return _WithSink.apply(q, k, v, log_gates, bounds, seq_start, cu_seqlens, sink, *options)
