"""The ops on a GPU: on PyTorch's current stream, results in PyTorch's memory.

The kernels take contiguous tensors, `[B, T, H, d]`, or `[B, H, T, d]` where every query head has a key head: then each
head is passed as a separate sequence. Tensors in one of these layouts are passed without a copy; others are copied.
"""

from __future__ import annotations

import glob
import os

import torch
from torch.nn.functional import pad

from . import _checks, _core, _scan_torch, _torch, _transition_torch

_nvrtc_is_loaded = False


def load_nvrtc():
    """Opens the run-time compiler that came with PyTorch, so that the library finds it by name."""
    global _nvrtc_is_loaded
    if _nvrtc_is_loaded:
        return
    import ctypes

    site = os.path.dirname(os.path.dirname(torch.__file__))
    for name in ("libnvrtc-builtins.so*", "libnvrtc.so*", "libcublasLt.so*"):
        for folder in (f"{site}/nvidia/*/lib", f"{site}/torch/lib"):
            found = [path for path in sorted(glob.glob(f"{folder}/{name}")) if ".alt." not in path]
            if found:
                ctypes.CDLL(found[0], mode=ctypes.RTLD_GLOBAL)
                break
    _nvrtc_is_loaded = True


def _place(x):
    load_nvrtc()
    return x.device.index, torch.cuda.current_stream(x.device).cuda_stream


def _lies_head_first(x):
    return x.transpose(1, 2).is_contiguous()


class _Layout:
    """The order in which all tensors of a call lie: heads before time, or after."""

    def __init__(self, q, k, v, cu_seqlens):
        alike = q.shape[2] == k.shape[2] and cu_seqlens is None
        head_first = alike and all(_lies_head_first(x) for x in (q, k, v))
        self.head_first = head_first and not all(x.is_contiguous() for x in (q, k, v))

    def lies(self, x):
        return _lies_head_first(x) if self.head_first else x.is_contiguous()

    def fits(self, x):
        # The copy engine reads 16 bytes at a time.
        return self.lies(x) and x.data_ptr() % 16 == 0

    def arrange(self, x, dtype, width=None):
        """`x` in this order and type, heads filled up with zeros to `width`; itself where nothing has to be done."""
        if x is None:
            return None
        x = x.to(dtype)
        if width is not None and x.shape[3] != width:
            x = pad(x, (0, width - x.shape[3]))
        if self.fits(x):
            return x
        if self.head_first:
            return x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
        return x.clone(memory_format=torch.contiguous_format)

    def target(self, out, dtype, width=None):
        """Where to compute what goes to `out`: there, if it fits."""
        if out.dtype == dtype and (width is None or out.shape[3] == width) and self.fits(out):
            return out
        shape = list(out.shape)
        if width is not None:
            shape[3] = width
        if self.head_first:
            shape[1], shape[2] = shape[2], shape[1]
            return out.new_empty(shape, dtype=dtype).transpose(1, 2)
        return out.new_empty(shape, dtype=dtype)


def _finish(out, computed):
    if out is not computed:
        out.copy_(computed[..., : out.shape[-1]] if out.ndim == 4 else computed)


def _address(x):
    return 0 if x is None else x.data_ptr()


class Call:
    """A call of attention: the order of its tensors, and the library's object for such calls."""

    __slots__ = ("core", "dtype", "layout", "width")

    def __init__(self, q, k, v, seq_start, cu_seqlens, *options):
        (b, m, h, d), (_, n, hk, dv) = q.shape, v.shape
        # float16 is computed in float32.
        self.dtype = torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32
        self.width = (max(d, dv) + 7) // 8 * 8
        self.layout = _Layout(q, k, v, cu_seqlens)
        wide, head_first = self.dtype == torch.float32, self.layout.head_first
        dims = [b, m, n, h, hk, self.width]
        lists = _checks.segment_lists(seq_start, cu_seqlens, n)
        self.core = _core.CudaAttention(dims, wide, head_first, *options, *lists)

    def takes(self, q, k, v, gates):
        """Whether operands that lie like these can be passed as they are, but for their addresses."""
        fitting = all(x.dtype == self.dtype and x.shape[3] == self.width and self.layout.lies(x) for x in (q, k, v))
        return fitting and (gates is None or (gates.dtype == torch.float32 and self.layout.lies(gates)))

    def arrange(self, x):
        return self.layout.arrange(x, self.dtype, self.width)

    def target(self, out):
        return self.layout.target(out, self.dtype, self.width)

    def arrange_gates(self, x):
        return self.layout.arrange(x, torch.float32)

    def target_gates(self, out):
        return self.layout.target(out, torch.float32)


