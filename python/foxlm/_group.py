"""Forgetting attention over a sequence that is sharded over the ranks of a process group (context parallelism).

Every rank has a contiguous chunk of the sequence. Ranks agree on shapes and options first, so that a mistake on one of
them is an error on all. Then they exchange sums of gates, from which all know what travels (`_group_plan.py`), and post
it (`_group_exchange.py`). Queries that see none of the received keys are computed meanwhile; those at the beginning of
the chunk after the keys have come. Both are calls of the same op on a part of the queries.
"""

from __future__ import annotations

import hashlib
import struct
from typing import NamedTuple

import torch

from . import _checks, _group_exchange, _torch
from ._arrays import is_tensor
from ._group_plan import Plan, Sequences, report, report_size
from ._group_wire import Wire, process_group

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Traffic(NamedTuple):
    """Bytes of keys, values and log gates that this rank has sent in forward passes, and those of a full exchange."""

    sent: int
    full: int


_traffic = Traffic(0, 0)


def traffic(reset: bool = False) -> Traffic:
    """Bytes that sharded attention has sent to later ranks since the start of the process, or since the last reset."""
    global _traffic
    now = _traffic
    if reset:
        _traffic = Traffic(0, 0)
    return now


def size(group):
    """Number of ranks; an error if this is not a process group, or not one of this process."""
    try:
        ranks = torch.distributed.get_world_size(process_group(group))
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        kind = type(group).__name__
        raise ValueError(f"group is a {kind}; it must be a process group, or a DeviceMesh of one dimension") from error
    if ranks < 1:
        raise ValueError("this process is not a rank of the group; make the call on the ranks of the group alone")
    return ranks


def _as_int(number):
    return 0 if number is None else struct.unpack("<q", struct.pack("<d", float(number)))[0]


def _as_float(number):
    return struct.unpack("<d", struct.pack("<q", number))[0] if number else None


def digest(values):
    """A number that stands for a list of integers, or 0 for None."""
    if values is None:
        return 0
    return int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:7], "little") + 1


def _dtype(code):
    return "missing" if code < 0 else str(_DTYPES[code]).removeprefix("torch.")


_same = lambda x: x
_given = lambda x: "given" if x else "missing"
# What ranks must agree on, in the order of the description: its name, and how a value is printed.
_FIELDS = (
    ("the type of q", _dtype), ("the type of k", _dtype), ("the type of v", _dtype), ("the type of log_fgate", _dtype),
    ("the batch size", _same), ("the number of query heads", _same), ("the number of key heads", _same),
    ("the head dim", _same), ("the head dim of values", _same), ("window", lambda x: x or None),
    ("sm_scale", _as_float), ("log_tolerance", _as_float), ("adaptive_threshold", _given), ("sink_bias", _given),
    ("cu_seqlens", None), ("seq_start", None),
    ("the set of operands with gradients", lambda x: f"{x:03b} (k, v, gates)"),
)  # fmt: skip


