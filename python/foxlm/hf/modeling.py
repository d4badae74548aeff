"""FoX in PyTorch: the mathematics of the published models, with `foxlm.forgetting_attention`."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .._attention import forgetting_attention
from .configuration import FlaFoxConfig, FoxConfig, FoxTransformerConfig

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


class FoxLayerCache:
    """What one layer remembers: keys, values `[B, N, Hk, d]`, log gates `[B, N, H]`, the last raw projections `[B,
    D]`."""

    def __init__(self):
        self.keys = self.values = self.log_gates = self.raw_key = self.raw_value = None

    def append(self, keys, values, log_gates):
        """Adds new positions; returns all."""
        join = lambda old, new: new if old is None or new is None else torch.cat((old, new), 1)
        self.keys, self.values = join(self.keys, keys), join(self.values, values)
        self.log_gates = join(self.log_gates, log_gates)
        return self.keys, self.values, self.log_gates

    def select(self, rows):
        """Keeps these sequences, in this order."""
        for name, x in vars(self).items():
            setattr(self, name, None if x is None else x.index_select(0, rows.to(x.device)))


class FoxCache:
    """The decode state of a model. `generate` gets one from the model and hands it back."""

    is_compileable = False

    def __init__(self, layers: int):
        self.layers = [FoxLayerCache() for _ in range(layers)]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions that are remembered."""
        keys = self.layers[layer_idx].keys
        return 0 if keys is None else keys.shape[1]

    def get_max_cache_shape(self, *_):
        """No limit."""
        return None

    def reorder_cache(self, beam_idx):
        """For beam search."""
        for layer in self.layers:
            layer.select(beam_idx)

    def batch_select_indices(self, indices):
        """Keeps these sequences."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int):
        """Repeats every sequence."""
        rows = self.layers[0].keys.shape[0]
        self.reorder_cache(torch.arange(rows).repeat_interleave(repeats))


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


class FoxPreTrainedModel(PreTrainedModel):
    """Initialization and what the library asks about a model."""

    config_class = FoxConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["FoxBlock"]
    _skip_keys_device_placement = ["past_key_values"]

    @torch.no_grad()
    def _init_weights(self, module):
        std = self.config.initializer_range
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=std)
            if module.padding_idx is not None and not getattr(module.weight, "_is_hf_initialized", False):
                module.weight[module.padding_idx].zero_()
        elif isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, FoxAttention) and module.config.fgate_type in ("bias_only", "fixed"):
            if not getattr(module.fgate_bias, "_is_hf_initialized", False):
                biases = module.decay_biases() if module.config.fgate_bias_init else torch.zeros(1)
                module.fgate_bias.copy_(biases.expand_as(module.fgate_bias))


class FoxModel(FoxPreTrainedModel):
    """Embedding, blocks, final norm."""

    def __init__(self, config: FoxConfig):
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(FoxBlock(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self):
        return self.embeddings

    def set_input_embeddings(self, value):
        self.embeddings = value

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        inputs_embeds=None,
        past_key_values=None,
        use_cache=None,
        output_hidden_states=None,
        return_dict=None,
        **_,
    ):
        """`input_ids` `[B, T]`; `attention_mask` `[B, past + T]`, 0 for padding on the left (on the right it has no
        effect: later tokens are not seen)."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        h = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        use_cache = (self.config.use_cache and not self.training) if use_cache is None else use_cache
        cache = past_key_values
        if not isinstance(cache, FoxCache):
            if cache is not None and cache.get_seq_length() > 0:
                raise ValueError(
                    f"past_key_values is a {type(cache).__name__}; use the FoxCache that the model returned"
                )
            cache = FoxCache(len(self.layers)) if use_cache else None
        mask, seq_start = _padding(attention_mask)
        hidden = [h]
        for layer in self.layers:
            if self.gradient_checkpointing and self.training:
                h = self._gradient_checkpointing_func(layer.__call__, h, mask, seq_start, None)
            else:
                h = layer(h, mask, seq_start, cache)
            hidden.append(h)
        h = self.norm(h)
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        out = BaseModelOutputWithPast(
            last_hidden_state=h, past_key_values=cache, hidden_states=(*hidden[:-1], h) if wanted else None
        )
        return out if return_dict in (None, True) else out.to_tuple()


def _padding(attention_mask):
    """The mask, and the first token of every sequence that is not padding; None where nothing is padded on the left."""
    if attention_mask is None:
        return None, None
    if attention_mask.ndim != 2:
        raise ValueError(f"attention_mask has shape {list(attention_mask.shape)}; it must be [batch, time]")
    seq_start = (attention_mask.cumsum(1) == 0).sum(1)
    if not bool(seq_start.any()):
        return None, None
    first = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    return first[None] >= seq_start[:, None], seq_start


class FoxForCausalLM(FoxPreTrainedModel, GenerationMixin):
    """FoX with an output projection. `labels` are shifted inside, as everywhere in this library; pass `shift_labels`
    for labels that are shifted already, as the official trainer's are."""

    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}
    model_class = FoxModel

    def __init__(self, config: FoxConfig):
        super().__init__(config)
        self.model = self.model_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.model.embeddings

    def set_input_embeddings(self, value):
        self.model.embeddings = value

    def get_output_embeddings(self):
        return self.lm_head

    def set_output_embeddings(self, value):
        self.lm_head = value

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        inputs_embeds=None,
        past_key_values=None,
        labels=None,
        shift_labels=None,
        use_cache=None,
        output_hidden_states=None,
        return_dict=None,
        logits_to_keep=0,
        **kwargs,
    ):
        out = self.model(
            input_ids,
            attention_mask,
            inputs_embeds,
            past_key_values,
            use_cache,
            output_hidden_states=output_hidden_states,
        )
        h = out.last_hidden_state
        if isinstance(logits_to_keep, int):
            h = h[:, -logits_to_keep:] if logits_to_keep else h
        else:
            h = h[:, logits_to_keep]
        logits = self.lm_head(h)
        loss = None
        if labels is not None or shift_labels is not None:
            loss = _loss(logits, labels, shift_labels, kwargs.get("num_items_in_batch"))
        result = CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=out.past_key_values, hidden_states=out.hidden_states
        )
        return result if return_dict in (None, True) else result.to_tuple()


def _loss(logits, labels, shift_labels, items):
    """Mean cross-entropy in float32, over the labels that are not -100, or over `items` of an accumulated batch."""
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
    flat, targets = logits.float().flatten(0, 1), shift_labels.flatten().to(logits.device)
    if items is None:
        return F.cross_entropy(flat, targets)
    return F.cross_entropy(flat, targets, reduction="sum") / items


class FoxTransformerModel(FoxModel):
    """The official Transformer's blocks."""

    config_class = FoxTransformerConfig


class FoxTransformerForCausalLM(FoxForCausalLM):
    """The official Transformer."""

    config_class = FoxTransformerConfig
    model_class = FoxTransformerModel


class FlaFoxModel(FoxModel):
    """The blocks as flash-linear-attention stores them."""

    config_class = FlaFoxConfig


class FlaFoxForCausalLM(FoxForCausalLM):
    """FoX as flash-linear-attention stores it."""

    config_class = FlaFoxConfig
    model_class = FlaFoxModel
