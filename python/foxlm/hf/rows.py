"""Which tokens of a batch belong together: padding, masks with holes, packed sequences, positions."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class Rows:
    """How the tokens of one call are arranged for the layers."""

    # Arguments that every block gets.
    shared: dict = field(default_factory=dict)
    # Where each token is moved from, and where its result is found, `[B, T]`; None where tokens stay.
    order: torch.Tensor | None = None
    place: torch.Tensor | None = None

    def arrange(self, h):
        """Hidden states `[B, T, D]` in the order of the layers."""
        return h if self.order is None else h.gather(1, self.order[..., None].expand(h.shape))

    def restore(self, h):
        """Hidden states in the caller's order; a masked token has that of the last visible token before it."""
        return h if self.place is None else h.gather(1, self.place[..., None].expand(h.shape))


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
    if rows.order is not None:
        position_ids = position_ids.expand(batch, time).gather(1, rows.order)
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
    """Rows with padding on the left, whatever the mask looks like; of cached tokens only their number counts."""
    rows = Rows({"mask": None, "seq_start": None})
    if attention_mask is None:
        return rows
    total = past + time
    if list(attention_mask.shape) != [batch, total]:
        shape = list(attention_mask.shape)
        raise ValueError(f"attention_mask has shape {shape}, expected {[batch, total]}: all tokens, cached and new")
    seen = attention_mask != 0
    hidden = (~seen).sum(1)
    moves = time > 1
    if not compiling:
        # One copy to the host for all questions.
        left = (seen.cumsum(1) == 0).sum(1)
        late = past > 0 and time > 0
        torn = (hidden != left) & (left < total)
        again = (~seen[:, past:]).any(1) & seen[:, :past].any(1) if late else torch.zeros_like(torn)
        padded, torn, again = torch.stack((hidden.any(), torn.any(), again.any())).tolist()
        if again:
            raise ValueError("attention_mask hides new tokens after cached ones that are seen; remove them instead")
        if not padded:
            return rows
        moves = moves and torn and past == 0
        hidden = hidden.cpu()
    start = hidden.to(device)
    index = torch.arange(total, device=device)
    rows.shared = {"mask": index[None] >= start[:, None], "seq_start": hidden}
    if moves:
        now = seen[:, past:]
        rows.order = torch.argsort(now.to(torch.int8), dim=1, stable=True)
        rows.place = ((~now).sum(1, keepdim=True) + now.cumsum(1) - 1).clamp(min=0)
    return rows