class _Call:
    """The checked arguments of one rank, time before heads."""

    def __init__(self, q, k, v, log_fgate, head_first, options):
        _checks.tensors(q=q, k=k, v=v, log_fgate=log_fgate, **{n: options[n] for n in _TENSORS})
        _checks.attention_shapes(q, k, v, log_fgate, head_first)
        if not options["causal"]:
            raise ValueError("causal is False with a group; ranks send keys to later ranks only, so use causal=True")
        tolerance, threshold = options["log_tolerance"], options["adaptive_threshold"]
        starts, ends, window = options["seq_start"], options["cu_seqlens"], options["window"]
        _checks.attention_options(q, k, head_first, starts, ends, window, tolerance, threshold)
        if head_first:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            log_fgate = None if log_fgate is None else log_fgate.transpose(1, 2)
        if q.shape[1] != k.shape[1]:
            counts = f"{q.shape[1]} queries and {k.shape[1]} keys"
            raise ValueError(f"{counts} with a group; a rank needs a key for each query")
        if q.shape[1] == 0:
            raise ValueError("a rank without tokens; every rank of the group needs one or more")
        self.q, self.k, self.v = _torch.autocast(q.device.type, q, k, v)
        self.gates, self.sink = log_fgate, options["sink_bias"]
        if self.sink is not None and list(self.sink.shape) != [self.q.shape[2]]:
            shape = list(self.sink.shape)
            raise ValueError(f"sink_bias has shape {shape}, expected {[self.q.shape[2]]}: one for each query head")
        if self.q.dtype != torch.float64:
            _torch.check(q=self.q, k=self.k, v=self.v, log_fgate=log_fgate, sink_bias=self.sink)
        self.scale = q.shape[3] ** -0.5 if options["sm_scale"] is None else float(options["sm_scale"])
        self.window = window
        self.tolerance = -10.0 if isinstance(threshold, str) else tolerance
        self.threshold = None if isinstance(threshold, str) else threshold
        self.starts = None if starts is None else _checks._integers("seq_start", starts)
        self.ends = None if ends is None else _checks._integers("cu_seqlens", ends)

    def operands(self):
        return [x for x in (self.k, self.v, self.gates) if x is not None]

    def description(self):
        """What other ranks must know to check that they can compute together."""
        code = lambda x: -1 if x is None else _DTYPES.index(x.dtype)
        (b, _, h, d), (_, _, hk, dv) = self.q.shape, self.v.shape
        grad = torch.is_grad_enabled()
        needs = [x is not None and x.requires_grad and grad for x in (self.k, self.v, self.gates)]
        return [
            code(self.q), code(self.k), code(self.v), code(self.gates), b, h, hk, d, dv, self.window or 0,
            _as_int(self.scale), _as_int(self.tolerance), int(self.threshold is not None), int(self.sink is not None),
            digest(self.ends), digest(self.starts), sum(int(x) << (2 - n) for n, x in enumerate(needs)),
        ]  # fmt: skip


_TENSORS = ("seq_start", "cu_seqlens", "sink_bias")


def refused_by(rank):
    """The error on ranks whose own arguments are right."""
    return ValueError(f"rank {rank} of the group refused its arguments; the error on that rank names the argument")


def differs(name, rank):
    """The error for an argument about the whole sequence."""
    return ValueError(f"{name} on rank {rank} differs from that on rank 0; give that of the whole sequence")


def _agree(wire, description, length):
    """The lengths of all ranks, where they agree on everything else; the same error on all where they do not. A rank
    whose own arguments are wrong takes part with no description."""
    own = [0] * (len(_FIELDS) + 2) if description is None else [1, length, *description]
    every = wire.gather(torch.tensor(own, dtype=torch.int64)).tolist()
    if description is None:
        return None
    for rank, (valid, *_) in enumerate(every):
        if not valid:
            raise refused_by(rank)
    for n, (name, show) in enumerate(_FIELDS, 2):
        for rank, values in enumerate(every):
            if values[n] != every[0][n]:
                if show is None:
                    raise differs(name, rank)
                here, there = show(values[n]), show(every[0][n])
                raise ValueError(f"{name} is {here} on rank {rank}, but {there} on rank 0; ranks of a group must agree")
    return [values[1] for values in every]


def _sequences(call, lengths):
    total, held = sum(lengths), " + ".join(map(str, lengths))
    starts, ends = call.starts, call.ends
    if ends is not None and (ends[0] != 0 or ends[-1] != total or any(a > b for a, b in zip(ends, ends[1:]))):
        raise ValueError(
            f"cu_seqlens is {ends}; it must start at 0, never fall, and end at {total}, "
            f"the tokens of all ranks ({held})"
        )
    if starts is not None and any(not 0 <= start <= total for start in starts):
        raise ValueError(f"seq_start is {starts}; each must be from 0 to {total}, the tokens of all ranks ({held})")
    return Sequences(call.q.shape[0], lengths, starts, ends)


def _plan(wire, call, sequences):
    (_, _, h, _), hk = call.q.shape, call.k.shape[2]
    if call.gates is None:
        return Plan(sequences, wire.rank, h, hk, call.window)
    own = report(call.q, call.k, call.gates, call.threshold, sequences, wire.rank)
    most = report_size(max(sequences.lengths), sequences.batch, h, hk)
    reports = wire.gather(torch.nn.functional.pad(own, (0, most - own.numel())))
    wide = call.q.dtype == torch.float64
    return Plan(sequences, wire.rank, h, hk, call.window, reports, call.scale, call.tolerance, wide)


