"""A direct path to the GPU kernels for plain eager calls.

PyTorch's dispatcher, its autograd key and the argument checks take several times as long as the launches. Where no
transform, mode or tracer is active they are bypassed: everything that follows from shapes, strides, types and options
is cached, and a call is a look-up, an allocation of the results, and the launches. All other calls go through the
registered op. Both paths end in the same launches and give the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor, empty_like
from torch.autograd import forward_ad

from . import _checks, _cuda, _torch

try:
    from torch._C import _are_functorch_transforms_active as _transforms
    from torch._C import _cuda_getCurrentRawStream as _stream
    from torch._C import _cuda_getDevice as _current
    from torch._C import _get_tracing_state as _tracing
    from torch._C import _is_torch_function_mode_enabled as _function_modes
    from torch._C import _len_torch_dispatch_stack as _dispatch_modes

    _possible = True
except ImportError:  # a PyTorch without CUDA, or with other names for these
    _possible = False

_is_cuda = Tensor.is_cuda.__get__
_ordinal = Tensor.get_device
# Names of this module: a call takes a tenth longer when it looks them up in others.
_address = Tensor.data_ptr
_autocasts = torch.is_autocast_enabled
_compiles = torch.compiler.is_compiling
_records = torch.is_grad_enabled
_NUMBER = (float, int, type(None))
# By everything that a kind follows from; cleared when it has grown to this size.
_kinds: dict = {}
_MOST = 1024


def _is_watched():
    """Whether a transform, mode or tracer intercepts ops."""
    return (
        _transforms() or _dispatch_modes() or _function_modes() or _tracing() is not None
        or forward_ad._current_level >= 0
    )  # fmt: skip


def _has_memory(x):
    """Whether this is a plain tensor with storage, not a batched, meta or fake one."""
    try:
        return type(x) is Tensor and x.data_ptr() != 0
    except RuntimeError:
        return False


def _addresses(q, k, v, gates):
    """Where the operands lie; None if the copy engine, which reads 16 bytes at a time, cannot read them there."""
    at = q.data_ptr(), k.data_ptr(), v.data_ptr(), 0 if gates is None else gates.data_ptr()
    return None if (at[0] | at[1] | at[2] | at[3]) % 16 else at


class _Kind:
    """What calls with the same shapes, strides, types and options have in common. Tensors are as the caller has them,
    heads before time with `head_first`."""

    __slots__ = ("call", "head_first", "launch", "options", "square", "strides")

    def __init__(self, call, head_first, options, q, k, v, gates):
        self.call = call
        self.launch = call.core.forward
        self.head_first = head_first
        self.options = options
        # Whether the log sums are shaped as the gates are.
        self.square = gates is not None and q.shape[:3] == gates.shape
        self.strides = q.stride(), k.stride(), v.stride(), None if gates is None else gates.stride()

    def forward(self, where, at, q, bounds, lse):
        """The output; the log sums go to `lse`, if it is there."""
        o = empty_like(q)
        bounds, lse = 0 if bounds is None else _address(bounds), 0 if lse is None else _address(lse)
        self.launch(where, _stream(where), *at, bounds, _address(o), lse)
        return o

    def room_for_sums(self, q, gates):
        """Memory for the log sums, which lie as the queries do."""
        return empty_like(gates) if self.square else empty_like(q.select(3, 0), dtype=torch.float32)

    def backward(self, d_out, q, k, v, o, lse, gates, bounds):
        """Gradients of q, k, v and the gates."""
        where, at = _ordinal(q), _addresses(q, k, v, gates)
        strides = q.stride(), k.stride(), v.stride(), None if gates is None else gates.stride()
        # Hooks may have put what was saved elsewhere, in another order.
        moved = at is None or strides != self.strides or o.stride() != strides[0]
        if moved or torch.is_grad_enabled() or not _has_memory(d_out) or _is_watched() or _current() != where:
            return self.general_backward(d_out, q, k, v, o, lse, gates, bounds)
        if d_out.stride() != strides[0] or d_out.dtype is not q.dtype or d_out.data_ptr() % 16:
            d_out = self.call.arrange(d_out.transpose(1, 2) if self.head_first else d_out)
        dq, dk, dv = empty_like(q), empty_like(k), empty_like(v)
        d_gates = None if gates is None else empty_like(gates)
        self.call.core.backward(
            where, _stream(where), *at, 0 if bounds is None else bounds.data_ptr(), o.data_ptr(), lse.data_ptr(),
            d_out.data_ptr(), dq.data_ptr(), dk.data_ptr(), dv.data_ptr(), 0 if gates is None else d_gates.data_ptr(),
        )  # fmt: skip
        return dq, dk, dv, d_gates

    def general_backward(self, d_out, q, k, v, o, lse, gates, bounds):
        turned = lambda x: x.transpose(1, 2) if self.head_first and x is not None else x
        x = [turned(a) for a in (d_out, q, k, v, o, lse, gates)]
        made = torch.ops.foxlm.attention_backward.default(*x, bounds, None, None, *self.options)
        return *map(turned, made[:3]), None if gates is None else turned(made[3])


class _Attention(torch.autograd.Function):
    """The op with its gradients."""

    @staticmethod
    def forward(ctx, q, k, v, gates, bounds, kind, where, at):
        lse = kind.room_for_sums(q, gates)
        o = kind.forward(where, at, q, bounds, lse)
        ctx.save_for_backward(q, k, v, o, lse, gates, bounds)
        ctx.kind = kind
        return o

    @staticmethod
    def backward(ctx, d_out):
        return *ctx.kind.backward(d_out, *ctx.saved_tensors), None, None, None, None


def _find(q, k, v, gates, head_first, scale, threshold, window, causal, log_tolerance):
    """The kind of such calls; None where operands have to be converted or copied first."""
    _checks.attention_shapes(q, k, v, gates, head_first)
    _checks.attention_options(q, k, head_first, None, None, window, log_tolerance, threshold)
    plain = isinstance(scale, _NUMBER) and isinstance(window, _NUMBER) and isinstance(log_tolerance, _NUMBER)
    if not plain or not isinstance(causal, bool) or q.numel() == 0:
        return None
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    if threshold is not None:
        log_tolerance = -10.0 if isinstance(threshold, str) else 0.0
    options = scale, causal, window, log_tolerance
    x = q, k, v, gates
    turned = [a.transpose(1, 2) if head_first and a is not None else a for a in x]
    _cuda.load_nvrtc()
    call = _cuda.Call(*turned[:3], None, None, *options)
    return _Kind(call, head_first, options, *x) if call.takes(*turned) else None


def attention(q, k, v, gates, head_first, scale, threshold, window, causal, log_tolerance):
    """Forgetting attention, arguments as in `foxlm.forgetting_attention`; None if it has to go the general way."""
    if _compiles() or not _possible or _is_watched():
        return None
    if type(q) is not Tensor or type(k) is not Tensor or type(v) is not Tensor:
        return None
    where = _ordinal(q)
    if not _is_cuda(q) or where != _ordinal(k) or where != _ordinal(v) or where != _current():
        return None
    if gates is not None and (type(gates) is not Tensor or where != _ordinal(gates)):
        return None
    if _autocasts("cuda"):
        q, k, v = _torch.autocast("cuda", q, k, v)
    bounded = threshold is not None and not isinstance(threshold, str)
    # Strides follow from the shape of a contiguous tensor, but for axes of one element.
    key = (
        q.shape, q.is_contiguous() or q.stride(), q.dtype, k.shape, k.is_contiguous() or k.stride(), k.dtype,
        v.shape, v.is_contiguous() or v.stride(), v.dtype,
        None if gates is None else (gates.shape, gates.is_contiguous() or gates.stride(), gates.dtype),
        head_first, scale, bounded or threshold, window, causal, log_tolerance,
    )  # fmt: skip
    try:
        kind = _kinds[key]
    except KeyError:
        if len(_kinds) >= _MOST:
            _kinds.clear()
        kind = _kinds[key] = _find(q, k, v, gates, head_first, scale, threshold, window, causal, log_tolerance)
    except TypeError:  # an unhashable option
        return None
    if kind is None:
        return None
    a, b, c, d = _address(q), _address(k), _address(v), 0 if gates is None else _address(gates)
    if (a | b | c | d) % 16:  # the copy engine reads 16 bytes at a time
        return None
    at, bounds = (a, b, c, d), None
    if bounded:
        heads, time = (1, 2) if head_first else (2, 1)
        bounds = _torch.bounds_of(threshold, q.shape[0], q.shape[heads], k.shape[time], q.device)
    if _records() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (gates is not None and gates.requires_grad)
    ):
        return _Attention.apply(q, k, v, gates, bounds, kind, where, at)
    return kind.forward(where, at, q, bounds, None)
