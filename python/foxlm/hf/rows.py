"""Which tokens of a batch belong together: padding, masks with holes, packed sequences, positions."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class Moves:
    """How attention sees rows whose masked tokens are not all on the left: these are moved there. Indices of tokens."""

    # Which cached or new token is at each place `[B, N]`.
    keys: torch.Tensor
    # Which new token is at each of the last places `[B, T]`, and where the result of each new token is found `[B, T]`.
    queries: torch.Tensor
    results: torch.Tensor
    # The last new token up to each that is not masked, counted from 1; 0 where there is none `[B, T]`.
    last: torch.Tensor

    @staticmethod
    def take(x, index):
        """Rows of `x` `[B, ., ...]` at `index` `[B, .]`."""
        return x.gather(1, index.view(*index.shape, *[1] * (x.ndim - 2)).expand(*index.shape, *x.shape[2:]))


@dataclass
class Rows:
    """How the tokens of one call belong together."""

    # Arguments that every block gets.
    shared: dict = field(default_factory=dict)

    def restore(self, h):
        """Hidden states `[B, T, D]`; a masked token has that of the last token before it that is not masked."""
        moves = self.shared["moves"]
        return h if moves is None else Moves.take(h, (moves.last - 1).clamp(min=0))


def arrange(attention_mask, position_ids, cu_seqlens, seq_idx, batch, past, time, device) -> Rows:
    """`attention_mask` `[B, past + T]`, `position_ids` `[B or 1, T]`, `cu_seqlens` `[N + 1]`, `seq_idx` `[B or 1, T]`:
    each may be None."""
    compiling = torch.compiler.is_compiling()
    if position_ids is not None:
        if position_ids.ndim == 1:
            position_ids = position_ids[None]
        if position_ids.shape[-1] != time or position_ids.ndim != 2 or position_ids.shape[0] not in (1, batch):
            raise ValueError(f"position_ids have shape {list(position_ids.shape)}, expected {[batch, time]}")
    rows = _masked(attention_mask, batch, past, time, device, compiling)
    if position_ids is None:
        position_ids = torch.arange(past, past + time, device=device)[None]
        explicit = False
    else:
        explicit = True
    ends = fresh = None
    if cu_seqlens is not None or seq_idx is not None:
        if past or rows.shared["seq_start"] is not None:
            raise ValueError("packed sequences (cu_seqlens or seq_idx) with padding or a cache; give one of them")
        ends = _ends(cu_seqlens, batch, time) if cu_seqlens is not None else _changes(seq_idx, 0, batch, time)
    elif explicit and past == 0 and rows.shared["seq_start"] is None and time > 0:
        if compiling and attention_mask is None:
            words = "position_ids in a compiled model; pass an attention_mask, or cu_seqlens for packed tokens"
            raise ValueError(words)
        ends = None if compiling else _changes(position_ids, 1, batch, time)
        ends = None if ends is not None and len(ends) == batch + 1 else ends
    if ends is not None:
        fresh = torch.zeros(batch * time + 1, dtype=torch.bool, device=device)
        fresh[ends.to(device)] = True
        fresh = fresh[:-1].view(batch, time)
    rows.shared |= {"positions": position_ids, "cu_seqlens": ends, "fresh": fresh}
    return rows


def _changes(ids, step, batch, time):
    """Ends of sequences, rows joined, on the host: a new one begins where `ids` do not advance by `step`."""
    if list(ids.shape) not in ([batch, time], [1, time]):
        raise ValueError(f"seq_idx has shape {list(ids.shape)}, expected {[batch, time]}")
    ids = ids.cpu().expand(batch, time)
    begins = torch.ones(batch, time, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] - ids[:, :-1] != step
    return torch.cat((begins.flatten().nonzero().flatten(), torch.tensor([batch * time])))


def _ends(cu_seqlens, batch, time):
    ends = cu_seqlens.flatten().cpu().long()
    if batch != 1 or len(ends) < 2 or ends[0] != 0 or ends[-1] != time or (ends.diff() < 0).any():
        raise ValueError(
            f"cu_seqlens is {ends.tolist()} for input of shape {[batch, time]}; it must go from 0 to the length of "
            "one row of packed sequences"
        )
    return ends


def _masked(attention_mask, batch, past, time, device, compiling) -> Rows:
    """Rows with padding on the left, or with masked tokens anywhere, which are moved there for attention."""
    rows = Rows({"mask": None, "seq_start": None, "moves": None})
    if attention_mask is None:
        return rows
    total = past + time
    if list(attention_mask.shape) != [batch, total]:
        shape = list(attention_mask.shape)
        raise ValueError(f"attention_mask has shape {shape}, expected {[batch, total]}: all tokens, cached and new")
    seen = (attention_mask != 0).to(device)
    hidden, torn = (~seen).sum(1), True
    if not compiling:
        left = (seen.cumsum(1) == 0).sum(1)
        # One copy to the host for both questions.
        padded, torn = torch.stack((hidden.any(), ((hidden != left) & (left < total)).any())).tolist()
        if not padded:
            return rows
    rows.shared |= {"mask": seen, "seq_start": hidden if compiling else hidden.cpu()}
    if torn:
        keys, now = torch.argsort(seen.to(torch.int8), dim=1, stable=True), seen[:, past:]
        count = torch.arange(1, time + 1, device=device)
        rows.shared["moves"] = Moves(
            keys=keys,
            queries=(keys[:, past:] - past).clamp(min=0),
            # The last visible tokens are at the last places.
            results=(time - now.sum(1, keepdim=True) + now.cumsum(1) - 1).clamp(min=0),
            last=torch.where(now, count, 0).cummax(1).values,
        )
    return rows
