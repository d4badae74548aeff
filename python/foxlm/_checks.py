"""Complaints about arguments, in one sentence each. Works on shapes alone, so that arrays of any library will do."""

from __future__ import annotations

from ._arrays import is_tensor
from ._extras import require


def tensors(**operands) -> None:
    """An error unless all that are given are tensors of PyTorch."""
    for name, x in operands.items():
        if x is not None and not is_tensor(x):
            require("torch", "torch", "this op")
            raise ValueError(f"{name} is a {type(x).__name__}; it must be a tensor of PyTorch")


def no_more_arguments(op: str, kwargs: dict) -> None:
    """An error for keyword arguments that an op does not have: they would be ignored silently."""
    for name in kwargs:
        raise TypeError(f"{op} has no argument {name}")


def attention_shapes(q, k, v, log_fgate, head_first: bool) -> None:
    """An error unless the operands fit each other."""
    axes = "[batch, heads, time, dim]" if head_first else "[batch, time, heads, dim]"
    for name, x in (("q", q), ("k", k), ("v", v)):
        shape = [] if x is None else list(x.shape)
        if len(shape) != 4:
            raise ValueError(f"{name} has shape {shape}; it must be {axes}")
    time, head = (2, 1) if head_first else (1, 2)
    b, m, h, d = q.shape[0], q.shape[time], q.shape[head], q.shape[3]
    n, hk = k.shape[time], k.shape[head]
    if k.shape[0] != b or v.shape[0] != b:
        raise ValueError(f"q has batch {b}, k {k.shape[0]} and v {v.shape[0]}; they must be equal")
    if v.shape[time] != n or v.shape[head] != hk:
        raise ValueError(f"k has shape {list(k.shape)} and v {list(v.shape)}; they must have as many keys and heads")
    if k.shape[3] != d:
        raise ValueError(f"q has head dim {d} and k {k.shape[3]}; they must be equal")
    for name, width in (("q", d), ("v", v.shape[3])):
        if not 1 <= width <= 256:
            raise ValueError(f"{name} has head dim {width}; it must be from 1 to 256")
    if hk == 0 or h % hk != 0:
        raise ValueError(f"{h} query heads do not share {hk} key heads; the first must be a multiple of the second")
    if m > n:
        raise ValueError(f"{m} queries, but only {n} keys; there must be at least as many keys as queries")
    if log_fgate is not None:
        expected = [b, h, n] if head_first else [b, n, h]
        if list(log_fgate.shape) != expected:
            raise ValueError(
                f"log_fgate has shape {list(log_fgate.shape)}, expected {expected}: "
                "one gate for each key and query head"
            )


def attention_options(q, k, head_first, seq_start, cu_seqlens, window, log_tolerance, adaptive_threshold) -> None:
    """An error unless the options fit the operands and each other."""
    b = q.shape[0]
    m, n = (q.shape[2], k.shape[2]) if head_first else (q.shape[1], k.shape[1])
    if seq_start is not None and list(seq_start.shape) != [b]:
        raise ValueError(f"seq_start has shape {list(seq_start.shape)}, expected [{b}]")
    if cu_seqlens is not None:
        if seq_start is not None:
            raise ValueError("both seq_start and cu_seqlens are given; packed sequences have no padding")
        if b != 1 or m != n:
            raise ValueError(
                f"cu_seqlens with batch {b}, {m} queries and {n} keys; "
                "packed sequences need batch 1 and as many queries as keys"
            )
        packed_shape(cu_seqlens)
    if isinstance(window, (float, str)):
        raise ValueError(f"window is {window!r}; it must be an integer")
    if window is not None and window < 1:
        raise ValueError(f"a window of {window} keys; use 1 or more, or None for all")
    if log_tolerance is not None and adaptive_threshold is not None:
        raise ValueError("both log_tolerance and adaptive_threshold are given; they are two ways to say the same")
    if log_tolerance is not None and not log_tolerance <= 0:
        raise ValueError(f"log_tolerance is {log_tolerance}, but must be at most 0")
    if isinstance(adaptive_threshold, str) and adaptive_threshold != "auto":
        raise ValueError(
            f'adaptive_threshold is "{adaptive_threshold}"; it must be "auto", a number or an array [B, H]'
        )
    # What torch.compile puts in the place of a number has no attributes to ask for.
    plain = adaptive_threshold is None or isinstance(adaptive_threshold, (int, float, str))
    shape = [] if plain else list(getattr(adaptive_threshold, "shape", ()))
    h = q.shape[1] if head_first else q.shape[2]
    if len(shape) > 2 or any(n not in (1, whole) for n, whole in zip(shape[::-1], (h, b))):
        raise ValueError(f"adaptive_threshold has shape {shape}; it must be a number or an array {[b, h]}")


def causal_attention(q, k, v, cu_seqlens, window, widest: int) -> None:
    """An error unless these are operands of causal attention with as many queries as keys, heads up to `widest`."""
    attention_shapes(q, k, v, None, False)
    if q.shape[1] != k.shape[1]:
        raise ValueError(f"{q.shape[1]} queries, but {k.shape[1]} keys; there must be as many")
    for name, x in (("q", q), ("v", v)):
        if x.shape[3] > widest:
            raise ValueError(f"{name} has head dim {x.shape[3]}; it must be from 1 to {widest}")
    attention_options(q, k, False, None, cu_seqlens, window, None, None)


def shaped(name, x, expected) -> None:
    """An error unless `x` is absent or has this shape."""
    if x is not None and list(x.shape) != list(expected):
        raise ValueError(f"{name} has shape {list(x.shape)}, expected {list(expected)}")


def packed_shape(cu_seqlens) -> None:
    """An error unless these may be the ends of packed sequences."""
    if len(cu_seqlens.shape) != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens has shape {list(cu_seqlens.shape)}; it must hold 0 and the end of each sequence")


def _integers(name, x) -> list[int]:
    values = x.tolist()
    if any(type(value) is not int for value in values):
        raise ValueError(f"{name} is {values}; it must hold integers")
    return values


def segment_lists(seq_start, cu_seqlens, n: int):
    """Host lists of `seq_start` and `cu_seqlens`, checked against `n` keys."""
    starts = None if seq_start is None else _integers("seq_start", seq_start)
    if starts is not None and any(not 0 <= s <= n for s in starts):
        raise ValueError(f"seq_start is {starts}; each must be from 0 to {n}")
    ends = None if cu_seqlens is None else _integers("cu_seqlens", cu_seqlens)
    if ends is not None and (ends[0] != 0 or ends[-1] != n or any(a > b for a, b in zip(ends, ends[1:]))):
        raise ValueError(f"cu_seqlens is {ends}; it must start at 0, never fall, and end at {n}")
    return starts, ends
