"""The ops on NumPy arrays. Arrays are read where they lie; those in float32 and C order are not copied."""

from __future__ import annotations

import numpy as np

from . import _checks, _core
from ._arrays import describe_numpy


def arrays(*given):
    """Arrays of what was given, None for what was not."""
    return [None if x is None else np.asarray(x) for x in given]


def _options(q, k, seq_start, cu_seqlens, scale, causal, window, log_tolerance, threshold):
    """What `_core` calls options, and an array that must be held as long as they are used."""
    n, h = k.shape[1], q.shape[2]
    starts, ends = _checks.segment_lists(seq_start, cu_seqlens, n)
    bounds = None
    if threshold is not None:
        lengths = np.diff(ends) if ends is not None else n - np.asarray(starts or [0] * q.shape[0])
        thresholds = np.broadcast_to(np.asarray(threshold, np.float32), (q.shape[0], h))
        logs = np.log(np.maximum(lengths, 1))[:, None]
        bounds = np.ascontiguousarray(-(logs + thresholds)[None] / 2, dtype=np.float32)
        log_tolerance = 0.0
    described = None if bounds is None else describe_numpy(bounds)
    return (scale, causal, window, log_tolerance, described, starts, ends), bounds


def attention_forward(q, k, v, log_gates, **options):
    """q `[B, M, H, d]`, k `[B, N, Hk, d]`, v `[B, N, Hk, dv]`, log_gates `[B, N, H]`: o `[B, M, H, dv]`, lse `[B, M,
    H]`."""
    o = np.empty((*q.shape[:3], v.shape[3]), q.dtype)
    lse = np.empty(q.shape[:3], np.float32)
    packed, held = _options(q, k, **options)
    gates = None if log_gates is None else describe_numpy(log_gates)
    arrays = [describe_numpy(x) for x in (q, k, v)]
    _core.attention_forward(*arrays, gates, describe_numpy(o), describe_numpy(lse), packed)
    del held
    return o, lse


def attention_backward(d_out, q, k, v, log_gates, o, lse, **options):
    """Gradients of q, k, v and log_gates, each shaped as what it belongs to."""
    made = [np.empty(x.shape, x.dtype) for x in (q, k, v)]
    d_gates = None if log_gates is None else np.empty(log_gates.shape, log_gates.dtype)
    packed, held = _options(q, k, **options)
    gates = None if log_gates is None else describe_numpy(log_gates)
    arrays = [describe_numpy(x) for x in (d_out, q, k, v)]
    gradients = (*[describe_numpy(x) for x in made], None if d_gates is None else describe_numpy(d_gates))
    _core.attention_backward(*arrays, gates, describe_numpy(o), describe_numpy(lse), gradients, packed)
    del held
    return (*made, d_gates)
