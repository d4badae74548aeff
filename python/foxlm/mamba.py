"""Mamba-2, under the name and signature of mamba-ssm. Needs PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict, overload

from . import _checks
from .scans import check_gate, check_shapes, run

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from typing_extensions import Unpack

__all__ = ["mamba_chunk_scan_combined"]


class MambaOptions(TypedDict, total=False):
    """Keyword arguments of `mamba_chunk_scan_combined` behind the operands."""

    D: Tensor | None
    z: Tensor | None
    dt_bias: Tensor | None
    initial_states: Tensor | None
    seq_idx: Tensor | None
    cu_seqlens: Tensor | None
    dt_softplus: bool
    dt_limit: tuple[float, float]
    state_dtype: torch.dtype | None


@overload
def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int | None = None,
    *,
    return_final_states: Literal[False] = False,
    return_varlen_states: Literal[False] = False,
    **options: Unpack[MambaOptions],
) -> Tensor: ...
@overload
def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int | None = None,
    *,
    return_final_states: Literal[True],
    return_varlen_states: Literal[False] = False,
    **options: Unpack[MambaOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int | None = None,
    *,
    return_final_states: Literal[False] = False,
    return_varlen_states: Literal[True],
    **options: Unpack[MambaOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int | None = None,
    *,
    return_final_states: Literal[True],
    return_varlen_states: Literal[True],
    **options: Unpack[MambaOptions],
) -> tuple[Tensor, Tensor, Tensor]: ...
def mamba_chunk_scan_combined(
    x,
    dt,
    A,
    B,
    C,
    chunk_size=None,
    D=None,
    z=None,
    dt_bias=None,
    initial_states=None,
    seq_idx=None,
    cu_seqlens=None,
    dt_softplus=False,
    dt_limit=(0.0, float("inf")),
    return_final_states=False,
    return_varlen_states=False,
    state_dtype=None,
):
    """Mamba-2: `S_t = exp(A dt_t) S_{t-1} + dt_t x_t B_t^T`, `y_t = S_t C_t + D x_t`, times `silu(z_t)` where `z` is
    given.

    Args:
        x: `[batch, time, heads, headdim]`.
        dt: steps `[batch, time, heads]`, plus `dt_bias` `[heads]`, through softplus if `dt_softplus`, within
            `dt_limit`.
        A: `[heads]`, negative.
        B, C: `[batch, time, groups, dstate]`; `heads` is a multiple of `groups`.
        chunk_size: no effect on the result; the library chooses.
        D: `[heads]` or `[heads, headdim]`.
        z: `[batch, time, heads, headdim]`.
        initial_states: `[N, heads, headdim, dstate]` for N sequences; with `seq_idx` those of the first sequences of
            the rows `[batch, ...]`.
        seq_idx: which sequence a token belongs to `[batch, time]`; the state starts again where it changes.
        cu_seqlens: 0 and the ends of packed sequences `[N + 1]`; needs batch 1. Given with `seq_idx`, both must agree.
        return_final_states: whether to return the last states, too: of all N sequences, and with `seq_idx` or
            `return_varlen_states` of the last sequence of each row.
        return_varlen_states: whether to return the last states of all packed sequences, too; needs `cu_seqlens`.
        state_dtype: type of the returned states; float32 when absent.

    Returns:
        `[batch, time, heads, headdim]`, or a tuple with the last states, shaped as the first ones: `(y, final)`,
        `(y, varlen)` or `(y, final, varlen)`.
    """
    _checks.tensors(x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias)
    _checks.tensors(initial_states=initial_states, seq_idx=seq_idx, cu_seqlens=cu_seqlens)
    import torch

    if return_varlen_states and cu_seqlens is None:
        raise ValueError("return_varlen_states needs cu_seqlens")
    for name, given in (("A", A), ("D", D), ("dt_bias", dt_bias)):
        shapes = ([x.shape[2]],) if name != "D" else ([x.shape[2]], [x.shape[2], x.shape[3]])
        if given is not None and list(given.shape) not in shapes:
            raise ValueError(f"{name} has shape {list(given.shape)}, expected {' or '.join(map(str, shapes))}")
    _checks.shaped("z", z, x.shape)
    if len(dt_limit) != 2:
        raise ValueError(f"dt_limit is {dt_limit}; it must be the lowest and the highest step")
    rows = x.shape[0]
    state = None if initial_states is None else initial_states.transpose(2, 3)
    if seq_idx is None:
        check_shapes(C, B, x, cu_seqlens, state, names=("C", "B", "x"))
    else:
        # Checked before the rows are joined, so that a complaint names the caller's shapes.
        check_shapes(C, B, x, None, state, names=("C", "B", "x"))
    check_gate("dt", dt, x)
    dt = dt.float()
    if dt_bias is not None:
        dt = dt + dt_bias.float()
    if dt_softplus:
        dt = torch.nn.functional.softplus(dt)
    dt = dt.clamp(*dt_limit)
    decay = (A.float() * dt)[..., None]
    skip = D.float() if D is not None and D.ndim == 1 else None
    operands, last_of_rows = (C, B, x, decay, dt), None
    if seq_idx is not None:
        ends, last_of_rows = _ends(seq_idx, x, cu_seqlens)
        if state is not None:
            first = torch.cat((last_of_rows.new_zeros(1), last_of_rows[:-1] + 1)).to(state.device)
            state = state.new_zeros((len(ends) - 1, *state.shape[1:])).index_copy(0, first, state)
        operands, cu_seqlens = [a.flatten(0, 1)[None] for a in operands], ends
    wanted = return_final_states or return_varlen_states
    o, last = run(*operands, skip, 1.0, state, wanted, cu_seqlens, False)
    o = o.view(rows, -1, *o.shape[2:]) if seq_idx is not None else o
    if D is not None and D.ndim == 2:
        o = (o.float() + D.float() * x.float()).to(o.dtype)
    if z is not None:
        o = o * torch.nn.functional.silu(z)
    if not wanted:
        return o
    every = last.transpose(2, 3) if state_dtype is None else last.transpose(2, 3).to(state_dtype)
    final = every
    if last_of_rows is not None:
        final = every.index_select(0, last_of_rows.to(every.device))
    elif return_varlen_states:
        final = every[-1:]
    results = (o, final) if return_final_states else (o,)
    return (*results, every) if return_varlen_states else results


def _ends(seq_idx, x, cu_seqlens):
    """Ends of the sequences when all rows are joined, on the host, and the index of each row's last sequence."""
    import torch

    rows, time = x.shape[:2]
    if list(seq_idx.shape) != [rows, time] or seq_idx.is_floating_point():
        raise ValueError(f"seq_idx is {seq_idx.dtype} {list(seq_idx.shape)}; it must hold integers {[rows, time]}")
    if rows == 0 or time == 0:
        raise ValueError("seq_idx without tokens; pass None")
    ids = seq_idx.cpu()
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    flat = begins.flatten().nonzero().flatten()
    ends = torch.cat((flat, torch.tensor([rows * time])))
    if cu_seqlens is not None and not torch.equal(ends, cu_seqlens.cpu().long()):
        raise ValueError("seq_idx and cu_seqlens name different sequences; pass one of them")
    return ends, begins.sum(1).cumsum(0) - 1
