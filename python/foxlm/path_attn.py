"""PaTH attention (arXiv 2505.16381) under the names and signatures of flash-linear-attention. Needs PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import _checks

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["parallel_path_attn"]

# The widest heads of the kernels, and tokens of a block of `_keys_at_the_end`.
_WIDEST, _BLOCK = 128, 64


def parallel_path_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    use_cache: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Softmax attention with a product of reflections between query and key.

    `o_i = sum_j softmax_j(scale (q_i . H_i H_{i-1} ... H_{j+1} k_j + c_i - c_j)) v_j` over the keys `j <= i`, where
    `H_t = I - beta_t w_t w_t^T` and `c_i` is the sum of the log gates up to and including `i`. As in
    flash-linear-attention, the gates are scaled, too: PaTH-FoX forgets by `exp(scale g)` per token.

    Args:
        q: queries `[B, T, HQ, K]`, `K` up to 128; float32, bfloat16 or float16 (float64 by the definition).
        k: keys `[B, T, H, K]`; query head `h` reads key head `h // (HQ / H)`.
        v: values `[B, T, H, V]`, `V` up to 128.
        w: directions of the reflections `[B, T, H, K]`, of length 1, best in float32.
        beta: strengths `[B, T, H]`, from 0 to 2, best in float32. One below 0 is an error on the CPU, and gives NaN on
            a GPU.
        g: logs of the forget gates `[B, T, HQ]`, at most 0, or None.
        scale: factor on the logits; `1 / sqrt(K)` when absent.
        cu_seqlens: 0 and the ends of packed sequences `[N + 1]`; needs `B = 1`.
        use_cache: whether to return the keys for decoding, too.

    Returns:
        `[B, T, HQ, V]`, and with `use_cache` the keys `[B, T, H, K]` after the reflections of all later tokens of their
        sequence, else None. A decoding step reflects these keys, appends the new one, and attends to them with
        `attn_decoding_one_step(..., do_gate_scale=True)`.
    """
    _check(q, k, v, w, beta, g, cu_seqlens)
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    import torch

    from . import _float64, _torch  # noqa: F401, the latter registers the ops
    from ._transition_torch import attention

    if q.dtype == torch.float64:
        o = _float64.transition_attention(q, k, v, _step(q, w, beta), _scaled(g, scale), cu_seqlens, scale)
        return o, _keys_at_the_end(k, w, beta, cu_seqlens) if use_cache else None
    _torch.check(q=q, w=w, beta=beta)
    # A vector u with H = I - u u^T. The small number keeps the gradient finite where beta is 0.
    u = w.float() * (beta.float() + 1e-12).sqrt()[..., None]
    o, _ = attention(q, k, v, u, _scaled(g, scale), cu_seqlens, True, scale)
    return o, _keys_at_the_end(k, w, beta, cu_seqlens) if use_cache else None


def _check(q, k, v, w, beta, g, cu_seqlens):
    """An error unless the operands fit each other."""
    _checks.tensors(q=q, k=k, v=v, w=w, beta=beta, g=g, cu_seqlens=cu_seqlens)
    _checks.causal_attention(q, k, v, cu_seqlens, None, _WIDEST)
    _checks.shaped("w", w, k.shape)
    _checks.shaped("beta", beta, k.shape[:3])
    _checks.shaped("g", g, q.shape[:3])
    import torch

    plain = type(beta) in (torch.Tensor, torch.nn.Parameter) and beta.device.type == "cpu"
    if plain and not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active():
        if bool((beta.detach() < 0).any()):
            raise ValueError(f"beta is {float(beta.detach().min()):g} at its lowest; it must be at least 0")


def _scaled(g, scale):
    """The gates as they are added to the logits."""
    return None if g is None else g * scale if str(g.dtype) == "torch.float64" else g.float() * scale


def _step(q, w, beta):
    """The reflection of keys `[B, n, HQ, K]` by token `t`, in float64."""
    w, beta = (x.double().repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (w, beta))

    def step(keys, t):
        along = (keys * w[:, t, None]).sum(-1, keepdim=True)
        return keys - beta[:, t, None, :, None] * along * w[:, t, None]

    return step


def _keys_at_the_end(k, w, beta, cu_seqlens):
    """Keys after the reflections of all later tokens of their sequence, with gradients, of the type of `k`."""
    import torch

    if cu_seqlens is not None:
        ends = _checks.segment_lists(None, cu_seqlens, k.shape[1])[1]
        parts = [_keys_at_the_end(*[x[:, a:e] for x in (k, w, beta)], None) for a, e in zip(ends, ends[1:])]
        return torch.cat(parts, 1)
    wide = torch.float64 if k.dtype == torch.float64 else torch.float32
    # Heads before time.
    keys, w, beta = (x.to(wide).transpose(1, 2) for x in (k, w, beta))
    after, parts = torch.eye(k.shape[3], dtype=wide, device=k.device), []
    for first in reversed(range(0, k.shape[1], _BLOCK)):
        at = slice(first, first + _BLOCK)
        x, y, b = keys[:, :, at], w[:, :, at], beta[:, :, at, None]
        overlap = (b * (y @ y.transpose(-1, -2))).tril(-1)
        eye = torch.eye(overlap.shape[-1], dtype=wide, device=k.device)
        # Rows of the product of the block's reflections, without the vectors on its left.
        t = torch.linalg.solve_triangular(overlap + eye, b * eye, upper=False, unitriangular=True)
        end = x - (t @ (y @ x.transpose(-1, -2)).tril(-1)).transpose(-1, -2) @ y
        parts.append(end @ after)
        after = after - y.transpose(-1, -2) @ (t.transpose(-1, -2) @ (y @ after)) if first > 0 else after
    found = torch.cat(parts[::-1], 2) if parts else keys
    return found.transpose(1, 2).to(k.dtype)
