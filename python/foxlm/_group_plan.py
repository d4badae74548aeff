"""Which keys of earlier ranks a rank needs, when a sequence is sharded over the ranks of a process group.

Rank `r` holds the positions `offset_r` to `offset_r + length_r` of every row. Ranks report the sums of their log gates
at the ends of blocks of 64 keys and the largest norms of their queries and keys; from these every rank computes, with
the same numbers, what travels between any two of them. A key stays at its rank when the decay from it to the first
query of another rank is below a threshold: that of pruning, or one below which its softmax weight is 0 in the precision
of the op. The mathematics are those of fox's own context parallelism.
"""

from __future__ import annotations

import math
from bisect import bisect_right

import torch

# Keys in a block, the unit in which sums of gates are reported.
BLOCK = 64
# The smallest positive numbers are 2^-149 = e^-103.3 in float32 and 2^-1074 = e^-744.5 in float64.
_VANISHED, _VANISHED_64 = -104.0, -745.0
# Norms are computed from rounded values; sums of gates are rounded, too (in nats).
_ROUNDING, _MARGIN = 1.01, 1e-3
# As the kernels clamp log gates: the sums of gates of 0 stay finite.
_GATE_FLOOR = -1e3


class Sequences:
    """Where the sequences of the rows `[B]` lie in global positions, and how ranks hold them."""

    def __init__(self, batch, lengths, starts, ends):
        self.lengths, self.starts, self.ends, self.batch = lengths, starts, ends, batch
        self.offsets = [sum(lengths[:rank]) for rank in range(len(lengths) + 1)]

    def crossing(self, rank):
        """Of the sequences that begin before the first position of a rank and continue there: their first positions,
        one for each row (the rank's own first position where there is none), and how many local positions they have."""
        here = self.offsets[rank]
        if rank == len(self.lengths):
            return [here] * self.batch, 0
        if self.ends is not None:
            at = bisect_right(self.ends, here)
            first, end = self.ends[at - 1], self.ends[at]
            return [first], min(end - here, self.lengths[rank]) if first < here else 0
        firsts = [0] * self.batch if self.starts is None else [min(start, here) for start in self.starts]
        return firsts, self.lengths[rank]

    def tail(self, rank):
        """The first local position, for each row, of the sequence that continues at the next rank."""
        firsts, _ = self.crossing(rank + 1)
        return [max(first - self.offsets[rank], 0) for first in firsts]


