"""Keys, values and log gates of earlier ranks, with gradients that return to the rank of the keys.

Messages are posted by `post` and awaited by `wait`; what is computed between the two overlaps with the transfer. In the
backward pass the order is reversed: gradients of received keys are sent first, those of local keys are computed while
they travel, and sums over ranks are formed last, in float32 and in the order of the ranks.
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from ._group_wire import message_size, pack, unpack


class _Rows:
    """The rows of one rank that another needs: those from `starts` `[B, H_k]` on, and the gates of all heads from the
    first of them on."""

    def __init__(self, starts, length):
        self.first = int(starts.min())
        self.rows = length - self.first
        self.mask = torch.arange(length)[None, :, None] >= starts[:, None]
        self.count = int(self.mask.sum())

    def index(self, device, before=0, after=0):
        """Indices of the rows `[count]` in a tensor `[B, before + length + after, H_k]`, flattened."""
        mask = torch.nn.functional.pad(self.mask, (0, 0, before, after))
        return mask.flatten().nonzero().flatten().to(device, non_blocking=True)


class Exchange:
    """What travels for one call. `operands` are keys, values and, where there are any, gates of this rank."""

    def __init__(self, wire, plan, operands):
        self.wire, self.rank = wire, wire.rank
        self.kinds = [(x.shape, x.dtype) for x in operands]
        self.device = operands[0].device
        lengths, offsets = plan.sequences.lengths, plan.sequences.offsets
        pair = lambda owner, needer: _Rows(plan.kept(owner, needer), lengths[owner])
        some = lambda pairs: {rank: rows for rank, rows in pairs.items() if rows.rows}
        self.given = some({rank: pair(self.rank, rank) for rank in range(self.rank + 1, wire.size)})
        self.taken = some({rank: pair(rank, self.rank) for rank in range(self.rank)})
        # Received rows lie in front of the local ones, without a gap.
        begins = [offsets[rank] + rows.first for rank, rows in self.taken.items()]
        self.received = offsets[self.rank] - min(begins, default=offsets[self.rank])
        begin = offsets[self.rank] - self.received
        self.places = {rank: offsets[rank] - begin for rank in self.taken}
        self.pending = None

    def parts(self, rows, kinds=None):
        """Shapes and types of the tensors of a message."""
        for n, (shape, dtype) in enumerate(self.kinds):
            if kinds is None or n in kinds:
                yield ((rows.count, shape[3]) if n < 2 else (shape[0], rows.rows, shape[2])), dtype

    def bytes_sent(self):
        """Bytes of the messages of the forward pass that this rank sends."""
        return sum(message_size(self.parts(rows)) for rows in self.given.values())

    def send(self, operands):
        """Posts the messages of the forward pass."""
        sends = {}
        for rank, rows in self.given.items():
            index = rows.index(self.device)
            chosen = [x.reshape(-1, x.shape[3]).index_select(0, index) for x in operands[:2]]
            sends[rank] = pack(chosen + [x[:, rows.first :] for x in operands[2:]])
        self.pending = self.wire.post(sends, {r: message_size(self.parts(rows)) for r, rows in self.taken.items()})

    def receive(self):
        """Keys, values and gates before the local ones, `[B, received, ...]`; zeros for keys that no head of a row
        needs."""
        made = []
        for shape, dtype in self.kinds:
            made.append(torch.zeros((shape[0], self.received, *shape[2:]), dtype=dtype, device=self.device))
        for rank, message in self.finish().items():
            rows, at = self.taken[rank], self.places[rank]
            chosen = unpack(message, self.parts(rows), self.device)
            index = self._index_among_received(rows, at)
            for out, x in zip(made[:2], chosen):
                out.view(-1, out.shape[3]).index_copy_(0, index, x)
            for out, x in zip(made[2:], chosen[2:]):
                out[:, at + rows.first : at + rows.first + rows.rows] = x
        return made

    def _index_among_received(self, rows, at):
        length = rows.mask.shape[1]
        # Rows of the first rank that are not needed lie before the received ones.
        return rows.index(self.device, at, self.received - at - length)

    def finish(self):
        """The received messages, by rank; afterwards nothing is under way."""
        pending, self.pending = self.pending, None
        return {} if pending is None else pending.wait()

    def return_gradients(self, gradients, kinds):
        """Posts the gradients of received rows to their ranks; `kinds` are those operands that have gradients."""
        sends = {}
        for rank, rows in self.taken.items():
            at = self.places[rank]
            index = self._index_among_received(rows, at)
            chosen = [gradients[n].reshape(-1, gradients[n].shape[3]).index_select(0, index) for n in kinds if n < 2]
            first = at + rows.first
            chosen += [gradients[n][:, first : first + rows.rows] for n in kinds if n == 2]
            sends[rank] = pack(chosen)
        receives = {rank: message_size(self.parts(rows, kinds)) for rank, rows in self.given.items()}
        self.pending = self.wire.post(sends, receives)

    def add_gradients(self, gradients, kinds):
        """Local gradients plus those that return, in the order of the ranks."""
        if self.pending is None:
            self.return_gradients(None, kinds)
        messages = self.finish()
        if not messages:
            return gradients
        wide = lambda x: x.to(torch.promote_types(x.dtype, torch.float32), copy=True).contiguous()
        sums = [wide(x) if n in kinds else None for n, x in enumerate(gradients)]
        for rank in sorted(messages):
            rows = self.given[rank]
            index = rows.index(self.device)
            for n, x in zip(kinds, unpack(messages[rank], self.parts(rows, kinds), self.device)):
                if n < 2:
                    sums[n].view(-1, x.shape[1]).index_add_(0, index, x.to(sums[n].dtype))
                else:
                    sums[n][:, rows.first :] += x
        return [None if x is None else x.to(dtype) for x, (_, dtype) in zip(sums, self.kinds)]


class _Post(torch.autograd.Function):
    @staticmethod
    def forward(ctx, exchange, *operands):
        ctx.exchange = exchange
        exchange.send(operands)
        return tuple(x.view_as(x) for x in operands)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        kinds = [n for n, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
        return None, *ctx.exchange.add_gradients(gradients, kinds)


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, exchange, *operands):
        ctx.exchange = exchange
        made = exchange.receive()
        ctx.kinds = [n for n, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
        ctx.mark_non_differentiable(*[x for n, x in enumerate(made) if n not in ctx.kinds])
        return tuple(made)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        ctx.exchange.return_gradients(gradients, ctx.kinds)
        # The operands are there for the order of the backward pass: `_Post` comes after.
        return (None,) * (1 + len(gradients))


def post(exchange, operands):
    """Starts the exchange; the operands to compute with."""
    return [made if x.requires_grad else x for made, x in zip(_Post.apply(exchange, *operands), operands)]


def wait(exchange, operands):
    """Received rows for each operand, as `post` returned them."""
    return _Wait.apply(exchange, *operands)
