"""The layers of FoX: the mathematics of the published models, with `foxlm.forgetting_attention`."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from transformers.modeling_layers import GradientCheckpointingLayer

from .._attention import forgetting_attention
from . import weights
from .configuration import FoxConfig
from .rows import Moves

# QK-norms have this epsilon in both code bases, whatever norm_eps is.
QK_NORM_EPS = 1e-5


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * w` over groups of the last axis; statistics in float32."""

    def __init__(self, width: int, eps: float, groups: int = 1):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps, self.groups = eps, groups

    def forward(self, x):
        parts = x.float().unflatten(-1, (self.groups, -1))
        parts = parts * (parts.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (parts.flatten(-2) * self.weight).to(x.dtype)


class ShiftLinear(nn.Module):
    """A projection mixed with that of the previous token: `a_t u_{t-1} + (1 - a_t) u_t`, `a` from the current token."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        self.shift_proj = nn.Linear(width, heads, bias=False)


def rotate(x, positions, base: float):
    """Rotary positions `[B or 1, T]` on `[B, T, H, d]`, halves as pairs; angles in float32."""
    half = x.shape[-1] // 2
    frequency = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = positions.float()[..., None] * frequency
    cos, sin = angle.cos()[:, :, None], angle.sin()[:, :, None]
    a, b = x.float().split(half, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)


def gate_biases(config: FoxConfig):
    """Biases `[H]` with which gates begin: 0, or such that heads forget over the configured memory lengths, as fox's
    own initialization has it."""
    heads = config.num_heads
    if config.decay_times is None:
        return torch.zeros(heads, device="cpu")
    low, high = map(math.log, config.decay_times)
    share = lambda h: h / (heads - 1) if heads > 1 else 0.0
    times = [math.exp(low + (high - low) * share(h)) for h in range(heads)]
    return torch.tensor([-math.log(math.expm1(1 / time)) for time in times], device="cpu")


class FoxAttention(nn.Module):
    """The layer: projections, shifts, norms, gates, attention, output gate."""

    def __init__(self, config: FoxConfig, layer: int):
        super().__init__()
        self.config, self.layer_idx = config, layer
        width, heads = config.hidden_size, config.num_heads
        self.head_dim = width // heads
        kv_width = config.kv_heads * self.head_dim
        linear = lambda out: nn.Linear(width, out, bias=config.qkv_bias)
        self.q_proj = linear(width)
        self.k_proj = ShiftLinear(width, heads) if config.use_k_shift else linear(kv_width)
        self.v_proj = ShiftLinear(width, heads) if config.use_v_shift else linear(kv_width)
        self.o_proj = nn.Linear(width, width, bias=False)
        fla = config.layout == "fla"
        self.gate_name, self.output_gate_name = ("f_proj", "g_proj") if fla else ("fgate_proj", "ogate_proj")
        if config.fgate_type == "full":
            gate = nn.Linear(width, heads, bias=True)
            # Read where weights are initialized.
            gate.gate_config = config
            setattr(self, self.gate_name, gate)
        elif config.fgate_type == "bias_only":
            self.fgate_bias = nn.Parameter(torch.zeros(heads))
        elif config.fgate_type == "fixed":
            self.register_buffer("fgate_bias", torch.zeros(heads))
        if config.use_output_gate:
            setattr(self, self.output_gate_name, nn.Linear(width, width, bias=False))
        if config.use_output_norm:
            self.output_norm = RMSNorm(width, config.norm_eps, heads)
        if config.qk_norm:
            shared = config.qk_norm_share_param_across_head
            norm = lambda width, heads: RMSNorm(self.head_dim if shared else width, QK_NORM_EPS, 1 if shared else heads)
            self.q_norm, self.k_norm = norm(width, heads), norm(kv_width, config.kv_heads)

    def _project(self, proj, x, now, last, before, fresh, previous):
        """A projection `[B, T, .]`, shifted where it is to be, and the raw one of the last token that is not masked.
        `now` `[B, T]`, `last` and `before` are those of `rows.Rows`; sequences begin where `fresh`."""
        if not isinstance(proj, ShiftLinear):
            return proj(x), None
        raw = proj.linear(x)
        first = torch.zeros_like(raw[:, :1]) if previous is None else previous[:, None]
        kept = raw
        if last is not None:
            kept = Moves.take(torch.cat((first, raw), 1), last)
        elif now is not None:
            kept = raw * now[..., None]
        if before is not None:
            shifted = Moves.take(torch.cat((first, raw), 1), before)
        else:
            shifted = torch.cat((first, kept[:, :-1]), 1)
        if fresh is not None:
            shifted = shifted.masked_fill(fresh[..., None], 0)
        # With tensor parallelism there are the heads of this rank alone.
        ratio = torch.sigmoid(proj.shift_proj(x).float())[..., None].to(raw.dtype)
        shifted, own = (y.unflatten(-1, (ratio.shape[-2], -1)) for y in (shifted, raw))
        return (ratio * shifted + (1 - ratio) * own).flatten(-2), kept

    def _log_gates(self, x):
        config = self.config
        if config.fgate_type == "none":
            return None
        if config.fgate_type == "full":
            return F.logsigmoid(getattr(self, self.gate_name)(x).float())
        return F.logsigmoid(self.fgate_bias.float()).expand(*x.shape[:2], -1)

    def _norm(self, norm, x):
        if self.config.qk_norm_share_param_across_head:
            return norm(x.unflatten(-1, (-1, self.head_dim))).flatten(-2)
        return norm(x)

    def _pruning(self, keys: int):
        """Which blocks may be skipped: from the weights of the norms where there are, else from norms."""
        tolerance, config = self.config.log_pruning_tolerance, self.config
        if tolerance is None or config.fgate_type == "none":
            return {}
        if not config.qk_norm:
            return {"log_tolerance": tolerance}
        largest = lambda norm: norm.weight.detach().abs().view(-1, self.head_dim).amax(-1)
        q, k = largest(self.q_norm), largest(self.k_norm)
        if k.numel() > 1:
            k = k.repeat_interleave(config.num_heads // config.kv_heads)
        bound = (q * k).float() * math.sqrt(self.head_dim)
        return {"adaptive_threshold": -(2 * bound + math.log(keys)) + tolerance}

    def forward(
        self,
        x,
        positions,
        mask=None,
        now=None,
        last=None,
        before=None,
        seq_start=None,
        moves=None,
        pairs=None,
        at=None,
        cu_seqlens=None,
        fresh=None,
        past_key_values=None,
        output_attentions=False,
        shard=None,
    ):
        """x `[B, T, D]`: `[B, T, D]`, and the attention weights `[B, H, T, N]` where they are asked for. With `shard`
        these are the tokens of one rank, and `cu_seqlens` those of all. The other arguments are those of `rows.Rows`."""
        config = self.config
        state = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        held = (None, None) if state is None else state.last_raw()
        if shard is not None and (config.use_k_shift or config.use_v_shift):
            row = shard.previous_row(x)
            held = [p.linear(row)[:, 0] if isinstance(p, ShiftLinear) else None for p in (self.k_proj, self.v_proj)]
        q = self.q_proj(x)
        k, raw_keys = self._project(self.k_proj, x, now, last, before, fresh, held[0])
        v, raw_values = self._project(self.v_proj, x, now, last, before, fresh, held[1])
        if config.qk_norm:
            q, k = self._norm(self.q_norm, q), self._norm(self.k_norm, k)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (q, k, v))
        if config.use_rope:
            q, k = rotate(q, positions, config.rope_base), rotate(k, positions, config.rope_base)
        log_gates = self._log_gates(x)
        if state is not None:
            gates = None if log_gates is None else log_gates.transpose(1, 2)
            extras = {"log_gates": gates, "raw_keys": raw_keys, "raw_values": raw_values}
            own = k, v, log_gates
            k, v = past_key_values.update(k.transpose(1, 2), v.transpose(1, 2), self.layer_idx, extras)
            k, v = k.transpose(1, 2), v.transpose(1, 2)
            log_gates = None if log_gates is None else state.log_gates.transpose(1, 2)
            if at is None and state.is_compileable:
                # The first tokens of a static cache: the rest of it is empty.
                k, v, log_gates = own
        window = None if config.layout == "fla" else config.window_size
        seen_weights = None
        if output_attentions or at is not None or pairs is not None or config._attn_implementation == "sdpa":
            keys = k.shape[1]
            at = torch.arange(keys - x.shape[1], keys, device=x.device) if at is None else at
            seen = weights.visible(mask, fresh, pairs, window, at, x.shape[0], keys)
            o, seen_weights = weights.attention(q, k, v, log_gates, seen, mask, pairs, at, output_attentions)
            if seen_weights is not None and state is not None and state.is_compileable:
                seen_weights = F.pad(seen_weights, (0, state.max_cache_len - keys))
        else:
            if cu_seqlens is not None:
                # Packed sequences are in one row.
                q, k, v = (y.flatten(0, 1)[None] for y in (q, k, v))
                log_gates = None if log_gates is None else log_gates.flatten(0, 1)[None]
            if moves is not None:
                q = moves.take(q, moves.queries)
                k, v, log_gates = (None if y is None else moves.take(y, moves.keys) for y in (k, v, log_gates))
            keys, group = (k.shape[1], None) if shard is None else (shard.total, shard.group)
            options = {"seq_start": seq_start, "cu_seqlens": cu_seqlens, "window": window}
            o = forgetting_attention(q, k, v, log_gates, **options, **self._pruning(keys), group=group)
            o = o if moves is None else moves.take(o, moves.results)
        o = o.reshape(*x.shape[:2], -1)
        if config.use_output_norm:
            o = self.output_norm(o)
        if config.use_output_gate:
            z = getattr(self, self.output_gate_name)(x)
            o = o * (F.silu(z) if config.ogate_act == "silu" else torch.sigmoid(z))
        return self.o_proj(o.to(x.dtype)), seen_weights


class FoxMLP(nn.Module):
    """`down(act(g) * u)`; official files hold g and u in one matrix."""

    def __init__(self, config: FoxConfig):
        super().__init__()
        width, inner = config.hidden_size, config.mlp_width
        self.fused = config.layout != "fla"
        self.gate_proj = nn.Linear(width, 2 * inner if self.fused else inner, bias=False)
        if not self.fused:
            self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.act = torch.sigmoid if config.hidden_act == "sigmoid" else F.silu

    def forward(self, x):
        gate, up = self.gate_proj(x).chunk(2, -1) if self.fused else (self.gate_proj(x), self.up_proj(x))
        return self.down_proj(self.act(gate) * up)


class FoxBlock(GradientCheckpointingLayer):
    """Attention and MLP, each behind a norm and around the residual stream."""

    def __init__(self, config: FoxConfig, layer: int):
        super().__init__()
        self.attn_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attn = FoxAttention(config, layer)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = FoxMLP(config)

    def forward(self, h, **options):
        o, weights = self.attn(self.attn_norm(h), **options)
        h = h + o
        return h + self.mlp(self.mlp_norm(h)), weights