def report(q, k, gates, threshold, sequences, rank):
    """Gate sums, thresholds and norms of a rank for all others: a vector of float64 on the device of `q`."""
    b, t, h, _ = q.shape
    exact = gates.detach().double().clamp(min=_GATE_FLOOR).nan_to_num(nan=0.0)
    blocks = -(-t // BLOCK)
    padded = torch.nn.functional.pad(exact, (0, 0, 0, blocks * BLOCK - t))
    ends = padded.view(b, blocks, BLOCK, h).sum(2).cumsum(1).transpose(0, 1)
    position = torch.arange(t, device=q.device)[None, :, None]
    column = lambda x: torch.tensor(x, device=q.device)[:, None, None]
    firsts, end = sequences.crossing(rank)
    head = (position >= column([first - sequences.offsets[rank] for first in firsts])) & (position < end)
    tail = position >= column(sequences.tail(rank))
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    squares = lambda x: x.detach().to(wide).square().sum(-1)
    largest = lambda x, mask: torch.where(mask, x, x.new_zeros(())).amax(1).double()
    of_q, of_k = squares(q), squares(k)
    if threshold is None:
        threshold = torch.full((b, h), math.nan)
    threshold = torch.as_tensor(threshold).detach().to(q.device, torch.float64).expand(b, h)
    parts = (
        ends, exact[:, 0], threshold, largest(of_q, head), largest(of_k, head), largest(of_k, tail),
        gates.detach().double().nan_to_num(nan=0.0).max(),
    )  # fmt: skip
    return torch.cat([x.reshape(-1) for x in parts])


def report_size(length, batch, heads, kv_heads):
    """Numbers in the report of a rank with this many positions."""
    return batch * ((-(-length // BLOCK) + 3) * heads + 2 * kv_heads) + 1


class Plan:
    """What travels between the ranks. Without reports (no gates) everything in the window does.

    `scale` is that of the logits; `log_tolerance` that of pruning by norms, None where there is none or a threshold is
    reported."""

    def __init__(
        self, sequences, rank, heads, kv_heads, window, reports=None, scale=1.0, log_tolerance=None, wide=False
    ):
        self.sequences, self.rank, self.window = sequences, rank, window
        self.heads, self.kv_heads = heads, kv_heads
        self.size = len(sequences.lengths)
        self.thresholds = self.travel = self.sums = None
        if reports is not None:
            self._read(reports)
            self._set_thresholds(scale, log_tolerance, wide)

    def _read(self, reports):
        b, h, hk = self.sequences.batch, self.heads, self.kv_heads
        split = []
        for length, numbers in zip(self.sequences.lengths, reports):
            blocks = -(-length // BLOCK)
            numbers = numbers[: report_size(length, b, h, hk)]
            sizes = [blocks * b * h, b * h, b * h, b * h, b * hk, b * hk, 1]
            ends, *rest, above = numbers.split(sizes)
            split.append((ends.view(blocks, b, h), *[x.view(b, -1) for x in rest], above))
        ends, first, self.given, self.of_q, self.of_k, self.of_tail, above = zip(*split)
        for rank, x in enumerate(above):
            if x > 0:
                raise ValueError(f"log_fgate is {float(x):g} at most on rank {rank}; logs of gates must not be above 0")
        # The sums continue from rank to rank: each begins with the exclusive prefix of the totals.
        before, self.sums, self.firsts = torch.zeros_like(first[0]), [], []
        for own, gate in zip(ends, first):
            self.sums.append(before + own)
            self.firsts.append(before + gate)
            before = self.sums[-1][-1]

    def _set_thresholds(self, scale, log_tolerance, wide):
        """The decay below which a key is forgotten by the queries of each rank `[B, H]`: as kernels prune, and for what
        travels. The latter must be the same numbers on all ranks, on any machine: no logarithm is computed for it."""
        self.thresholds, self.travel = [], []
        sequences, group = self.sequences, self.heads // self.kv_heads
        for rank in range(self.size):
            firsts, end = sequences.crossing(rank)
            squares = self.of_k[rank]
            for earlier in range(rank):
                holds = torch.tensor([first < sequences.offsets[earlier + 1] for first in firsts])[:, None]
                squares = torch.maximum(squares, torch.where(holds, self.of_tail[earlier], 0.0))
            bound = abs(scale) * (self.of_q[rank] * squares.repeat_interleave(group, 1)).sqrt()
            keys = [max(sequences.offsets[rank] + end - first, 1) for first in firsts]
            logs = torch.tensor([math.log(n) for n in keys], dtype=torch.float64)[:, None]
            at_most = torch.tensor([n.bit_length() * 0.6931471805599454 for n in keys], dtype=torch.float64)[:, None]
            tolerance = _VANISHED_64 if wide else _VANISHED if log_tolerance is None else log_tolerance
            pruning = tolerance - 2 * bound - logs
            travel = tolerance - 2 * _ROUNDING * bound - at_most
            if not wide:
                given = self.given[rank]
                pruning = torch.where(given.isnan(), pruning, given)
                travel = torch.where(given.isnan(), travel, given)
            self.thresholds.append(pruning)
            self.travel.append(travel - _MARGIN)

    def kept(self, owner, needer):
        """The first local key of rank `owner` that each row and key head of a later rank needs, `[B, H_k]`; the number
        of keys where it needs none."""
        sequences = self.sequences
        here, length = sequences.offsets[owner], sequences.lengths[owner]
        firsts, end = sequences.crossing(needer)
        if end == 0:
            return torch.full((sequences.batch, self.kv_heads), length)
        start = torch.zeros(sequences.batch, self.heads, dtype=torch.long)
        if self.sums is not None:
            # Sums never rise, so that forgotten blocks come first.
            forgotten = self.firsts[needer] - self.sums[owner] < self.travel[needer]
            start = (forgotten.sum(0) * BLOCK).clamp(max=length)
        begin = torch.tensor([first - here for first in firsts])[:, None]
        if self.window is not None:
            begin = begin.clamp(min=sequences.offsets[needer] + 1 - self.window - here)
        start = torch.maximum(start, begin).clamp(min=0, max=length)
        return start.view(sequences.batch, self.kv_heads, -1).amin(2)

    def full_rows(self, owner, needer):
        """Rows of keys of all sequences that a full exchange would send from `owner` to `needer`."""
        firsts, end = self.sequences.crossing(needer)
        here, length = self.sequences.offsets[owner], self.sequences.lengths[owner]
        return sum(max(length - max(first - here, 0), 0) for first in firsts) if end else 0

    def boundary(self):
        """How many queries of this rank may see keys of earlier ranks, rounded up to a block: later ones have forgotten
        all of them in all rows and heads, or have them outside of their window."""
        firsts, end = self.sequences.crossing(self.rank)
        if self.window is not None:
            end = min(end, self.window - 1)
        if self.sums is None:
            return end
        own = self.sums[self.rank] - (self.sums[self.rank - 1][-1] if self.rank else 0.0)
        continued = torch.tensor([first < self.sequences.offsets[self.rank] for first in firsts])[:, None]
        forgotten = ((own < self.travel[self.rank]) | ~continued).flatten(1).all(1)
        if forgotten.any():
            end = min(end, BLOCK * (int(forgotten.int().argmax()) + 1))
        return end
