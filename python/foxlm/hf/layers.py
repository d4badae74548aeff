"""The layers of FoX: the mathematics of the published models, with `foxlm.forgetting_attention`."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from .._attention import forgetting_attention
from .cache import FoxCache
from .configuration import FoxConfig

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
        self.heads = heads


def rotate(x, position: int, base: float):
    """Rotary positions on `[B, T, H, d]`, halves as pairs, the first token at `position`; angles in float32."""
    half = x.shape[-1] // 2
    frequency = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.arange(position, position + x.shape[1], device=x.device, dtype=torch.float32)[:, None] * frequency
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x.float().split(half, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)


class FoxAttention(nn.Module):
    """The layer: projections, shifts, norms, gates, attention, output gate."""

    def __init__(self, config: FoxConfig, layer: int):
        super().__init__()
        self.config, self.layer = config, layer
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
            setattr(self, self.gate_name, nn.Linear(width, heads, bias=True))
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

    def decay_biases(self):
        """Gate biases with which heads forget over the configured memory lengths."""
        low, high = self.config.decay_time_min, self.config.decay_time_max
        times = torch.linspace(math.log(low), math.log(high), self.config.num_heads, dtype=torch.float64).exp()
        return -torch.log(torch.expm1(1 / times)).float()

    def _project(self, proj, x, mask, previous):
        """A projection `[B, T, .]`, shifted where it is to be, and the raw one of the last token."""
        if not isinstance(proj, ShiftLinear):
            return proj(x), None
        raw = proj.linear(x)
        if mask is not None:
            raw = raw * mask[:, -raw.shape[1] :, None]
        first = torch.zeros_like(raw[:, :1]) if previous is None else previous[:, None]
        before = torch.cat((first, raw[:, :-1]), 1).unflatten(-1, (proj.heads, -1))
        share = torch.sigmoid(proj.shift_proj(x).float())[..., None].to(raw.dtype)
        shifted = share * before + (1 - share) * raw.unflatten(-1, (proj.heads, -1))
        return shifted.flatten(-2), raw[:, -1]

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

    def forward(self, x, mask=None, seq_start=None, cache: FoxCache | None = None):
        """x `[B, T, D]`: `[B, T, D]`."""
        config, state = self.config, None if cache is None else cache.layers[self.layer]
        position = 0 if cache is None else cache.get_seq_length(self.layer)
        q = self.q_proj(x)
        k, raw_key = self._project(self.k_proj, x, mask, None if state is None else state.raw_key)
        v, raw_value = self._project(self.v_proj, x, mask, None if state is None else state.raw_value)
        if config.qk_norm:
            q, k = self._norm(self.q_norm, q), self._norm(self.k_norm, k)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (q, k, v))
        if config.use_rope:
            q, k = rotate(q, position, config.rope_base), rotate(k, position, config.rope_base)
        log_gates = self._log_gates(x)
        if state is not None:
            k, v, log_gates = state.append(k, v, log_gates)
            state.raw_key, state.raw_value = raw_key, raw_value
        window = None if config.layout == "fla" else config.window_size
        o = forgetting_attention(
            q, k, v, log_gates, seq_start=seq_start, window=window, **self._pruning(k.shape[1])
        ).flatten(-2)
        if config.use_output_norm:
            o = self.output_norm(o)
        if config.use_output_gate:
            z = getattr(self, self.output_gate_name)(x)
            o = o * (F.silu(z) if config.ogate_act == "silu" else torch.sigmoid(z))
        return self.o_proj(o.to(x.dtype))


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


class FoxBlock(nn.Module):
    """Attention and MLP, each behind a norm and around the residual stream."""

    def __init__(self, config: FoxConfig, layer: int):
        super().__init__()
        self.attn_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attn = FoxAttention(config, layer)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = FoxMLP(config)

    def forward(self, h, mask=None, seq_start=None, cache=None):
        h = h + self.attn(self.attn_norm(h), mask, seq_start, cache)
        return h + self.mlp(self.mlp_norm(h))