@torch.compiler.disable
def attention(q, k, v, log_fgate, group, head_first, **options):
    """As `foxlm.forgetting_attention` with a group of more than one rank: the output and the log sums."""
    group = process_group(group)
    wire = Wire(group, q.device if is_tensor(q) else torch.device("cpu"))
    try:
        call = _Call(q, k, v, log_fgate, head_first, options)
        description = call.description()
    except Exception:
        _agree(wire, None, 0)
        raise
    lengths = _agree(wire, description, call.q.shape[1])
    sequences = _sequences(call, lengths)
    plan = _plan(wire, call, sequences)
    exchange = _group_exchange.Exchange(wire, plan, call.operands())
    _count(exchange, plan, call)
    o, lse = _compute(call, plan, exchange)
    return (o.transpose(1, 2), lse.transpose(1, 2)) if head_first else (o, lse)


def _count(exchange, plan, call):
    global _traffic
    each = call.k.shape[2] * (call.k.shape[3] * call.k.element_size() + call.v.shape[3] * call.v.element_size())
    each += 0 if call.gates is None else call.gates.shape[2] * call.gates.element_size()
    rows = sum(plan.full_rows(plan.rank, rank) for rank in range(plan.rank + 1, plan.size))
    _traffic = Traffic(_traffic.sent + exchange.bytes_sent(), _traffic.full + rows * each)


def _compute(call, plan, exchange):
    """Local queries first, then those that need received keys."""
    sequences, rank, time = plan.sequences, plan.rank, call.q.shape[1]
    here = sequences.offsets[rank]
    _, end = sequences.crossing(rank)
    local = _group_exchange.post(exchange, call.operands())
    split = min(plan.boundary(), end) if exchange.received else 0
    parts = []
    if end < time:
        # Sequences that begin at this rank; the last may continue at the next.
        ends = [0, *[x - here - end for x in call.ends if here + end < x < here + time], time - end]
        parts.append(_part(call, local, slice(end, time), end, time, ends=ends))
    if split < end:
        starts = _local(call.starts, here, end)
        parts.append(_part(call, local, slice(split, end), 0, end, _pruning(call, plan), starts))
    if exchange.received:
        received = _group_exchange.wait(exchange, local)
        joined = [torch.cat((x, y[:, :split]), 1) for x, y in zip(received, local)]
        keys = exchange.received + split
        starts = _local(call.starts, here - exchange.received, keys)
        parts.append(_part(call, joined, slice(0, split), 0, keys, _pruning(call, plan), starts))
    else:
        exchange.finish()
    o, lse = zip(*reversed(parts))
    return torch.cat(o, 1), torch.cat(lse, 1)


def _local(starts, before, keys):
    return None if starts is None else torch.tensor([min(max(start - before, 0), keys) for start in starts])


def _pruning(call, plan):
    """The threshold of the whole sequence, where a part of it would give another one."""
    if plan.rank == 0 or call.gates is None or (call.tolerance is None and call.threshold is None):
        return {"log_tolerance": call.tolerance, "adaptive_threshold": call.threshold}
    return {"adaptive_threshold": plan.thresholds[plan.rank].to(call.q.device, torch.float32)}


def _part(call, operands, queries, first, last, pruning=None, starts=None, ends=None):
    """The op for some queries, and keys from `first` to `last`."""
    from ._attention import forgetting_attention

    k, v, *gates = (x[:, first:last] for x in operands)
    if pruning is None:
        pruning = {"log_tolerance": call.tolerance, "adaptive_threshold": call.threshold}
    return forgetting_attention(
        call.q[:, queries], k, v, gates[0] if gates else None, seq_start=starts, sm_scale=call.scale,
        cu_seqlens=None if ends is None else torch.tensor(ends), window=call.window, sink_bias=call.sink,
        return_lse=True, **pruning,
    )  # fmt: skip