def _attention(q, k, v, log_gates, bounds, *options):
    o, lse = _torch.results(q, k, v)
    if q.numel() == 0:
        return o, lse
    call = Call(q, k, v, *options)
    x = (*[call.arrange(a) for a in (q, k, v)], call.arrange_gates(log_gates), bounds)
    made, sums = call.target(o), call.target_gates(lse)
    call.core.forward(*_place(q), *[_address(a) for a in (*x, made, sums)])
    _finish(o, made)
    _finish(lse, sums)
    return o, lse


def _attention_backward(d_out, q, k, v, o, lse, log_gates, bounds, *options):
    made = _torch.gradient_room(d_out, q, k, v, o, lse, log_gates)
    if q.numel() == 0:
        for x in made:
            x.zero_()
        return made
    call = Call(q, k, v, *options)
    x = (*[call.arrange(a) for a in (q, k, v)], call.arrange_gates(log_gates), bounds)
    saved = call.arrange(o), call.arrange_gates(lse), call.arrange(d_out)
    targets = [call.target(a) for a in made[:3]]
    targets.append(None if log_gates is None else call.target_gates(made[3]))
    call.core.backward(*_place(q), *[_address(a) for a in (*x, *saved, *targets)])
    for out, computed in zip(made, targets):
        if computed is not None:
            _finish(out, computed)
    return made


def _scan_call(q, k, v, decay, write, skip, state, cu_seqlens, scale, delta):
    dtype = torch.bfloat16 if v.dtype == torch.bfloat16 else torch.float32
    x = [a.to(dtype).contiguous() for a in (q, k, v)]
    extras = [None if a is None else a.float().contiguous() for a in (decay, write, skip, state)]
    shape = (tuple(q.shape), tuple(v.shape), decay is not None and decay.shape[3] != 1, dtype == torch.float32)
    ends = _checks.segment_lists(None, cu_seqlens, q.shape[1])[1]
    return dtype, x + extras, shape, (scale, delta, ends)


def _scan(q, k, v, decay, write, skip, state, cu_seqlens, scale, delta, keep_state):
    o, last = _scan_torch.results(q, k, v, decay, write, skip, state, cu_seqlens, scale, delta, keep_state)
    dtype, held, shape, packed = _scan_call(q, k, v, decay, write, skip, state, cu_seqlens, scale, delta)
    made = o if o.dtype == dtype and o.is_contiguous() else o.new_empty(o.shape, dtype=dtype)
    addresses = [made.data_ptr(), last.data_ptr() if keep_state else 0]
    _core.cuda_scan_forward(_place(q), [_address(a) for a in held], addresses, shape, packed)
    _finish(o, made)
    return o, last


def _scan_backward(d_out, d_last, q, k, v, decay, write, skip, state, cu_seqlens, scale, delta):
    made = _scan_torch.gradient_room(d_out, d_last, q, k, v, decay, write, skip, state)
    dtype, held, shape, packed = _scan_call(q, k, v, decay, write, skip, state, cu_seqlens, scale, delta)
    d_out = d_out.to(dtype).contiguous()
    d_last = None if d_last is None else d_last.float().contiguous()
    targets = []
    for n, (out, x) in enumerate(zip(made, (q, k, v, decay, write, skip, state))):
        kind = dtype if n < 3 else torch.float32
        fits = x is not None and out.dtype == kind and out.is_contiguous()
        targets.append(None if x is None else out if fits else out.new_empty(out.shape, dtype=kind))
    gradients = [_address(a) for a in targets]
    given = [d_out.data_ptr(), _address(d_last)]
    _core.cuda_scan_backward(_place(q), given, [_address(a) for a in held], gradients, shape, packed)
    for out, computed in zip(made, targets):
        if computed is not None and computed is not out:
            out.copy_(computed)
    return made


