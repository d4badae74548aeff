"""Which tokens of a batch belong together: padding, masks with holes, packed sequences, positions."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn import functional as F


@dataclass
class Moves:
    """How attention sees rows whose masked tokens are not all on the left: these are moved there. Indices of tokens."""

    # Which cached or new token is at each place `[B, N]`.
    keys: torch.Tensor
    # Which new token is at each of the last places `[B, T]`, and where the result of each new token is found `[B, T]`.
    queries: torch.Tensor
    results: torch.Tensor

    @staticmethod
    def take(x, index):
        """Rows of `x` `[B, ., ...]` at `index` `[B, .]`."""
        return x.gather(1, index.view(*index.shape, *[1] * (x.ndim - 2)).expand(*index.shape, *x.shape[2:]))


@dataclass
class Rows:
    """How the tokens of one call belong together."""

    # Arguments that every block gets, each None where it is not needed: `positions` `[B or 1, T]`; `mask` `[B, N]` and
    # `now` `[B, T]`, which tokens are not masked, of all and of the new ones; `last` and `before` `[B, T]`, the last new
    # token up to each that is not masked, and the one before each, counted from 1, 0 for the last of the cache;
    # `seq_start` `[B]`; `moves`; `pairs` `[B, T, N]`, which tokens each sees; `at` `[T]`, where the new tokens are in a
    # static cache; `cu_seqlens`, and where its sequences begin, `fresh` `[B, T]`.
    shared: dict = field(default_factory=dict)

    def restore(self, h):
        """Hidden states `[B, T, D]`; a masked token has that of the last token before it that is not masked."""
        last = self.shared["last"]
        return h if last is None else Moves.take(h, (last - 1).clamp(min=0))


# What a row without masked tokens needs.
WHOLE = dict.fromkeys(("mask", "now", "last", "before", "seq_start", "moves", "pairs", "at", "cu_seqlens", "fresh"))


def arrange(attention_mask, position_ids, cu_seqlens, seq_idx, batch, past, time, device) -> Rows:
    """`attention_mask` `[B, past + T]` or `[B or 1, 1, T, past + T]`, `position_ids` `[B or 1, T]`, `cu_seqlens`
    `[N + 1]`, `seq_idx` `[B or 1, T]`: each may be None."""
    compiling = torch.compiler.is_compiling()
    position_ids = _positions(position_ids, batch, time)
    if attention_mask is not None and attention_mask.ndim == 4:
        if cu_seqlens is not None or seq_idx is not None:
            raise ValueError("packed sequences with a mask of four dimensions; give one of them")
        rows = Rows({**WHOLE, **_pairs(attention_mask, batch, past, time, past + time, device)})
        default = torch.arange(past, past + time, device=device)[None]
        rows.shared["positions"] = default if position_ids is None else position_ids
        return rows
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
    elif explicit and past == 0 and time > 0:
        if compiling:
            if attention_mask is None:
                words = "position_ids in a compiled model; pass an attention_mask, or cu_seqlens for packed tokens"
                raise ValueError(words)
            packed = rows.shared["mask"].all() & (position_ids.diff(dim=1) != 1).any()
            require(~packed, "position_ids of packed tokens in a compiled model; pass cu_seqlens")
        elif rows.shared["seq_start"] is None:
            ends = _changes(position_ids, 1, batch, time)
            ends = None if len(ends) == batch + 1 else ends
    if ends is not None:
        fresh = torch.zeros(batch * time + 1, dtype=torch.bool, device=device)
        fresh[ends.to(device)] = True
        fresh = fresh[:-1].view(batch, time)
    rows.shared.update(positions=position_ids, cu_seqlens=ends, fresh=fresh)
    return rows


def arrange_static(attention_mask, position_ids, batch, past, time, keys, device) -> Rows:
    """The same for new tokens after `past` others, a tensor, in a static cache of `keys` places. `attention_mask`
    `[B, at most keys]` or `[B or 1, 1, T, keys]`."""
    at = past + torch.arange(time, device=device)
    position_ids = _positions(position_ids, batch, time)
    shared = {**WHOLE, "at": at, "positions": at[None] if position_ids is None else position_ids}
    if attention_mask is None:
        return Rows(shared)
    if attention_mask.ndim == 4:
        return Rows({**shared, **_pairs(attention_mask, batch, past, time, keys, device)})
    if attention_mask.shape[0] != batch or attention_mask.shape[-1] > keys or attention_mask.ndim != 2:
        shape = list(attention_mask.shape)
        raise ValueError(f"attention_mask has shape {shape}, expected {[batch, keys]}: all places of the static cache")
    mask = F.pad((attention_mask != 0).to(device), (0, keys - attention_mask.shape[-1]))
    now = mask.index_select(1, at)
    return Rows({**shared, "mask": mask, "now": now, **_neighbors(now)})


def _positions(position_ids, batch, time):
    if position_ids is None:
        return None
    if position_ids.ndim == 1:
        position_ids = position_ids[None]
    if position_ids.shape[-1] != time or position_ids.ndim != 2 or position_ids.shape[0] not in (1, batch):
        raise ValueError(f"position_ids have shape {list(position_ids.shape)}, expected {[batch, time]}")
    return position_ids


def _neighbors(now):
    """`last` and `before` of tokens that are there where `now` `[B, T]`."""
    count = torch.arange(1, now.shape[1] + 1, device=now.device)
    last = torch.where(now, count, 0).cummax(1).values
    return {"last": last, "before": F.pad(last[:, :-1], (1, 0))}


def _pairs(attention_mask, batch, past, time, keys, device):
    """Which tokens each new token sees, itself and earlier ones, from a mask with a row for each: true or 0 where it
    does, false or a very low number where not."""
    mask, shape = attention_mask, list(attention_mask.shape)
    if shape[0] not in (1, batch) or shape[1:] != [1, time, keys]:
        raise ValueError(f"attention_mask has shape {shape}, expected {[batch, 1, time, keys]}")
    if mask.is_floating_point():
        seen = mask == 0
        biased = "attention_mask has four dimensions and a bias; it must be 0, or below -1e4 to mask a token"
        require((seen | (mask < -1e4)).all(), biased)
        mask = seen
    elif mask.dtype != torch.bool:
        kind = str(mask.dtype).removeprefix("torch.")
        raise ValueError(f"attention_mask has four dimensions and is {kind}; pass bool, true for tokens that are seen")
    pairs = mask[:, 0].to(device).expand(batch, time, keys)
    # The tokens before each that it sees, counted from 1 among the new ones.
    at = past + torch.arange(time, device=device)
    j = torch.arange(keys, device=device)
    later = "attention_mask lets a token see later ones, but FoX is causal; mask them"
    require(~(pairs & (j > at[:, None])).any(), later)
    count = (j + 1) * (j < at[:, None])
    before = (count * pairs).amax(-1) - past
    return {"pairs": pairs, "before": before}


def require(holds, words):
    """An error unless `holds`, a tensor; a RuntimeError in compiled code, which raises when it runs."""
    if torch.compiler.is_compiling():
        torch._assert_async(holds, words)
    elif not bool(holds):
        raise ValueError(words)


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
    rows = Rows(dict(WHOLE))
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
    now = seen[:, past:]
    rows.shared.update(mask=seen, now=now, seq_start=hidden if compiling else hidden.cpu())
    if torn:
        keys = torch.argsort(seen.to(torch.int8), dim=1, stable=True)
        rows.shared.update(_neighbors(now))
        rows.shared["moves"] = Moves(
            keys=keys,
            queries=(keys[:, past:] - past).clamp(min=0),
            # The last visible tokens are at the last places.
            results=(time - now.sum(1, keepdim=True) + now.cumsum(1) - 1).clamp(min=0),
        )
    return rows
