"""A model on sequences that are sharded over the ranks of a process group.

Every rank has a contiguous chunk of each row. Attention gets the keys that it needs from earlier ranks
(`foxlm.forgetting_attention(..., group=group)`), the token shift the last hidden state of the rank before, the loss the
first labels of the rank after.
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .._group import differs, digest, refused_by, size
from .._group_wire import Wire, pack, process_group, unpack
from .rows import WHOLE, Rows


class Shard:
    """The chunk of this rank in one forward pass."""

    def __init__(self, wire, lengths):
        self.wire, self.group = wire, wire.group
        self.offset, self.total = sum(lengths[: wire.rank]), sum(lengths)

    def previous_row(self, x):
        """The last row of the rank before `[B, 1, D]`, with gradients, for `x` `[B, T, D]`; zeros on the first rank."""
        return _PreviousRow.apply(self.wire, x[:, -1:])


class _PreviousRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, wire, last):
        ctx.wire = wire
        return _pass_on(wire, last, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_row):
        return None, _pass_on(ctx.wire, d_row, -1)


def _pass_on(wire, x, step):
    """Sends `x` to the rank `step` further and receives that of the rank `step` before; zeros where there is none."""
    to, origin = wire.rank + step, wire.rank - step
    there = lambda rank: 0 <= rank < wire.size
    message = pack([x])
    pending = wire.post({to: message} if there(to) else {}, {origin: message.numel()} if there(origin) else {})
    received = pending.wait()
    return unpack(received[origin], [(x.shape, x.dtype)], x.device)[0] if origin in received else torch.zeros_like(x)


def group_of(model):
    """The process group of a model, where it has more than one rank; else None."""
    group = getattr(model, "context_group", None)
    return None if group is None or size(group) == 1 else process_group(group)


@torch.compiler.disable
def arrange(group, h, cu_seqlens, refused) -> Rows:
    """As `rows.arrange` for the chunks `h` `[B, T, D]`. `cu_seqlens` are those of the whole sequence; `refused` is a
    sentence where arguments of this rank cannot be used."""
    batch, time = h.shape[:2]
    wire = Wire(group, h.device)
    ends = None if cu_seqlens is None else cu_seqlens.flatten().cpu().long()
    if refused is None and time == 0:
        refused = "a rank without tokens; every rank of the group needs one or more"
    own = [int(refused is None), time, batch, digest(None if ends is None else ends.tolist())]
    every = wire.gather(torch.tensor(own)).tolist()
    if refused is not None:
        raise ValueError(refused)
    for rank, (valid, _, rows, packing) in enumerate(every):
        if not valid:
            raise refused_by(rank)
        if rows != every[0][2]:
            counts = f"rank {rank} has a batch of {rows}, but rank 0 one of {every[0][2]}"
            raise ValueError(f"{counts}; rows must be the same")
        if packing != every[0][3]:
            raise differs("cu_seqlens", rank)
    shard = Shard(wire, [x[1] for x in every])
    fresh = None
    if ends is not None:
        if batch != 1 or len(ends) < 2 or ends[0] != 0 or ends[-1] != shard.total or (ends.diff() < 0).any():
            raise ValueError(
                f"cu_seqlens is {ends.tolist()} for {batch} rows of {shard.total} tokens on all ranks; it must go from "
                "0 to the length of one row of packed sequences"
            )
        fresh = torch.zeros(1, shard.total + 1, dtype=torch.bool)
        fresh[:, ends] = True
        fresh = fresh[:, shard.offset : shard.offset + time].to(h.device)
    positions = torch.arange(shard.offset, shard.offset + time, device=h.device)[None]
    return Rows(WHOLE | {"positions": positions, "cu_seqlens": ends, "fresh": fresh, "shard": shard})


@torch.compiler.disable
def loss(group, logits, labels, shift_labels, items):
    """Cross-entropy of the local labels over the number of labels of all ranks (or `items`), times the number of ranks.
    The mean over the ranks is the loss of the whole sequence; gradients averaged over the ranks are its gradient."""
    wire = Wire(group, logits.device)
    given = labels if shift_labels is None else shift_labels
    reports = wire.gather(torch.cat(((given != -100).sum()[None], given[:, 0])).long())
    count = int(reports[:, 0].sum())
    if shift_labels is None:
        # The first label of a row has no logits before it; the last logits of a chunk have the next rank's first label.
        count -= int((reports[0, 1:] != -100).sum())
        last = wire.rank == wire.size - 1
        following = torch.full_like(labels[:, :1], -100) if last else reports[wire.rank + 1, 1:, None].to(labels)
        shift_labels = torch.cat((labels[:, 1:], following), 1)
    flat, targets = logits.float().flatten(0, 1), shift_labels.flatten().to(logits.device)
    return F.cross_entropy(flat, targets, reduction="sum") * (wire.size / (count if items is None else items))