class _Transition:
    """A call of PaTH or Wall attention: its operands in the kernels' layout, `[B, T, H, d]` with d a multiple of 8."""

    def __init__(self, q, k, v, transition, log_gates, *options):
        self.dtype = torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32
        self.width = (max(q.shape[3], v.shape[3]) + 7) // 8 * 8
        operands = *[self.arrange(x, self.dtype) for x in (q, k, v)], self.arrange(transition, torch.float32)
        self.held = *operands, None if log_gates is None else log_gates.float().contiguous()
        self.shape = (tuple(operands[0].shape), tuple(operands[1].shape), self.dtype == torch.float32)
        self.options = _transition_torch.packed(q, *options)

    def arrange(self, x, dtype):
        """`x` contiguous and aligned, in this type, heads filled up with zeros; itself where it is so already."""
        x = x.to(dtype)
        # pad() copies also where there is nothing to add.
        x = (x if x.shape[3] == self.width else pad(x, (0, self.width - x.shape[3]))).contiguous()
        # The copy engine reads 16 bytes at a time.
        return x.clone() if x.data_ptr() % 16 else x

    def target(self, out, dtype):
        """Where to compute what goes to `out`: there, if it fits."""
        width = self.width if out.ndim == 4 else out.shape[-1]
        if out.dtype == dtype and out.shape[-1] == width and out.is_contiguous():
            return out
        return out.new_empty((*out.shape[:-1], width), dtype=dtype)

    def addresses(self):
        return [_address(x) for x in self.held]


def _transition(q, k, v, transition, log_gates, *options):
    o, lse = _transition_torch.results(q, k, v)
    if q.numel() == 0:
        return o, lse
    call = _Transition(q, k, v, transition, log_gates, *options)
    made = call.target(o, call.dtype), call.target(lse, torch.float32)
    results = [x.data_ptr() for x in made]
    _core.cuda_transition_forward(_place(q), call.addresses(), results, call.shape, call.options)
    for out, computed in zip((o, lse), made):
        _finish(out, computed)
    return o, lse


def _transition_backward(d_out, q, k, v, transition, o, lse, log_gates, *options):
    made = _transition_torch.gradient_room(d_out, q, k, v, transition, o, lse, log_gates)
    if q.numel() == 0:
        return tuple(x.zero_() for x in made)
    call = _Transition(q, k, v, transition, log_gates, *options)
    saved = call.arrange(d_out, call.dtype), call.arrange(o, call.dtype), lse.float().contiguous()
    targets = [call.target(x, torch.float32 if n > 2 else call.dtype) for n, x in enumerate(made)]
    given = [x.data_ptr() for x in saved]
    gradients = [0 if log_gates is None and n == 4 else x.data_ptr() for n, x in enumerate(targets)]
    _core.cuda_transition_backward(_place(q), given, call.addresses(), gradients, call.shape, call.options)
    for out, computed in zip(made, targets):
        _finish(out, computed)
    return made


def _on_its_device(function):
    """The library makes the GPU of its operands the current one; afterwards it is PyTorch's choice again."""

    def call(first, *rest):
        with torch.cuda.device(first.device):
            return function(first, *rest)

    return call


for _name, _function in (
    ("attention", _attention),
    ("attention_backward", _attention_backward),
    ("scan", _scan),
    ("scan_backward", _scan_backward),
    ("transition_attention", _transition),
    ("transition_attention_backward", _transition_backward),
):
    _torch.LIBRARY.impl(_name, _on_its_device(_function), "CUDA")
