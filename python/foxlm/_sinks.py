"""Attention sinks: a key for each head whose logit is given and which has no value.

The sink changes only the denominator of the softmax: with `lse` the log of the denominators without it, outputs are
multiplied by `sigmoid(lse - sink)` and the log becomes `logaddexp(lse, sink)`. The backward kernels compute
probabilities from logits and these logs, so they need nothing but the new outputs and logs.
"""

from __future__ import annotations

import torch


def with_sinks(op, backward, operands, tensors):
    """As `op`, which returns `(o, lse)`, with a sink `[H]` as the first argument.

    `op` takes `operands` tensors, log gates, further tensors up to `tensors` in all, and options; `backward` takes the
    gradient of the output, the operands, `o`, `lse`, and the rest, and returns gradients of the operands and the gates.
    """

    # The compiler of PyTorch 2.7 cannot look into functions that have a `setup_context`.
    @torch.compiler.allow_in_graph
    class WithSink(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(sink, *arguments):
            o, lse = op(*arguments)
            sink = sink.to(lse.dtype)
            o = (o.to(lse.dtype) * torch.sigmoid(lse - sink)[..., None]).to(o.dtype)
            return o, torch.logaddexp(lse, sink)

        @staticmethod
        def setup_context(ctx, inputs, output):
            sink, *arguments = inputs
            ctx.save_for_backward(*arguments[:operands], *output, *arguments[operands:tensors], sink)
            ctx.options = arguments[tensors:]
            ctx.mark_non_differentiable(output[1])
            ctx.set_materialize_grads(False)

        @staticmethod
        def backward(ctx, d_out, _):
            nothing = [None] * (tensors + len(ctx.options) - operands - 1)
            if d_out is None:
                return None, *[None] * (operands + 1), *nothing
            *saved, sink = ctx.saved_tensors
            o, lse, log_gates = saved[operands : operands + 3]
            grads = backward(d_out, *saved, *ctx.options)
            weight = torch.exp(sink.to(lse.dtype) - lse)
            d_sink = -(weight * (d_out.to(lse.dtype) * o.to(lse.dtype)).sum(-1)).sum((0, 1)).to(sink.dtype)
            return d_sink, *grads[:operands], None if log_gates is None else grads[operands], *nothing

    def call(sink, q, *arguments):
        if list(sink.shape) != [q.shape[2]]:
            expected = f"expected {[q.shape[2]]}: one for each query head"
            raise ValueError(f"sink_bias has shape {list(sink.shape)}, {expected}")
        return WithSink.apply(sink, q, *arguments)

    return call
